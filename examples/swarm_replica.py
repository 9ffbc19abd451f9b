"""A replica of a stage, for `swarm.py`."""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import torch
from byte_gpt import Stage
from pp_ranks import adam, add, loss_of, update
from torch import Tensor

import aiodaft

STAGES, MICROBATCHES = 3, 4


class Gradients(NamedTuple):
    """Of one micro-batch at one stage."""

    x: Tensor | None
    parameters: list[Tensor]
    loss: float


class Replica(aiodaft.Actor):
    def __init__(self, stage: int) -> None:
        torch.set_num_threads(1)  # one thread adds in the same order everywhere
        self.stage = Stage(stage, STAGES)
        self.optimizer = adam(self.stage)

    @aiodaft.method(ordered=False)
    def forward(self, x: Tensor) -> Tensor:
        return self.stage(x).detach()

    @aiodaft.method(ordered=False)
    def backward(self, x: Tensor, after: Gradients) -> Gradients:
        # The stage runs again: a replica keeps nothing of a micro-batch, so any of them can do this.
        x = x.detach().requires_grad_(not self.stage.first)
        return self.gradients(x, self.stage(x), after.x, after.loss)

    @aiodaft.method(ordered=False)
    def learn(self, x: Tensor, targets: Tensor) -> Gradients:
        x = x.detach().requires_grad_()
        loss = loss_of(self.stage(x), targets, MICROBATCHES)
        return self.gradients(x, loss, None, loss.item())

    def gradients(self, x: Tensor, y: Tensor, gradient: Tensor | None, loss: float) -> Gradients:
        parameters = list(self.stage.parameters())
        found = torch.autograd.grad(y, [*parameters, x] if x.requires_grad else parameters, gradient)
        return Gradients(found[-1] if x.requires_grad else None, list(found[: len(parameters)]), loss)

    @aiodaft.method
    def collect(self, parts: list[Gradients]) -> float:
        """Have all that `update` needs, and give the loss."""
        self.total = reduce(add, [part.parameters for part in parts])
        return sum(part.loss for part in parts)

    @aiodaft.method
    def update(self) -> None:
        update(self.optimizer, self.stage, self.total)

    @aiodaft.method
    def state(self) -> list[dict[str, Any]]:
        return [self.stage.state_dict(), self.optimizer.state_dict()]

    @aiodaft.method
    def load(self, state: list[dict[str, Any]]) -> None:
        for mine, loaded in zip((self.stage, self.optimizer), state, strict=True):
            mine.load_state_dict(loaded)
