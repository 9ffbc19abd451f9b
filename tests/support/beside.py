"""Members of groups that share their processes, rank by rank."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

import aiodaft
from aiodaft import Actor, method
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.process import current_process


def moved() -> int:
    """The number of large values that this process has received or sent."""
    traffic = current_process().part(Peer).connections.traffic()
    return traffic.payloads_received + traffic.payloads_sent


class Trainer(Actor):
    """Makes arrays."""

    @method
    async def make(self, size: int) -> Any:
        return np.full(size, float(aiodaft.current_group().rank))

    @method
    async def pid(self) -> int:
        return os.getpid()

    @method
    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Generator(Actor):
    """Takes the arrays of others."""

    def __init__(self) -> None:
        self.rank = aiodaft.current_group().rank

    @method
    async def take(self, array: Any) -> int:
        assert (array == self.rank).all()
        return moved()

    @method
    async def pid(self) -> tuple[int, int]:
        return self.rank, os.getpid()


class PlainGenerator:
    """The same, of a class that is no actor."""

    def pid(self) -> int:
        return os.getpid()
