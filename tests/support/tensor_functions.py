"""Functions of torch on small tensors, most of which do not divide evenly, for the survey of operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from tensor_compositions import (
    adagrad,
    adamw,
    alibi,
    assigned,
    attention,
    clipped,
    experts,
    foreach_adam,
    fused,
    grouped,
    gru,
    next_token,
    rms_norm,
    rmsprop,
    rope,
    rope_complex,
    sgd,
    through_view,
    written,
)
from torch import Tensor

__all__ = ["FUNCTIONS", "Function"]

Make: TypeAlias = Callable[[torch.Generator], Tensor]


class Function(NamedTuple):
    """A function and what makes its inputs. `grad`: whether the gradients of its floating inputs are asked for too."""

    call: Callable[..., Any]
    inputs: tuple[Make, ...]
    grad: bool = True


def normal(*shape: int) -> Make:
    return lambda g: torch.randn(shape, generator=g)


def positive(*shape: int) -> Make:
    return lambda g: torch.rand(shape, generator=g) + 0.5


def unit(*shape: int) -> Make:
    """Numbers between 0.05 and 0.95."""
    return lambda g: torch.rand(shape, generator=g) * 0.9 + 0.05


def ints(high: int, *shape: int) -> Make:
    return lambda g: torch.randint(high, shape, generator=g)


def bools(*shape: int) -> Make:
    return lambda g: torch.rand(shape, generator=g) > 0.4


def signs(*shape: int) -> Make:
    return lambda g: torch.sign(torch.randn(shape, generator=g))


def distinct(g: torch.Generator) -> Tensor:
    """Two different columns of six for each of seven rows."""
    return torch.rand(7, 6, generator=g).argsort(1)[:, :2]


def causal(g: torch.Generator) -> Tensor:
    return torch.ones(8, 8).tril().bool()


def order(length: int) -> Make:
    return lambda g: torch.randperm(length, generator=g)


A = normal(7, 6)
B = normal(4, 6)
C = normal(3, 7, 6)
POSITIVE = positive(7, 6)
UNIT = unit(7, 6)
IMAGE = normal(3, 4, 6, 5)
HEADS = normal(2, 3, 8, 4)


def of(call: Callable[..., Any], *inputs: Make) -> Function:
    return Function(call, inputs)


def only(call: Callable[..., Any], *inputs: Make) -> Function:
    """Without gradients: it has none, or it writes into its inputs."""
    return Function(call, inputs, grad=False)


POINTWISE: dict[str, Function] = {
    "add": of(lambda x, y: x + y, A, A),
    "sub": of(lambda x, y: x - y, A, A),
    "mul": of(lambda x, y: x * y, A, A),
    "div": of(lambda x, y: x / y, A, POSITIVE),
    "broadcast": of(lambda x, y: x + y, A, normal(6)),
    "broadcast_column": of(lambda x, y: x * y, A, normal(7, 1)),
    "broadcast_both": of(lambda x, y: x - y, normal(7, 1), normal(6)),
    "scalar": of(lambda x: 2 * x + 1, A),
    "rsub": of(lambda x: 1 - x, A),
    "reciprocal": of(lambda x: 1 / x, POSITIVE),
    "pow": of(lambda x: x**2, A),
    "pow_tensor": of(lambda x, y: x**y, POSITIVE, A),
    "rpow": of(lambda x: 2**x, A),
    "neg": of(lambda x: -x, A),
    "abs": of(torch.abs, A),
    "sign": of(torch.sign, A),
    "exp": of(torch.exp, A),
    "expm1": of(torch.expm1, A),
    "log": of(torch.log, POSITIVE),
    "log1p": of(torch.log1p, POSITIVE),
    "log2": of(torch.log2, POSITIVE),
    "sqrt": of(torch.sqrt, POSITIVE),
    "rsqrt": of(torch.rsqrt, POSITIVE),
    "sin": of(torch.sin, A),
    "cos": of(torch.cos, A),
    "atan2": of(torch.atan2, A, POSITIVE),
    "tanh": of(torch.tanh, A),
    "erf": of(torch.erf, A),
    "sigmoid": of(torch.sigmoid, A),
    "logsigmoid": of(F.logsigmoid, A),
    "relu": of(torch.relu, A),
    "relu6": of(F.relu6, A),
    "leaky_relu": of(lambda x: F.leaky_relu(x, 0.1), A),
    "elu": of(F.elu, A),
    "gelu": of(F.gelu, A),
    "gelu_tanh": of(lambda x: F.gelu(x, approximate="tanh"), A),
    "gpt2_gelu": of(lambda x: 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * torch.pow(x, 3.0)))), A),
    "silu": of(F.silu, A),
    "mish": of(F.mish, A),
    "softplus": of(F.softplus, A),
    "hardtanh": of(F.hardtanh, A),
    "hardswish": of(F.hardswish, A),
    "glu": of(F.glu, A),
    "swiglu": of(lambda x, g, u: F.silu(x @ g) * (x @ u), A, normal(6, 5), normal(6, 5)),
    "prelu": of(F.prelu, A, normal(6)),
    "clamp": of(lambda x: x.clamp(-1, 1), A),
    "clamp_min": of(lambda x: x.clamp(min=0.2), A),
    "clamp_tensor": of(lambda x, y: torch.clamp(x, min=y), A, A),
    "maximum": of(torch.maximum, A, A),
    "minimum": of(torch.minimum, A, A),
    "where": of(lambda x, y: torch.where(x > 0, x, y), A, A),
    "where_scalar": of(lambda m, x: torch.where(m, x, 0.0), bools(7, 6), A),
    "masked_fill": of(lambda x: x.masked_fill(x > 0, 0.0), A),
    "masked_fill_row": of(lambda x, m: x.masked_fill(m, -1.0), A, bools(6)),
    "lerp": of(lambda x, y: torch.lerp(x, y, 0.3), A, A),
    "addcmul": of(lambda x, y: torch.addcmul(x, x, y), A, A),
    "addcdiv": of(lambda x, y: torch.addcdiv(x, x, y, value=0.5), A, POSITIVE),
    "floor": only(torch.floor, A),
    "round": only(torch.round, A),
    "remainder": only(lambda x: x % 0.7, A),
    "floor_divide": only(lambda x: x // 3, ints(20, 7, 6)),
    "bitwise": only(lambda x, y: (x & y) | ~x, bools(7, 6), bools(7, 6)),
    "logical": only(lambda x, y: torch.logical_and(x > 0, torch.logical_not(y > 0)), A, A),
    "eq": only(lambda x, y: x == y, ints(3, 7, 6), ints(3, 7, 6)),
    "less": only(lambda x, y: x < y, A, A),
    "isnan": only(torch.isnan, A),
    "isfinite": only(torch.isfinite, A),
    "to": of(lambda x: x.to(torch.float64), A),
    "bf16": of(lambda x: x.bfloat16().float(), A),
    "to_int": only(lambda x: (x * 3).long(), A),
    "clone": of(torch.clone, A),
    "detach": only(lambda x: x.detach() + 1, A),
    "zeros_like": only(torch.zeros_like, A),
    "ones_like": of(lambda x: x + torch.ones_like(x), A),
    "full_like": of(lambda x: x * torch.full_like(x, 2.5), A),
    "new_zeros": only(lambda x: x.new_zeros(7, 6), A),
    "new_ones": only(lambda x: x.new_ones(5, 6) + 1, A),
    "ones": of(lambda x: x + torch.ones(7, 6), A),
    "arange": of(lambda x: x * torch.arange(6), A),
    "nan_to_num": of(torch.nan_to_num, A),
}

REDUCTIONS: dict[str, Function] = {
    "sum": of(torch.sum, A),
    "sum_rows": of(lambda x: x.sum(0), A),
    "sum_kept": of(lambda x: x.sum(1, keepdim=True), A),
    "sum_two": of(lambda x: x.sum((0, 2)), C),
    "sum_bool": only(lambda x: (x > 0).sum(1), A),
    "mean": of(torch.mean, A),
    "mean_rows": of(lambda x: x.mean(0), A),
    "mean_kept": of(lambda x: x - x.mean(-1, keepdim=True), A),
    "mean_then_sum": of(lambda x: x.mean(0).sum(), A),
    "mean_added": of(lambda x: x.mean(0) + 1, A),
    "mean_of_two": of(lambda x: x.mean((0, 1)), C),
    "max": of(torch.max, A),
    "min": of(torch.min, A),
    "amax": of(lambda x: x.amax(1), A),
    "amin": of(lambda x: x.amin((0, 1)), A),
    "max_rows": of(lambda x: x.max(1)[0], A),
    "max_indices": only(lambda x: x.max(0)[1], A),
    "argmax": only(lambda x: x.argmax(1), A),
    "argmax_all": only(torch.argmax, A),
    "argmin": only(lambda x: x.argmin(0), A),
    "var": of(lambda x: x.var(1), A),
    "var_rows": of(lambda x: x.var(0, correction=0), A),
    "std": of(torch.std, A),
    "var_mean": of(lambda x: torch.var_mean(x, 0), A),
    "prod": of(lambda x: x.prod(1), A),
    "cumsum": of(lambda x: x.cumsum(1), A),
    "cumsum_rows": of(lambda x: x.cumsum(0), A),
    "cumprod": of(lambda x: x.cumprod(1), POSITIVE),
    "cummax": only(lambda x: x.cummax(0)[0], A),
    "logcumsumexp": only(lambda x: x.logcumsumexp(0), A),
    "logsumexp": of(lambda x: x.logsumexp(1), A),
    "logsumexp_rows": of(lambda x: x.logsumexp(0), A),
    "any": only(lambda x: (x > 0).any(), A),
    "all_rows": only(lambda x: (x > -1).all(0), A),
    "count_nonzero": only(lambda x: torch.count_nonzero(x > 0), A),
    "norm": of(lambda x: x.norm(), A),
    "norm_rows": of(lambda x: x.norm(dim=0), A),
    "norm_one": of(lambda x: x.norm(p=1), A),
    "norm_inf": of(lambda x: torch.linalg.vector_norm(x, float("inf"), dim=1), A),
    "norm_three": of(lambda x: torch.linalg.vector_norm(x, 3.0), A),
    "vector_norm": of(lambda x: torch.linalg.vector_norm(x, dim=1), A),
    "vector_norm_sum": of(lambda x: torch.linalg.vector_norm(x, dim=1).sum(), A),
    "vector_norm_mean": of(lambda x: torch.linalg.vector_norm(x, dim=0).mean() * 2, A),
    "matrix_norm": of(torch.linalg.matrix_norm, A),
    "normalize": of(lambda x: F.normalize(x, dim=-1), A),
    "cosine": of(lambda x, y: F.cosine_similarity(x, y, dim=1), A, A),
    "trace": of(torch.trace, normal(6, 6)),
    "softmax": of(lambda x: x.softmax(-1), A),
    "softmax_rows": of(lambda x: x.softmax(0), A),
    "log_softmax": of(lambda x: x.log_softmax(-1), A),
    "log_softmax_rows": of(lambda x: x.log_softmax(0), A),
    "softmin": of(lambda x: F.softmin(x, dim=1), A),
    "entropy": of(lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean(), A),
    "topk": of(lambda x: x.topk(2, 1)[0], A),
    "topk_rows": only(lambda x: x.topk(3, 0), A),
    "sort": of(lambda x: x.sort(1)[0], A),
    "sort_rows": only(lambda x: x.sort(0, descending=True), A),
    "argsort": only(lambda x: x.argsort(1), A),
    "kthvalue": only(lambda x: x.kthvalue(2, dim=1)[0], A),
    "median": only(lambda x: x.median(dim=1)[0], A),
    "aminmax": only(lambda x: torch.aminmax(x), A),
    "histogram": only(lambda x: torch.histc(x, 5, -2.0, 2.0), A),
    "searchsorted": only(lambda s, x: torch.searchsorted(s.sort(0)[0], x), normal(7), A),
    "bucketize": only(lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])), A),
    "diff": of(lambda x: x.diff(dim=0), A),
}

MATRICES: dict[str, Function] = {
    "matmul": of(torch.matmul, A, normal(6, 5)),
    "matmul_batches": of(torch.matmul, C, normal(6, 5)),
    "matmul_deep": of(torch.matmul, HEADS, normal(2, 3, 4, 5)),
    "addmm": of(torch.addmm, normal(5), A, normal(6, 5)),
    "bmm": of(torch.bmm, C, normal(3, 6, 5)),
    "baddbmm": of(lambda c, x, y: torch.baddbmm(c, x, y, beta=0.5), normal(3, 7, 5), C, normal(3, 6, 5)),
    "linear": of(F.linear, C, normal(5, 6), normal(5)),
    "linear_plain": of(F.linear, A, normal(5, 6)),
    "conv1d_of_gpt2": of(lambda x, w, c: torch.addmm(c, x.view(-1, 6), w).view(3, 7, 9), C, normal(6, 9), normal(9)),
    "mlp": of(lambda x, u, d: F.gelu(x @ u) @ d, C, normal(6, 8), normal(8, 6)),
    "outer": of(torch.outer, normal(7), normal(6)),
    "mv": of(torch.mv, A, normal(6)),
    "dot": of(torch.dot, normal(7), normal(7)),
    "einsum_rows": of(lambda x, y: torch.einsum("ij,kj->ik", x, y), A, normal(5, 6)),
    "einsum_heads": of(lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k), HEADS, HEADS),
    "einsum_experts": of(lambda x, w: torch.einsum("ti,eio->eto", x, w), A, normal(3, 6, 5)),
    "einsum_sum": of(lambda x, y: torch.einsum("bti,bti->b", x, y), C, C),
    "einsum_three": of(lambda x, y, z: torch.einsum("ij,jk,kl->il", x, y, z), A, normal(6, 5), normal(5, 4)),
    "tensordot": of(lambda x, y: torch.tensordot(x, y, dims=([1], [0])), A, normal(6, 5)),
    "bilinear": of(F.bilinear, A, normal(7, 4), normal(3, 6, 4)),
    "kron": of(torch.kron, normal(3, 2), normal(2, 3)),
    "cdist": of(torch.cdist, A, normal(5, 6)),
    "matrix_power": of(lambda x: torch.matrix_power(x, 3), normal(5, 5)),
    "gram": of(lambda x: x.t() @ x, A),
    "low_rank": of(lambda x, a, b, w: x @ w + (x @ a) @ b * 2, A, normal(6, 2), normal(2, 5), normal(6, 5)),
    "gru": of(gru, normal(7, 4), normal(7, 5), normal(4, 15), normal(5, 15)),
    "experts": of(experts, A, normal(6, 3), normal(3, 6, 4), normal(3, 4, 5)),
}

SHAPES: dict[str, Function] = {
    "t": of(torch.t, A),
    "permute": of(lambda x: x.permute(2, 0, 1), C),
    "transpose": of(lambda x: x.transpose(0, 1).contiguous(), C),
    "movedim": of(lambda x: x.movedim(0, 2), C),
    "view": of(lambda x: x.view(21, 6), C),
    "view_last": of(lambda x: x.view(3, 42), C),
    "view_heads": of(lambda x: x.view(7, 2, 3).transpose(0, 1), A),
    "flatten": of(torch.flatten, B),
    "flatten_batch": of(lambda x: x.flatten(0, 1), C),
    "unflatten": of(lambda x: x.unflatten(1, (2, 3)), A),
    "unflatten_rows": of(lambda x: x.unflatten(0, (2, 2)), B),
    "reshape": of(lambda x: x.reshape(6, 7), A),
    "reshape_after_transpose": of(lambda x: x.transpose(0, 1).reshape(7, 18), C),
    "back_from_heads": of(lambda x: x.transpose(1, 2).reshape(2, 8, 12), HEADS),
    "unsqueeze": of(lambda x: x.unsqueeze(0), A),
    "squeeze": of(lambda x: x.squeeze(1), normal(7, 1, 6)),
    "squeeze_all": of(torch.squeeze, normal(7, 1, 6)),
    "expand": of(lambda x: x.expand(4, 7, 6), normal(1, 7, 6)),
    "expand_new": of(lambda x: x.expand(4, -1, -1) * 2, A),
    "repeat": of(lambda x: x.repeat(2, 1), A),
    "tile": of(lambda x: x.tile(1, 3), A),
    "repeat_interleave": of(lambda x: x.repeat_interleave(2, dim=0), A),
    "select": of(lambda x: x[2], A),
    "select_last": of(lambda x: x[:, -1], A),
    "slice": of(lambda x: x[1:5], A),
    "slice_step": of(lambda x: x[:, ::2], A),
    "slice_all": of(lambda x: x[:, :] + 1, A),
    "narrow": of(lambda x: x.narrow(1, 1, 3), A),
    "ellipsis": of(lambda x: x[..., None, 2:], C),
    "split": of(lambda x: x.split(3, 1)[1], A),
    "split_sizes": of(lambda x: x.split((1, 2, 4), 0), A),
    "chunk": of(lambda x: x.chunk(2)[0], A),
    "unbind": of(lambda x: x.unbind(0)[1], A),
    "unbind_all": of(lambda x: sum(x.unbind(1)), A),
    "cat": of(lambda x, y: torch.cat([x, y]), A, A),
    "cat_columns": of(lambda x, y: torch.cat([x, y], 1), A, A),
    "cat_uneven": of(lambda x, y: torch.cat([x, y]), A, B),
    "stack": of(lambda x, y: torch.stack([x, y]), A, A),
    "stack_last": of(lambda x, y: torch.stack([x, y], -1), A, A),
    "flip": of(lambda x: x.flip(0), A),
    "roll": of(lambda x: x.roll(1, 0), A),
    "rot90": of(torch.rot90, A),
    "pad": of(lambda x: F.pad(x, (1, 1)), A),
    "pad_rows": of(lambda x: F.pad(x, (0, 0, 0, 2), value=1.0), A),
    "pad_reflect": of(lambda x: F.pad(x, (1, 2), mode="reflect"), C),
    "pad_circular": of(lambda x: F.pad(x, (1, 1), mode="circular"), C),
    "tril": of(torch.tril, A),
    "triu": of(lambda x: x.triu(1), A),
    "diagonal": of(torch.diagonal, normal(6, 6)),
    "diag_embed": of(torch.diag_embed, A),
    "as_blocks": of(lambda x: x.unfold(0, 3, 2), A),
    "swap": of(lambda x: x.swapaxes(0, 2)[1], C),
    "meshgrid": of(lambda x, y: torch.meshgrid(x, y, indexing="ij"), normal(7), normal(6)),
    "real": of(lambda x: torch.view_as_complex(x.view(7, 3, 2)).abs(), A),
    "rope_complex": of(rope_complex, A, normal(7, 3)),
    "rope": of(rope, HEADS, normal(8, 4)),
    "contiguous": of(lambda x: x.t().contiguous().view(-1), A),
    "pixel_shuffle": of(lambda x: F.pixel_shuffle(x, 2), IMAGE),
}

INDEXING: dict[str, Function] = {
    "index": of(lambda x: x[[0, 3, 3]], A),
    "index_tensor": of(lambda x, i: x[i], A, ints(7, 4)),
    "index_column": of(lambda x, i: x[:, i], A, ints(6, 4)),
    "index_pairs": of(lambda x, i, j: x[i, j], A, ints(7, 5), ints(6, 5)),
    "index_arange": of(lambda x, j: x[torch.arange(7), j], A, ints(6, 7)),
    "gather": of(lambda x, i: x.gather(1, i), A, ints(6, 7, 3)),
    "gather_rows": of(lambda x, i: x.gather(0, i), A, ints(7, 4, 6)),
    "take_along": of(lambda x, i: torch.take_along_dim(x, i, 1), A, ints(6, 7, 1)),
    "take": of(torch.take, A, ints(42, 5)),
    "index_select": of(lambda x, i: x.index_select(0, i), A, ints(7, 4)),
    "index_select_columns": of(lambda x, i: x.index_select(1, i), A, ints(6, 4)),
    "embedding": of(lambda w, i: F.embedding(i, w), A, ints(7, 3, 4)),
    "embedding_padding": of(lambda w, i: F.embedding(i, w, padding_idx=2), A, ints(7, 3, 4)),
    "embedding_twice": of(lambda w, i, p: F.embedding(i, w) + p[torch.arange(4)], A, ints(7, 3, 4), normal(5, 6)),
    "embedding_tied": of(lambda w, i: F.linear(F.embedding(i, w), w), A, ints(7, 3, 4)),
    "embedding_bag": only(lambda w, i: F.embedding_bag(i, w, mode="sum"), A, ints(7, 3, 4)),
    "one_hot": only(lambda i: F.one_hot(i, 7), ints(7, 5)),
    "scatter": of(lambda x, i, s: x.scatter(1, i, s), A, distinct, normal(7, 2)),
    "scatter_value": only(lambda x, i: x.scatter(0, i, 2.0), A, ints(7, 2, 6)),
    "scatter_add": of(lambda x, i, s: x.scatter_add(1, i, s), A, ints(6, 7, 4), normal(7, 4)),
    "scatter_add_rows": of(lambda x, i, s: x.scatter_add(0, i, s), A, ints(7, 4, 6), normal(4, 6)),
    "scatter_reduce": only(lambda x, i, s: x.scatter_reduce(1, i, s, "amax"), A, ints(6, 7, 4), normal(7, 4)),
    "index_add": of(lambda x, i, s: x.index_add(0, i, s), A, ints(7, 4), normal(4, 6)),
    "index_add_columns": of(lambda x, i, s: x.index_add(1, i, s, alpha=2), A, ints(6, 4), normal(7, 4)),
    "index_copy": of(lambda x, s: x.index_copy(0, torch.tensor([1, 4, 2]), s), A, normal(3, 6)),
    "index_fill": of(lambda x: x.index_fill(1, torch.tensor([1, 4]), 0.5), A),
    "index_put": of(lambda x, s: x.index_put((torch.tensor([1, 4, 2]),), s), A, normal(3, 6)),
    "index_put_sum": of(lambda x, i, s: x.index_put((i,), s, accumulate=True), A, ints(7, 4), normal(4, 6)),
    "select_scatter": of(lambda x, s: x.select_scatter(s, 0, 3), A, normal(6)),
    "slice_scatter": of(lambda x, s: x.slice_scatter(s, 1, 1, 4), A, normal(7, 3)),
    "order": of(lambda x, i: x[i], A, order(7)),
    "sorted_by": of(lambda x, k: x[k.argsort()], A, normal(7)),
    "cache": of(lambda c, k: torch.cat([c, k], dim=-2), HEADS, normal(2, 3, 1, 4)),
}

NORMS: dict[str, Function] = {
    "layer_norm": of(lambda x, w, b: F.layer_norm(x, (6,), w, b), A, normal(6), normal(6)),
    "layer_norm_deep": of(lambda x, w, b: F.layer_norm(x, (6,), w, b), C, normal(6), normal(6)),
    "layer_norm_two": of(lambda x, w: F.layer_norm(x, (7, 6), w), C, A),
    "layer_norm_plain": of(lambda x: F.layer_norm(x, (6,)), A),
    "rms_norm": of(lambda x: F.rms_norm(x, (6,)), A),
    "rms_norm_weight": of(lambda x, w: F.rms_norm(x, (6,), w, 1e-6), C, normal(6)),
    "rms_norm_llama": of(rms_norm, C, normal(6)),
    "group_norm": of(lambda x, w, b: F.group_norm(x, 2, w, b), normal(3, 4, 5), normal(4), normal(4)),
    "instance_norm": of(F.instance_norm, normal(3, 4, 5)),
    "batch_norm": of(lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), A, normal(6), normal(6)),
    "batch_norm_eval": of(
        lambda x, m, v, w: F.batch_norm(x, m.detach(), v.detach(), w), A, normal(6), positive(6), normal(6)
    ),
    "local_response": of(lambda x: F.local_response_norm(x, 3), normal(3, 4, 5)),
    "standardize": of(lambda x: (x - x.mean(0)) / (x.std(0) + 1e-5), A),
    "weight_norm": of(lambda v, g: torch._weight_norm(v, g, 0), A, normal(7, 1)),  # noqa: SLF001 - of parametrizations
}

LOSSES: dict[str, Function] = {
    "cross_entropy": of(F.cross_entropy, A, ints(6, 7)),
    "cross_entropy_sum": of(lambda x, i: F.cross_entropy(x, i, reduction="sum"), A, ints(6, 7)),
    "cross_entropy_each": of(lambda x, i: F.cross_entropy(x, i, reduction="none"), A, ints(6, 7)),
    "cross_entropy_weights": of(lambda x, i, w: F.cross_entropy(x, i, w.detach()), A, ints(6, 7), positive(6)),
    "cross_entropy_ignored": of(lambda x, i: F.cross_entropy(x, i, ignore_index=2), A, ints(6, 7)),
    "cross_entropy_ignored_even": of(lambda x, i: F.cross_entropy(x, i, ignore_index=1), normal(12, 3), ints(3, 12)),
    "cross_entropy_smooth": of(lambda x, i: F.cross_entropy(x, i, label_smoothing=0.1), A, ints(6, 7)),
    "cross_entropy_soft": of(lambda x, y: F.cross_entropy(x, y.softmax(1)), A, A),
    "cross_entropy_tokens": of(lambda x, i: F.cross_entropy(x.flatten(0, 1), i.flatten()), C, ints(6, 3, 7)),
    "cross_entropy_dims": of(F.cross_entropy, normal(3, 5, 4), ints(5, 3, 4)),
    "next_token": of(next_token, normal(2, 8, 7), ints(7, 2, 8)),
    "lm_head": of(lambda x, w, i: F.cross_entropy((x @ w.t()).view(-1, 9), i.view(-1)), C, normal(9, 6), ints(9, 3, 7)),
    "nll": of(F.nll_loss, A, ints(6, 7)),
    "log_prob": of(lambda x, i: x.log_softmax(-1).gather(-1, i[:, None]).squeeze(-1), A, ints(6, 7)),
    "mse": of(F.mse_loss, A, A),
    "mse_sum": of(lambda x, y: F.mse_loss(x, y, reduction="sum"), A, A),
    "mse_each": of(lambda x, y: F.mse_loss(x, y, reduction="none"), A, A),
    "l1": of(F.l1_loss, A, A),
    "smooth_l1": of(F.smooth_l1_loss, A, A),
    "huber": of(F.huber_loss, A, A),
    "bce": of(F.binary_cross_entropy, UNIT, UNIT),
    "bce_logits": of(lambda x, y: F.binary_cross_entropy_with_logits(x, y), A, UNIT),
    "bce_logits_weight": of(
        lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, pos_weight=w.detach()), A, UNIT, positive(6)
    ),
    "kl": of(lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"), A, A),
    "kl_mean": of(lambda x, y: F.kl_div(x.log_softmax(1), y.log_softmax(1), log_target=True), A, A),
    "hinge": of(lambda x, y: F.soft_margin_loss(x, y.detach()), A, signs(7, 6)),
    "margin_ranking": of(F.margin_ranking_loss, normal(7), normal(7), signs(7)),
    "cosine_embedding": of(F.cosine_embedding_loss, A, A, signs(7)),
    "triplet": of(F.triplet_margin_loss, A, A, A),
    "poisson": of(F.poisson_nll_loss, A, POSITIVE),
    "gaussian": of(F.gaussian_nll_loss, A, A, POSITIVE),
    "multilabel": of(F.multilabel_soft_margin_loss, A, UNIT),
    "z_loss": of(lambda x, i: F.cross_entropy(x, i) + 1e-2 * x.logsumexp(-1).pow(2).mean(), A, ints(6, 7)),
    "accuracy": only(lambda x, i: (x.argmax(1) == i).float().mean(), A, ints(6, 7)),
}

ATTENTION: dict[str, Function] = {
    "sdpa": of(F.scaled_dot_product_attention, HEADS, HEADS, HEADS),
    "sdpa_causal": of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), HEADS, HEADS, HEADS),
    "sdpa_scaled": of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.2), HEADS, HEADS, HEADS),
    "sdpa_mask": of(F.scaled_dot_product_attention, HEADS, HEADS, HEADS, causal),
    "sdpa_bias": only(F.scaled_dot_product_attention, HEADS, HEADS, HEADS, normal(2, 1, 8, 8)),
    "sdpa_across": of(F.scaled_dot_product_attention, HEADS, normal(2, 3, 5, 4), normal(2, 3, 5, 4)),
    "sdpa_grouped": of(grouped, normal(2, 6, 8, 4), HEADS, HEADS),
    "attention": of(attention, HEADS, HEADS, HEADS),
    "attention_fused": of(fused, C, normal(18, 6), normal(18)),
    "alibi": of(alibi, HEADS, HEADS),
    "linear_attention": of(
        lambda q, k, v: (F.elu(q) + 1) @ ((F.elu(k) + 1).transpose(-2, -1) @ v), HEADS, HEADS, HEADS
    ),
}

IMAGES: dict[str, Function] = {
    "conv1d": of(F.conv1d, normal(4, 3, 8), normal(5, 3, 3)),
    "conv1d_bias": of(lambda x, w, b: F.conv1d(x, w, b, padding=1), normal(4, 3, 8), normal(5, 3, 3), normal(5)),
    "conv1d_depthwise": of(lambda x, w: F.conv1d(x, w, padding=2, groups=3), normal(4, 3, 8), normal(3, 1, 3)),
    "conv1d_strided": of(lambda x, w: F.conv1d(x, w, stride=2), normal(4, 3, 8), normal(5, 3, 3)),
    "conv2d": of(lambda x, w, b: F.conv2d(x, w, b, padding=1), IMAGE, normal(5, 4, 3, 3), normal(5)),
    "conv2d_patches": of(lambda x, w: F.conv2d(x, w, stride=2).flatten(2).transpose(1, 2), IMAGE, normal(5, 4, 2, 2)),
    "conv_transpose": of(F.conv_transpose1d, normal(4, 3, 8), normal(3, 5, 3)),
    "max_pool2d": of(lambda x: F.max_pool2d(x, 2), IMAGE),
    "avg_pool2d": of(lambda x: F.avg_pool2d(x, 2), IMAGE),
    "adaptive_pool": of(lambda x: F.adaptive_avg_pool2d(x, 1), IMAGE),
    "adaptive_pool_two": of(lambda x: F.adaptive_avg_pool2d(x, 2), IMAGE),
    "interpolate": of(lambda x: F.interpolate(x, scale_factor=2), IMAGE),
    "interpolate_bilinear": of(lambda x: F.interpolate(x, size=(4, 4), mode="bilinear"), IMAGE),
    "im2col": of(lambda x: F.unfold(x, 2), IMAGE),
    "fft": of(lambda x: torch.fft.rfft(x, dim=0).abs(), A),
}

IN_PLACE: dict[str, Function] = {
    "add_": of(written(lambda z, y: z.add_(y)), A, A),
    "add_alpha_": of(written(lambda z, y: z.add_(y, alpha=0.3)), A, A),
    "add_row_": of(written(lambda z, y: z.add_(y)), A, normal(6)),
    "mul_": of(written(lambda z, y: z.mul_(y)), A, A),
    "relu_": of(written(lambda z: z.relu_()), A),
    "zero_": only(written(lambda z: z.zero_()), A),
    "fill_": only(written(lambda z: z.fill_(2.0)), A),
    "copy_": of(written(lambda z, y: z.copy_(y)), A, A),
    "copy_row_": of(written(lambda z, y: z.copy_(y)), A, normal(6)),
    "clamp_": of(written(lambda z: z.clamp_(-0.5, 0.5)), A),
    "masked_fill_": of(written(lambda z, m: z.masked_fill_(m, 0.0)), A, bools(7, 6)),
    "addcmul_": of(written(lambda z, y: z.addcmul_(y, y, value=0.5)), A, A),
    "lerp_": of(written(lambda z, y: z.lerp_(y, 0.1)), A, A),
    "scatter_": only(written(lambda z, i: z.scatter_(1, i, 1.0)), A, ints(6, 7, 2)),
    "index_add_": of(written(lambda z, i, s: z.index_add_(0, i, s)), A, ints(7, 4), normal(4, 6)),
    "index_put_": of(written(lambda z, s: z.index_put_((torch.tensor([1, 4, 2]),), s)), A, normal(3, 6)),
    "index_copy_": only(written(lambda z, s: z.index_copy_(0, torch.tensor([1, 4, 2]), s)), A, normal(3, 6)),
    "tril_": only(written(lambda z: z.tril_()), A),
    "assigned": of(assigned, A, B),
    "assigned_column": only(written(lambda z, y: z[:, 2].copy_(y)), A, normal(7)),
    "through_view": of(through_view, A),
    "through_transpose": of(written(lambda z, y: z.t().add_(y)), A, normal(6, 7)),
    "mean_in_place": of(lambda x: x.pow(2).mean(-1).add_(1e-5).rsqrt_(), A),
    "norm_in_place": only(lambda x: x.norm(dim=0).add_(1.0), A),
    "sum_in_place": of(lambda x: x.sum(0).add_(1.0).mul_(2.0), A),
    "product_in_place": of(lambda x, w: (x @ w).add_(1.0), A, normal(6, 5)),
    "buffer": only(lambda x, m: m.mul_(0.9).add_(x.mean(0), alpha=0.1), A, normal(6)),
    "ema": only(lambda p, e: e.lerp_(p, 0.01), A, A),
    "sgd": only(sgd, A, A, A),
    "adamw": only(adamw, A, A, A, A),
    "rmsprop": only(rmsprop, A, A, A),
    "adagrad": only(adagrad, A, A, A),
    "foreach_adam": only(foreach_adam, A, A, A, POSITIVE),
    "foreach_norm": only(lambda g, h: torch.nn.utils.get_total_norm([g, h], foreach=True), A, B),
    "clipped": only(clipped, A, normal(6)),
}

FUNCTIONS: dict[str, Function] = {
    **POINTWISE, **REDUCTIONS, **MATRICES, **SHAPES, **INDEXING, **NORMS, **LOSSES, **ATTENTION, **IMAGES, **IN_PLACE,
}  # fmt: skip
