"""Ranks and replicas of `unkillable.py` and `swarm.py` that end at a point of their work that a test names."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import Future
from typing import Any

import torch
from swarm_replica import Gradients, Replica
from torch import Tensor, nn
from unkillable_ranks import Rank

from aiodaft import method


def reach(point: str) -> None:
    """The end of the process, if it is doomed to end at this point."""
    if os.environ.get("DOOMED") == point:
        os.kill(os.getpid(), signal.SIGKILL)


def add(first: Tensor, second: Tensor) -> Tensor:
    reach("sum of gradients")
    return first + second


def xor(first: Tensor, second: Tensor) -> Tensor:
    reach("parity")
    return first ^ second


class MortalRank(Rank):
    @method
    async def doom(self, point: str) -> None:
        os.environ["DOOMED"] = point
        reach("at once")

    def make_model(self) -> nn.Module:
        """Of 21,248 parameters: as a vector, they do not travel inside messages, and three ranks have uneven parts."""
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(256, 41), nn.Linear(41, 256))

    @method
    def part(self) -> Tensor:
        reach("part")
        return super().part()

    @method
    def gradient(self, *args: Any) -> Tensor:
        reach("gradient")
        return super().gradient(*args)

    @method
    def update(self, gradient: Tensor) -> float:
        reach("before update")
        loss = super().update(gradient)
        reach("after update")
        return loss

    @method
    def copy(self, step: int) -> Tensor:
        reach("copy")
        return super().copy(step)

    @method(ordered=False)
    async def keep(self, parity: Tensor, step: int) -> None:
        reach("keep")
        await super().keep(parity, step)

    @method
    def take_over(self, *args: Any) -> None:
        reach("take over")
        super().take_over(*args)


class StillbornRank(MortalRank):
    def __init__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class LateRank(MortalRank):
    """Has the parity of a checkpoint when it has gone on."""

    @method
    def copy(self, step: int) -> Tensor:
        self.went_on: Future[None] = Future()
        return super().copy(step)

    @method(ordered=False)
    async def parity(self, rows: Tensor) -> Tensor:
        await asyncio.wrap_future(self.went_on)
        return rows

    @method
    def part(self) -> Tensor:
        if self.copies:
            self.went_on.set_result(None)
        return super().part()


class MortalReplica(Replica):
    @method
    async def doom(self, point: str) -> None:
        os.environ["DOOMED"] = point
        reach("at once")

    @method(ordered=False)
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        reach("forward")
        return y

    def gradients(self, *args: Any) -> Gradients:
        reach("gradients")
        return super().gradients(*args)

    @method
    def collect(self, parts: list[Gradients]) -> float:
        reach("collect")
        return super().collect(parts)

    @method
    def update(self) -> None:
        reach("update")
        super().update()
