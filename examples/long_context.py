"""Attention over a sequence that is longer than a rank's memory has room for: keys and values go round in a ring.

    python examples/long_context.py --ranks 3 --length 128

The model is written for one device. Its attention is a function of local tensors, `tensor.local`, which exchanges keys
and values with `current_group()` itself. The plan places all else: each rank has some rows of the sequence. The losses
are those of one process.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import aiodaft
from aiodaft import current_group, tensor
from aiodaft.tensor import Shard, Strategy

WIDTH, HEADS, BATCH = 32, 4, 2


def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of (batch, heads, length, width / heads), on one device."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def passed_on(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors of the rank before this one; those of this rank go to the next one meanwhile."""
    ring = current_group().along("cp")
    sent = [ring.isend(one.contiguous(), to=(ring.rank + 1) % ring.size, tag=at) for at, one in enumerate(tensors)]
    received = [ring.irecv(source=(ring.rank - 1) % ring.size, tag=at).result() for at in range(len(tensors))]
    for one in sent:
        one.result()
    return received


class Ring(torch.autograd.Function):
    """At each turn, the queries of this rank meet the keys of another one. Backward goes round again."""

    @staticmethod
    def scores(q: Tensor, k: Tensor, turn: int, each: int) -> Tensor:
        """Products of queries and keys; a key is seen by the queries at its place and after it."""
        ring = current_group().along("cp")
        rows = torch.arange(q.shape[2]).unsqueeze(1) + each * ring.rank
        columns = torch.arange(k.shape[2]) + each * ((ring.rank - turn) % ring.size)
        return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(columns > rows, -torch.inf)

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, each: int) -> Tensor:
        size, kept = current_group().along("cp").size, [k, v]
        # The sum of values and of weights so far, relative to the largest score so far.
        total, weight, top = torch.zeros_like(q), q.new_zeros(*q.shape[:-1], 1), q.new_full((*q.shape[:-1], 1), -1e30)
        for turn in range(size):
            scores = Ring.scores(q, kept[0], turn, each)
            larger = torch.maximum(top, scores.amax(-1, keepdim=True))
            terms, before = (scores - larger).exp(), (top - larger).exp()
            total, weight, top = total * before + terms @ kept[1], weight * before + terms.sum(-1, keepdim=True), larger
            kept = passed_on(kept) if turn < size - 1 else kept
        ctx.save_for_backward(q, k, v, total / weight, top + weight.log())
        ctx.each = each
        return total / weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logs = ctx.saved_tensors
        (grad,), scale = grads, q.shape[-1] ** -0.5
        grad_q, inner = torch.zeros_like(q), (grad * out).sum(-1, keepdim=True)
        # Gradients of keys and values travel with them, and are home after a whole round.
        kept = [k, v, torch.zeros_like(k), torch.zeros_like(v)]
        for turn in range(current_group().along("cp").size):
            weights = (Ring.scores(q, kept[0], turn, ctx.each) - logs).exp()
            grad_scores = weights * (grad @ kept[1].mT - inner) * scale
            grad_q = grad_q + grad_scores @ kept[0]
            kept = passed_on([*kept[:2], kept[2] + grad_scores.mT @ q, kept[3] + weights.mT @ grad])
        return grad_q, kept[2], kept[3], None


def ring(q: Tensor, k: Tensor, v: Tensor, *, length: int) -> Tensor:
    """The same on a rank's rows of the sequence."""
    each = -(-length // current_group().along("cp").size)
    return Ring.apply(q, k, v, each)


class Block(nn.Module):
    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.attend = attend
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)

    rows = {"cp": Shard(2)}
    attend = tensor.local(partial(ring, length=options.length), whole=whole, inputs=[rows] * 3, outputs=rows)
    model = nn.Sequential(Block(attend), Block(attend))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(2, BATCH, options.length, WIDTH)

    program = tensor.capture(train, model, optimizer, x, y)
    plan = program.plan(Strategy(inputs={"*": {"cp": Shard(1)}}), {"cp": options.ranks})
    async with aiodaft.Runtime() as rt, tensor.workers(rt, plan.axes) as workers:
        step = await workers.load(plan, state=model.state_dict())
        for number in range(options.steps):
            loss, alone = await step(x, y), train(model, optimizer, x, y)
            print(f"step {number}: loss {loss:.6f}, in one process {alone:.6f}, off by {abs(loss - alone):.1e}")
    hop = 2 * BATCH * -(-options.length // options.ranks) * WIDTH * 4
    print(f"a hop forward has {hop} bytes of keys and values; the plan's own collectives, of gradients, "
          f"{max(plan.bytes['cp'])} bytes a step")  # fmt: skip


if __name__ == "__main__":
    aiodaft.run(main())
