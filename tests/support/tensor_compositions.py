"""Compositions as models and optimizers write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

__all__ = [
    "adagrad",
    "adamw",
    "alibi",
    "assigned",
    "attention",
    "clipped",
    "experts",
    "foreach_adam",
    "fused",
    "grouped",
    "gru",
    "next_token",
    "rms_norm",
    "rmsprop",
    "rope",
    "rope_complex",
    "sgd",
    "through_view",
    "wearing",
    "written",
]


def rope(x: Tensor, angle: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * angle.cos() + turned * angle.sin()


def rope_complex(x: Tensor, angle: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.view(7, 3, 2)) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten(1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


def alibi(q: Tensor, k: Tensor) -> Tensor:
    at = torch.arange(8)
    return (q @ k.transpose(-2, -1) - 0.5 * (at[:, None] - at).abs()).softmax(-1)


def fused(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GPT-2's attention: queries, keys and values by one matrix."""
    batch, length, width = x.shape
    q, k, v = F.linear(x, weight, bias).split(width, dim=-1)
    q, k, v = (one.view(batch, length, 3, width // 3).transpose(1, 2) for one in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Llama's attention: each head of keys serves two heads of queries."""
    k, v = (one[:, :, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for one in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Llama's form."""
    return weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of transformers: each position is asked for the next token."""
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), shifted.view(-1), ignore_index=-100)


def gru(x: Tensor, h: Tensor, w: Tensor, u: Tensor) -> Tensor:
    r, z, n = (x @ w).chunk(3, 1)
    hr, hz, hn = (h @ u).chunk(3, 1)
    z = torch.sigmoid(z + hz)
    return (1 - z) * torch.tanh(n + torch.sigmoid(r + hr) * hn) + z * h


def experts(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A dense mixture of the two best experts."""
    weight, chosen = (x @ gate).softmax(-1).topk(2, dim=-1)
    share = torch.zeros(x.shape[0], up.shape[0]).scatter(1, chosen, weight)
    return torch.einsum(
        "te,teo->to", share, torch.einsum("teh,eho->teo", torch.einsum("ti,eih->teh", x, up).relu(), down)
    )


def written(change: Callable[..., Any]) -> Callable[..., Tensor]:
    """The change in place, on a copy."""

    def call(x: Tensor, *others: Tensor) -> Tensor:
        y = x.clone()
        change(y, *others)
        return y

    return call


def assigned(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z[1:5] = y
    return z


def through_view(x: Tensor) -> Tensor:
    """The write into a view is seen in the whole."""
    y = x * 2
    y.view(7, 2, 3)[:, 0].mul_(3)
    return y


def sgd(p: Tensor, g: Tensor, momentum: Tensor) -> tuple[Tensor, ...]:
    g = g.add(p, alpha=0.01)
    momentum.mul_(0.9).add_(g, alpha=1)
    p.add_(g.add(momentum, alpha=0.9), alpha=-0.1)
    return p, momentum


def adamw(p: Tensor, g: Tensor, mean: Tensor, square: Tensor) -> tuple[Tensor, ...]:
    square = square.abs_()
    p.mul_(1 - 1e-3 * 0.01)
    mean.lerp_(g, 0.1)
    square.mul_(0.999).addcmul_(g, g, value=0.001)
    p.addcdiv_(mean, (square.sqrt() / 0.3).add_(1e-8), value=-0.01)
    return p, mean, square


def rmsprop(p: Tensor, g: Tensor, square: Tensor) -> tuple[Tensor, ...]:
    square.abs_().mul_(0.99).addcmul_(g, g, value=0.01)
    p.addcdiv_(g, square.sqrt().add_(1e-8), value=-0.01)
    return p, square


def adagrad(p: Tensor, g: Tensor, total: Tensor) -> tuple[Tensor, ...]:
    total.abs_().addcmul_(g, g, value=1)
    p.addcdiv_(g, total.sqrt().add_(1e-10), value=-0.01)
    return p, total


def foreach_adam(p: Tensor, g: Tensor, mean: Tensor, square: Tensor) -> tuple[Tensor, ...]:
    # The form of torch.optim, which has no public name.
    torch._foreach_lerp_([mean], [g], 0.1)
    torch._foreach_mul_([square], 0.999)
    torch._foreach_addcmul_([square], [g], [g], 0.001)
    root = torch._foreach_sqrt(torch._foreach_abs([square]))  # noqa: SLF001 - as above
    torch._foreach_add_(root, 1e-8)
    torch._foreach_addcdiv_([p], [mean], root, -0.01)
    return p, mean, square


def clipped(g: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    """Gradients clipped by their common norm."""
    torch.nn.utils.clip_grads_with_norm_(pair := wearing(g, h), 1.0, torch.nn.utils.get_total_norm([g, h]))
    return tuple(one.grad for one in pair)


def wearing(*gradients: Tensor) -> list[Tensor]:
    parameters = [torch.empty_like(one).requires_grad_() for one in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return parameters
