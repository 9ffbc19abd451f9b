"""Functions that tests run in pools."""

from __future__ import annotations

import asyncio
import os
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

import aiodaft

Array: TypeAlias = NDArray[np.int64]


def square(x: int) -> int:
    return x * x


def total(values: list[int], *, start: int = 0) -> int:
    return sum(values, start)


def cut(seed: int, count: int) -> list[Array]:
    """Arrays that do not travel in messages; their numbers say which."""
    return [np.full(20_000, 10 * seed + part) for part in range(count)]


def heads(arrays: list[Array]) -> list[int]:
    return [int(array[0]) for array in arrays]


def fail(text: str) -> None:
    raise ValueError(text)


def die_at_first() -> int:
    """Ends its process at the first attempt; then the number of the attempt."""
    if aiodaft.supervision.current_attempt() == 1:
        os._exit(3)
    return aiodaft.supervision.current_attempt()


def die(x: int) -> int:
    if x == 3:
        os._exit(3)
    return x


class Desk(aiodaft.Actor):
    """Tasks come here, and wait until they may go on."""

    def __init__(self) -> None:
        self.here: asyncio.Queue[int] = asyncio.Queue()
        self.leave = asyncio.Semaphore(0)

    @aiodaft.method
    async def come(self, pid: int) -> None:
        self.here.put_nowait(pid)
        await self.leave.acquire()

    @aiodaft.method
    async def arrival(self) -> int:
        """The pid of the next task that has come."""
        return await self.here.get()

    @aiodaft.method
    async def let(self, count: int) -> None:
        """So many tasks go on."""
        for _ in range(count):
            self.leave.release()


async def wait(desk: Desk, then_die: bool = False) -> int:
    """The pid of the worker, once it may go on."""
    await desk.come(os.getpid())
    if then_die:
        os._exit(3)
    return os.getpid()


async def pid() -> int:
    return os.getpid()
