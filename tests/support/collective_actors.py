"""Members of collectives."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import torch
from torch import Tensor

from aiodaft import Actor, method


def made(seed: int, *shape: int) -> Tensor:
    """Numbers whose sum depends on the order in which they are added."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 5)


class Member(Actor):
    """Makes values."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    @method
    async def give(self, value: Any) -> Any:
        return value

    @method
    async def make(self, seed: int, *shape: int) -> Tensor:
        return made(seed, *shape)

    @method
    async def array(self, seed: int, *shape: int) -> Any:
        return made(seed, *shape).numpy()

    @method
    async def weights(self, seed: int, *shape: int) -> Tensor:
        return torch.nn.Parameter(made(seed, *shape))

    @method
    async def parts(self, sizes: list[int], value: float) -> list[Tensor]:
        return [torch.full((size,), value) for size in sizes]

    @method
    async def after_gate(self, value: Any) -> Any:
        await self.gate.wait()
        return value

    @method
    async def open_gate(self) -> None:
        self.gate.set()

    @method
    async def fail(self) -> Tensor:
        raise LookupError("no gradient")

    @method
    async def die(self) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def longest(first: str, second: str) -> str:
    """A reducer of one's own."""
    return max(first, second, key=len)
