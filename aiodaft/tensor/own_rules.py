"""Rules of ours, where torch's table is wrong, or where doing the operation whole would gather what is large.

A rule says an operation by others on whole tensors, or emits local operations, whose numbers may differ by rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from aiodaft.tensor.instructions import ByRank, Instruction, Slot, slots_of
from aiodaft.tensor.local_functions import named
from aiodaft.tensor.rules import Rules
from aiodaft.tensor.specs import Meta, Placements, Spec, placed

aten = torch.ops.aten
_MEAN: Final = 1
_SUM: Final = 2


class Lowers(Protocol):
    rules: Rules

    def spec(self, number: int) -> Spec: ...
    def new(self, spec: Spec) -> int: ...
    def emit(self, instruction: Instruction) -> None: ...
    def redistribute(self, number: int, target: Placements) -> int: ...
    def apply(self, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any: ...
    def apply_whole(self, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any: ...


_Rule: TypeAlias = "Callable[[_Call], Any]"

_RULES: Final[dict[OpOverload[..., Any], _Rule]] = {}


def by_own_rule(lowers: Lowers, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The results of an operation that has a rule of ours, or NotImplemented: torch's table does it."""
    rule = _RULES.get(op)
    return NotImplemented if rule is None else rule(_Call(lowers, op, args, kwargs))


def _own(*names: str) -> Callable[[_Rule], _Rule]:
    def register(rule: _Rule) -> _Rule:
        for name in names:
            packet, _, overload = name.partition(".")
            if (found := getattr(getattr(aten, packet, None), overload or "default", None)) is not None:
                _RULES[found] = rule
        return rule

    return register


class _Call:
    def __init__(
        self, lowers: Lowers, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self.lowers = lowers
        self.op = op
        defaults = {one.name: one.default_value for one in op._schema.arguments if one.has_default_value()}
        names = [one.name for one in op._schema.arguments]
        self.given: dict[str, Any] = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}

    def __getitem__(self, name: str) -> Any:
        return self.given[name]

    def spec(self, name: str) -> Spec:
        return self.lowers.spec(self.given[name].number)

    def arguments(self, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        schema = self.op._schema.arguments
        return tuple(given[one.name] for one in schema if not one.kwarg_only), {
            one.name: given[one.name] for one in schema if one.kwarg_only
        }

    def again(self, changes: Mapping[str, Any]) -> Any:
        return self.lowers.apply(self.op, *self.arguments({**self.given, **changes}))

    def whole_at_all(self) -> Any:
        return self.lowers.apply_whole(self.op, *self.arguments(self.given))

    def whole(self, op: OpOverload[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.lowers.apply(op, args, kwargs)

    def local(self, spec: Spec, op: str, *args: Any, **kwargs: Any) -> Slot:
        out = self.lowers.new(spec)
        self.lowers.emit(Instruction("op", f"aten.{op}", args, kwargs, (out,)))
        return Slot(out)

    def at(self, value: Slot, placements: Placements) -> Slot:
        return Slot(self.lowers.redistribute(value.number, placements))


def _axes_of(spec: Spec, dim: int) -> list[int]:
    """The axes along which a dimension is cut; empty if any placement is neither replicas nor plain shards."""
    dim = dim % max(len(spec.meta.shape), 1)
    return [axis for axis, one in enumerate(spec.placements) if type(one) is Shard and one.dim == dim]


def _is_plain(spec: Spec) -> bool:
    return all(type(one) in (Shard, Replicate) for one in spec.placements)


def _but(placements: Placements, axes: Sequence[int], placement: Any) -> Placements:
    return tuple(placement if axis in axes else one for axis, one in enumerate(placements))


@_own("cat")
def _cat(call: _Call) -> Any:
    """Without tensors of shape (0,), which torch joins with those of any shape."""
    shapes = [call.lowers.spec(one.number).meta.shape for one in call["tensors"]]
    kept = [one for one, shape in zip(call["tensors"], shapes, strict=True) if shape != (0,)]
    if not kept or len(kept) == len(shapes) or all(len(shape) == 1 for shape in shapes):
        return NotImplemented
    return call.again({"tensors": kept})


# Means: the sum, divided by the count of the whole. Torch takes the mean of means, which is wrong for uneven parts.


@_own("mean", "mean.dim")
def _mean(call: _Call) -> Any:
    spec = call.spec("self")
    rank = len(spec.meta.shape)
    dims = [dim % max(rank, 1) for dim in call.given.get("dim") or range(rank)]
    if not any(isinstance(one, Shard) and one.dim in dims for one in spec.placements):
        return NotImplemented
    dtype = call["dtype"] or spec.meta.dtype
    wide = dtype if dtype.itemsize >= 4 else torch.float32
    keepdim = call.given.get("keepdim", False)
    total = call.whole(aten.sum.dim_IntList, call["self"], dims, keepdim, dtype=wide)
    mean = call.whole(aten.div.Scalar, total, math.prod(spec.meta.shape[dim] for dim in dims))
    return mean if wide == dtype else call.whole(aten._to_copy.default, mean, dtype=dtype)


_ELEMENTWISE = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss",
                "binary_cross_entropy_with_logits")  # fmt: skip


def _is_cut(call: _Call) -> bool:
    numbers = slots_of(call.given)
    return any(not one.is_replicate() for number in numbers for one in call.lowers.spec(number).placements)


@_own(*_ELEMENTWISE)
def _mean_loss(call: _Call) -> Any:
    if call["reduction"] != _MEAN or not _is_cut(call):
        return NotImplemented
    return call.whole(aten.div.Scalar, call.again({"reduction": _SUM}), math.prod(call.spec("self").meta.shape))


@_own(*(f"{name}_backward" for name in _ELEMENTWISE))
def _mean_loss_backward(call: _Call) -> Any:
    if call["reduction"] != _MEAN or not _is_cut(call):
        return NotImplemented
    each = call.whole(aten.div.Scalar, call["grad_output"], math.prod(call.spec("self").meta.shape))
    return call.again({"grad_output": each, "reduction": _SUM})


# Softmax and cross entropy with the classes in parts: what travels is one number for each row.


def _over_parts(call: _Call, name: str) -> list[int]:
    spec = call.spec(name)
    shapes = call.lowers.rules.local_shapes(spec)
    if not spec.meta.shape or not _is_plain(spec) or any(shape[call["dim"]] == 0 for shape in shapes):
        return []
    return _axes_of(spec, call["dim"])


@_own("_log_softmax", "_softmax")
def _softmax(call: _Call) -> Any:
    axes = _over_parts(call, "self")
    if not axes or call["half_to_float"]:
        return NotImplemented
    x, dim = call["self"], [call["dim"]]
    placements = call.spec("self").placements
    each = _but(placements, axes, Replicate())
    x = call.whole(aten.sub.Tensor, x, call.at(call.whole(aten.amax.default, x, dim, True), each))
    power = call.whole(aten.exp.default, x)
    total = call.at(call.whole(aten.sum.dim_IntList, power, dim, True), each)
    if call.op is aten._softmax.default:
        return call.whole(aten.div.Tensor, power, total)
    return call.whole(aten.sub.Tensor, x, call.whole(aten.log.default, total))


@_own("_log_softmax_backward_data", "_softmax_backward_data")
def _softmax_backward(call: _Call) -> Any:
    axes = _over_parts(call, "output")
    if not axes or call.spec("grad_output").meta.dtype != call["input_dtype"]:
        return NotImplemented
    y, dim = call["output"], [call["dim"]]
    placements = call.spec("output").placements
    grad = call.at(call["grad_output"], placements)
    each = _but(placements, axes, Replicate())
    if call.op is aten._softmax_backward_data.default:
        total = call.whole(aten.sum.dim_IntList, call.whole(aten.mul.Tensor, grad, y), dim, True)
        return call.whole(aten.mul.Tensor, y, call.whole(aten.sub.Tensor, grad, call.at(total, each)))
    total = call.at(call.whole(aten.sum.dim_IntList, grad, dim, True), each)
    share = call.whole(aten.mul.Tensor, call.whole(aten.exp.default, y), total)
    return call.whole(aten.sub.Tensor, grad, share)


@_own("nll_loss_forward")
def _nll_loss(call: _Call) -> Any:
    if not _is_cut(call):
        return NotImplemented
    if call["reduction"] == _MEAN:
        total, weight = call.again({"reduction": _SUM})
        return call.whole(aten.div.Tensor, total, weight), weight
    spec = call.spec("self")
    if call["weight"] is not None or len(spec.meta.shape) != 2 or not _axes_of(spec, 1) or not _is_plain(spec):
        return NotImplemented
    ignored = call.whole(aten.eq.Scalar, call["target"], call["ignore_index"])
    index = call.whole(aten.unsqueeze.default, call.whole(aten.masked_fill.Scalar, call["target"], ignored, 0), 1)
    picked = call.whole(aten.squeeze.dim, call.whole(aten.gather.default, call["self"], 1, index), 1)
    loss = call.whole(aten.masked_fill.Scalar, call.whole(aten.neg.default, picked), ignored, 0.0)
    kept = call.whole(aten.logical_not.default, ignored)
    if call["reduction"] == _SUM:
        weight = call.whole(aten.sum.default, kept, dtype=spec.meta.dtype)
        return call.whole(aten.sum.default, loss), weight
    return loss, call.whole(aten.zeros.default, [], dtype=spec.meta.dtype)


@_own("nll_loss_backward")
def _nll_loss_backward(call: _Call) -> Any:
    if not _is_cut(call):
        return NotImplemented
    if call["reduction"] == _MEAN:
        each = call.whole(aten.div.Tensor, call["grad_output"], call["total_weight"])
        return call.again({"grad_output": each, "reduction": _SUM})
    spec = call.spec("self")
    axes = _axes_of(spec, 1)
    if call["weight"] is not None or len(spec.meta.shape) != 2 or len(axes) != 1 or not _is_plain(spec):
        return NotImplemented
    ignored = call.whole(aten.eq.Scalar, call["target"], call["ignore_index"])
    target = call.whole(aten.masked_fill.Scalar, call["target"], ignored, -1)
    rows = _but(spec.placements, axes, Replicate())
    column = call.at(call.whole(aten.unsqueeze.default, target, 1), rows)
    classes = tuple(Shard(0) if axis in axes else Replicate() for axis in range(len(rows)))
    first, end = _range(call.lowers.rules, spec, 1)
    mine = call.local(Spec(classes, _meta(spec.meta.shape[1:], torch.int64)), "arange.start", first, end)
    hit = call.local(Spec(spec.placements, _meta(spec.meta.shape, torch.bool)), "eq.Tensor", column, mine)
    grad = call.whole(aten.neg.default, call["grad_output"])
    if call.lowers.spec(grad.number).meta.shape:
        grad = call.whole(aten.unsqueeze.default, grad, 1)
    return call.whole(aten.mul.Tensor, hit, grad)


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> Meta:
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return Meta(shape, strides, dtype)


def _range(rules: Rules, spec: Spec, dim: int) -> tuple[ByRank, ByRank]:
    firsts = [rules.offset(spec, rank)[dim] for rank in range(rules.size)]
    lengths = [shape[dim] for shape in rules.local_shapes(spec)]
    return ByRank(tuple(firsts)), ByRank(tuple(a + b for a, b in zip(firsts, lengths, strict=True)))


# Rows of others are zero, and the sum over the ranks is the row.


@_own("gather")
def _gather(call: _Call) -> Any:
    spec, index = call.spec("self"), call.spec("index")
    if not spec.meta.shape or call["sparse_grad"] or not _is_plain(spec):
        return NotImplemented
    dim = call["dim"] % len(spec.meta.shape)
    axes = _axes_of(spec, dim)
    others = [one.dim for one in spec.placements if isinstance(one, Shard) and one.dim != dim]
    fits = all(spec.meta.shape[other] == index.meta.shape[other] for other in others)
    if len(axes) != 1 or not fits or any(shape[dim] == 0 for shape in call.lowers.rules.local_shapes(spec)):
        return NotImplemented
    placements = _but(spec.placements, axes, Replicate())
    at = call.at(call["index"], placements)
    here, mask = Spec(placements, index.meta), Spec(placements, _meta(index.meta.shape, torch.bool))
    first, end = _range(call.lowers.rules, spec, dim)
    outside = call.local(
        mask, "bitwise_or.Tensor", call.local(mask, "lt.Scalar", at, first), call.local(mask, "ge.Scalar", at, end)
    )
    mine = call.local(here, "masked_fill.Scalar", call.local(here, "sub.Scalar", at, first), outside, 0)
    result = Spec(_but(placements, axes, Partial("sum")), _meta(index.meta.shape, spec.meta.dtype))
    return call.local(
        result, "masked_fill.Scalar", call.local(result, "gather.default", call["self"], dim, mine), outside, 0
    )


@_own("embedding")
def _embedding(call: _Call) -> Any:
    spec, index = call.spec("weight"), call.spec("indices")
    axes = _axes_of(spec, 0)
    last = len(index.meta.shape)
    if len(axes) != 1 or not _is_plain(spec) or not _is_plain(index):
        return NotImplemented
    given = _but(index.placements, [a for a, one in enumerate(spec.placements) if isinstance(one, Shard)], Replicate())
    indices = call.at(call["indices"], given)
    columns = [axis for axis, one in enumerate(spec.placements) if isinstance(one, Shard) and one.dim == 1]
    placements = _but(_but(given, columns, Shard(last)), axes, Partial("sum"))
    out = call.lowers.new(Spec(placements, _meta((*index.meta.shape, spec.meta.shape[1]), spec.meta.dtype)))
    weight = Slot(call.lowers.redistribute(call["weight"].number, spec.placements))
    axis = tuple(call.lowers.rules.axes)[axes[0]]
    call.lowers.emit(Instruction("embedding", axis, (weight, indices, spec.meta.shape[0]), {}, (out,)))
    return Slot(out)


# Attention on CPU, which torch's table does not have: by batch and by head.


@_own("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
def _attention(call: _Call) -> Any:
    tensors = {name: one for name, one in call.given.items() if isinstance(one, Slot)}
    given = [call.spec(name).placements for name in tensors]
    like = next((one for one in given if any(map(_is_batch_or_head, one))), given[0])
    placements = tuple(one if _is_batch_or_head(one) else Replicate() for one in like)
    query = Spec(placements, call.spec("query").meta)
    if all(one.is_replicate() for one in placements) or any(0 in one for one in call.lowers.rules.local_shapes(query)):
        return call.whole_at_all()
    for name, one in tensors.items():
        shape = call.spec(name).meta.shape
        call.given[name] = call.at(one, tuple(_of_mask(shape, p) if name == "attn_mask" else p for p in placements))
    names = ("query", "lse") if len(call.op._schema.returns) == 2 else ("query", "key", "value")
    metas = [_meta(query.meta.shape[:3], torch.float32) if name == "lse" else call.spec(name).meta for name in names]
    outs = tuple(call.lowers.new(Spec(placements, meta)) for meta in metas)
    args, kwargs = call.arguments(call.given)
    call.lowers.emit(Instruction("op", f"aten.{call.op._schema.name.split('::')[1]}.default", args, kwargs, outs))
    return tuple(map(Slot, outs))


def _is_batch_or_head(placement: Placement) -> bool:
    return type(placement) is Shard and placement.dim in (0, 1)


def _of_mask(shape: tuple[int, ...], placement: Any) -> Placement:
    at = placement.dim - (4 - len(shape)) if isinstance(placement, Shard) else -1
    return Shard(at) if at >= 0 and shape[at] != 1 else Replicate()


# The pieces of a fused matrix (queries, keys, values; gate and up) are in parts as the whole was.


@_own("split.Tensor", "split_with_sizes")
def _split(call: _Call) -> Any:
    spec = call.spec("self")
    axes = _axes_of(spec, call["dim"]) if spec.meta.shape and _is_plain(spec) else []
    if len(axes) != 1:
        return NotImplemented
    size = tuple(call.lowers.rules.axes.values())[axes[0]]
    pieces = call.again({"self": call.at(call["self"], _but(spec.placements, axes, Replicate()))})
    dim = call["dim"] % len(spec.meta.shape)
    return [
        call.at(one, spec.placements) if call.lowers.spec(one.number).meta.shape[dim] % size == 0 else one
        for one in pieces
    ]


_TAPE: Final = Meta((0,), (1,), torch.int64)


def by_local_rule(lowers: Lowers, op: OpOverload[..., Any], args: tuple[Any, ...]) -> Any:
    if op is torch.ops.aiodaft.local.default:
        return _forward(lowers, *args)
    if op is torch.ops.aiodaft.local_backward.default:
        return _backward(lowers, *args)
    return NotImplemented


def _forward(lowers: Lowers, name: str, tensors: Sequence[Slot]) -> list[Slot]:
    inputs, outputs, target = _placements(lowers, name)
    given = [lowers.redistribute(one.number, want) for one, want in zip(tensors, inputs, strict=True)]
    metas = _metas(name, [lowers.spec(number).meta for number in given])
    specs = [Spec(one, meta) for one, meta in zip(outputs, metas, strict=True)]
    local = [lowers.rules.local_shapes(one) for one in specs]
    shapes = ByRank(tuple([list(one[rank]) for one in local] for rank in range(lowers.rules.size)))
    replicas = tuple(Replicate() for _ in lowers.rules.axes)
    outs = tuple(lowers.new(one) for one in (*specs, Spec(replicas, _TAPE)))
    lowers.emit(Instruction("local", target, (shapes, *map(Slot, given)), {}, outs))
    return [*map(Slot, outs)]


def _backward(lowers: Lowers, name: str, grads: Sequence[Slot], tensors: Sequence[Slot], tape: Slot) -> list[Slot]:
    inputs, outputs, _ = _placements(lowers, name)
    wanted = [tuple(Replicate() if one.is_partial() else one for one in placements) for placements in outputs]
    given = [lowers.redistribute(one.number, want) for one, want in zip(grads, wanted, strict=True)]
    apart = [any(not one[axis].is_replicate() for one in outputs) for axis in range(len(lowers.rules.axes))]
    outs = []
    for slot, placements in zip(tensors, inputs, strict=True):
        meta = lowers.spec(slot.number).meta
        # A rank has its term of the gradient of a replica.
        terms = [Partial() if one.is_replicate() and cut else one for one, cut in zip(placements, apart, strict=True)]
        outs.append(lowers.new(Spec(tuple(terms), meta)))
    lowers.emit(Instruction("local", f"{name}, backward", (tape, *map(Slot, given)), {}, tuple(outs)))
    return [*map(Slot, outs)]


def _placements(lowers: Lowers, name: str) -> tuple[list[Placements], list[Placements], str]:
    """Of inputs and outputs, and the target; all ranks do the whole if the group lacks an axis."""
    function, axes = named(name), lowers.rules.axes

    def on_axes(given: Mapping[str, Placement]) -> Placements:
        return placed(given, axes) if is_known else tuple(Replicate() for _ in axes)

    is_known = function.axes <= axes.keys()
    target = name if is_known else f"{name}, whole"
    return [on_axes(one) for one in function.inputs], [on_axes(one) for one in function.outputs], target


def _metas(name: str, metas: Sequence[Meta]) -> list[Meta]:
    with FakeTensorMode():
        tensors = [torch.empty_strided(one.shape, one.stride, dtype=one.dtype) for one in metas]
        outputs = torch.ops.aiodaft.local.default(name, tensors)
    return [Meta.of(one) for one in outputs[:-1]]
