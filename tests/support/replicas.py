"""Data-parallel training of a toy model by members that come and go."""

from __future__ import annotations

import hashlib
import os

import torch
from torch import Tensor

from aiodaft import Actor, method


class Replica(Actor):
    """Has the whole state; a step is a gradient, and later the update by the sum of all gradients."""

    def __init__(self, size: int) -> None:
        self.weights = torch.linspace(-1, 1, size)
        self.momentum = torch.zeros(size)
        self.steps = 0

    @method
    async def pid(self) -> int:
        return os.getpid()

    @method
    async def gradient(self, seed: int) -> Tensor:
        noise = torch.randn(self.weights.shape, generator=torch.Generator().manual_seed(seed))
        return torch.sin(self.weights) + noise

    @method
    async def apply(self, total: Tensor, count: int) -> None:
        self.momentum.mul_(0.9).add_(total, alpha=1 / count)
        self.weights -= 0.1 * self.momentum
        self.steps += 1

    @method
    async def state(self) -> tuple[Tensor, Tensor, int]:
        return self.weights, self.momentum, self.steps

    @method
    async def load(self, state: tuple[Tensor, Tensor, int]) -> None:
        weights, momentum, self.steps = state
        self.weights, self.momentum = weights.clone(), momentum.clone()

    @method
    async def digest(self) -> str:
        """A hash of the whole state."""
        content = hashlib.sha256(self.weights.numpy().tobytes())
        content.update(self.momentum.numpy().tobytes())
        return f"{self.steps} {content.hexdigest()}"
