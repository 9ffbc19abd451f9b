"""Models with functions of local tensors: attention in a ring, and experts that tokens travel to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Shard
from torch.nn import functional

from aiodaft import current_group
from aiodaft.tensor.local_functions import local

WIDTH, HEADS, LENGTH, EXPERTS = 8, 2, 10, 3


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention; tensors are (batch, heads, length, width)."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _round(tensors: list[Tensor]) -> list[Tensor]:
    """Those of the rank before this one; this rank's go to the next one."""
    ring = current_group().along("cp")
    sent = [ring.isend(one.contiguous(), to=(ring.rank + 1) % ring.size, tag=at) for at, one in enumerate(tensors)]
    here = [ring.irecv(source=(ring.rank - 1) % ring.size, tag=at).result() for at in range(len(tensors))]
    for one in sent:
        one.result()
    return here


def _scores(q: Tensor, k: Tensor, owner: int, length: int) -> Tensor:
    """Scaled products with the keys of a rank, whose place is after that of some queries."""
    ring = current_group().along("cp")
    each = -(-length // ring.size)
    rows = torch.arange(q.shape[2]).unsqueeze(1) + each * ring.rank
    columns = torch.arange(k.shape[2]) + each * owner
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(columns > rows, -torch.inf)


class _Ring(torch.autograd.Function):
    """Keys and values go round; sums are kept with the largest score so far. Backward goes round again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
        ring = current_group().along("cp")
        total, top = torch.zeros_like(q), q.new_full((*q.shape[:-1], 1), -torch.inf)
        weight, kept = torch.zeros_like(top), [k, v]
        for turn in range(ring.size):
            scores = _scores(q, kept[0], (ring.rank - turn) % ring.size, length)
            above = torch.maximum(top, scores.amax(-1, keepdim=True))
            above_or_0 = above.masked_fill(above == -torch.inf, 0)
            terms, before = (scores - above_or_0).exp(), (top - above_or_0).exp()
            total, weight, top = total * before + terms @ kept[1], weight * before + terms.sum(-1, keepdim=True), above
            if turn < ring.size - 1:
                kept = _round(kept)
        out = total / weight
        ctx.save_for_backward(q, k, v, out, top + weight.log())
        ctx.length = length
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logs = ctx.saved_tensors
        ring, (grad,) = current_group().along("cp"), grads
        gq, delta = torch.zeros_like(q), (grad * out).sum(-1, keepdim=True)
        kept = [k, v, torch.zeros_like(k), torch.zeros_like(v)]
        for turn in range(ring.size):
            part = (_scores(q, kept[0], (ring.rank - turn) % ring.size, ctx.length) - logs).exp()
            inner = part * (grad @ kept[1].mT - delta) / q.shape[-1] ** 0.5
            gq = gq + inner @ kept[0]
            kept = _round([*kept[:2], kept[2] + inner.mT @ q, kept[3] + part.mT @ grad])
        return gq, kept[2], kept[3], None


def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _Ring.apply(q, k, v, LENGTH)  # type: ignore[no-untyped-call, no-any-return]  # of torch


ROWS = {"cp": Shard(2)}
attend = local(ring, whole=attention, inputs=[ROWS] * 3, outputs=ROWS)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        return self.out(attend(q, k, v).transpose(1, 2).flatten(2))


def experts(x: Tensor, choice: Tensor, weight: Tensor) -> Tensor:
    """Each row times the matrix of its expert."""
    return torch.einsum("nd,nde->ne", x, weight[choice])


class _Travel(torch.autograd.Function):
    """Rows go to the ranks of their experts, and their gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int]) -> Tensor:
        parts = current_group().along("ep").all_to_all(list(x.split(counts))).result()
        ctx.counts = [len(one) for one in parts]
        return torch.cat(list(parts))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        parts = current_group().along("ep").all_to_all(list(grads[0].contiguous().split(ctx.counts))).result()
        return torch.cat(list(parts)), None


def routed(x: Tensor, choice: Tensor, weight: Tensor) -> Tensor:
    """The same, with the experts in parts: rows travel to them and back."""
    group = current_group().along("ep")
    each = -(-EXPERTS // group.size)
    order = torch.argsort(choice // each, stable=True)
    counts = torch.bincount(choice // each, minlength=group.size).tolist()
    travel: Any = _Travel.apply
    here = travel(x[order], counts)
    choices = torch.cat(list(group.all_to_all(list(choice[order].split(counts))).result()))
    made = experts(here, choices - each * group.rank, weight)
    back = torch.bincount(torch.cat(_sources(group, counts)), minlength=group.size).tolist()
    return travel(made, back)[torch.argsort(order)]  # type: ignore[no-any-return]  # of torch


def _sources(group: Any, counts: list[int]) -> list[Tensor]:
    """The rank that each row came from."""
    given = group.all_to_all([torch.full((count,), group.rank) for count in counts]).result()
    return list(given)


TOKENS = {"ep": Shard(0)}
mixture = local(routed, whole=experts, inputs=[TOKENS, TOKENS, TOKENS], outputs=TOKENS)
scaled = local(
    lambda x, weight: (x * weight, (x * weight).square().sum()),
    whole=lambda x, weight: (x * weight, (x * weight).square().sum()),
    inputs=[{"dp": Shard(0)}, {}],
    outputs=[{"dp": Shard(0)}, {"dp": Partial()}],
)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(WIDTH, EXPERTS)
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        scores, choice = self.route(rows).softmax(-1).max(-1)
        return (mixture(rows, choice, self.weight) * scores.unsqueeze(-1)).view_as(x)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.linspace(0.5, 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y, squares = scaled(self.first(x), self.weight)
        return y + squares / 100


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 2, 3, LENGTH, WIDTH, generator=generator)
    return [(one[0], one[1]) for one in x]


def first_row(x: Tensor) -> Tensor:
    return x[:1]
