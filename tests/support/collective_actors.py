"""Members of collectives."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import torch
from inside import questions_from_now
from torch import Tensor

import aiodaft
from aiodaft import Actor, method


def made(seed: int, *shape: int) -> Tensor:
    """Numbers whose sum depends on the order in which they are added."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 5)


class Member(Actor):
    """Makes values; from its second life on, it is there when the test opens the gate, a FIFO."""

    def __init__(self, fifo: str = "") -> None:
        self.fifo = fifo
        self.gate = asyncio.Event()
        self.asked: list[Any] | None = None

    def on_restart(self, epoch: int) -> None:
        if self.fifo:
            with open(self.fifo, encoding="utf-8"):
                pass

    @method
    async def pid(self) -> int:
        return os.getpid()

    @method
    async def received(self) -> int:
        return aiodaft.current_runtime().traffic().payload_received

    @method
    async def count_questions(self) -> int:
        """The number of values that its process has asked others for since this was called first."""
        if self.asked is None:
            self.asked = questions_from_now()
        return len(self.asked)

    @method
    async def give(self, value: Any) -> Any:
        return value

    @method
    async def zero(self, value: Tensor) -> None:
        """Write to an argument."""
        value.detach().zero_()

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
    async def doom(self) -> None:
        """The next reduction by `lethal` here is its end."""
        os.environ["DOOMED"] = "1"

    @method(idempotent=True)
    async def make_in_second_life(self, seed: int, *shape: int) -> Tensor:
        if aiodaft.supervision.current_attempt() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return made(seed, *shape)

    @method
    async def die(self) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def longest(first: str, second: str) -> str:
    """A reducer of one's own."""
    return max(first, second, key=len)


def lethal(first: Tensor, second: Tensor) -> Tensor:
    """A sum, in the middle of which some members die."""
    if "DOOMED" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    return first + second
