"""A mixture of experts: each rank has some experts, and rows travel to the experts that the router chooses for them.

    python examples/moe.py --ranks 3 --experts 4

The model is written for one device. Its experts are a function of local tensors, `tensor.local`, with an all_to_all of
as many rows as there are for each rank: none is dropped or padded. The losses are those of one process.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import aiodaft
from aiodaft import current_group, method, tensor
from aiodaft.tensor import Shard, Strategy

WIDTH, ROWS = 16, 60


def whole(x: Tensor, choice: Tensor, weight: Tensor) -> Tensor:
    """Each row times the matrix of its expert, on one device: `weight` is (experts, width, width)."""
    return torch.einsum("nd,nde->ne", x, weight[choice])


class Travel(torch.autograd.Function):
    """So many rows to each rank; their gradients come back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int]) -> Tensor:
        parts = current_group().along("ep").all_to_all(list(x.split(counts))).result()
        ctx.counts = [len(one) for one in parts]
        return torch.cat(list(parts))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        parts = current_group().along("ep").all_to_all(list(grads[0].contiguous().split(ctx.counts))).result()
        return torch.cat(list(parts)), None


def travelling(x: Tensor, choice: Tensor, weight: Tensor, *, experts: int) -> Tensor:
    """The same on a rank's rows, with a rank's experts."""
    group = current_group().along("ep")
    each = -(-experts // group.size)
    order = torch.argsort(choice, stable=True)
    counts = torch.bincount(choice // each, minlength=group.size).tolist()
    choices = group.all_to_all(list(choice[order].split(counts))).result()
    here: Any = Travel.apply(x[order], counts)
    made = whole(here, torch.cat(list(choices)) - each * group.rank, weight)
    back: Any = Travel.apply(made, [len(one) for one in choices])
    return back[torch.argsort(order)]


class Mixture(nn.Module):
    def __init__(self, experts: int, layer: Any) -> None:
        super().__init__()
        self.router, self.layer = nn.Linear(WIDTH, experts), layer
        self.weight = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        score, choice = self.router(x).softmax(-1).max(-1)
        return x + self.layer(x, choice, self.weight) * score.unsqueeze(-1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


class Expert(tensor.Worker):
    """A worker with a method of ours, beside the steps."""

    @method
    def experts(self, step: str) -> int:
        """The number of experts that lie here."""
        return len(self.state(step)["weight"])


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--experts", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)

    part = {"ep": Shard(0)}
    layer = tensor.local(partial(travelling, experts=options.experts), whole=whole, inputs=[part] * 3, outputs=part)
    model = Mixture(options.experts, layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(2, ROWS, WIDTH)

    program = tensor.capture(train, model, optimizer, x, y)
    plan = program.plan(Strategy(inputs={"*": part}, params={"weight": part}), {"ep": options.ranks})
    async with aiodaft.Runtime() as rt, tensor.workers(rt, plan.axes, Expert) as workers:
        step = await workers.load(plan, state=model.state_dict())
        print(f"experts by rank: {await workers.group.all(Expert.experts, step.name)}")
        for number in range(options.steps):
            loss, alone = await step(x, y), train(model, optimizer, x, y)
            print(f"step {number}: loss {loss:.6f}, in one process {alone:.6f}, off by {abs(loss - alone):.1e}")


if __name__ == "__main__":
    aiodaft.run(main())
