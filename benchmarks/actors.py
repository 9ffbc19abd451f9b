"""Actors that the benchmarks call."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from functools import cache
from typing import Any

from aiodaft.actor import Actor
from aiodaft.methods import method

from .stalls import Watch


class Echo(Actor):
    """Answers at once."""

    @method
    async def on_loop(self, value: Any = None) -> Any:
        return value

    @method
    async def drop(self, value: Any = None) -> None:
        """An `async def` method without a result."""

    @method
    def on_thread(self, value: Any = None) -> Any:
        return value

    @method
    async def make(self, size: int) -> Any:
        """A value of so many bytes, the same one each time; a number for none."""
        return _made(size) if size else 1

    @method
    async def pid(self) -> int:
        return os.getpid()


class Holder(Echo):
    """Makes and takes large values."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}
        self._watch: Watch | None = None

    @method
    async def prepare(self, size: int) -> None:
        """Make a value to give later, so that making it is not measured."""
        self._values = {size: payload(size)}

    @method
    def give(self, size: int) -> Any:
        return self._values[size]

    @method
    async def take(self, value: Any) -> int:
        return len(value)

    @method
    async def watch(self) -> None:
        """Begin to look for stalls of this actor's loop."""
        self._watch = Watch(asyncio.get_running_loop())

    @method
    async def longest_stall(self) -> float:
        """Seconds of the longest stall since `watch`."""
        assert self._watch is not None
        return self._watch.stop()


class Worker(Holder):
    """The actor of graphs."""

    @method
    async def step(self, value: int) -> int:
        return value + 1

    @method
    async def gather(self, values: list[int]) -> int:
        return sum(values)

    @method
    async def items(self, count: int) -> AsyncIterator[int]:
        for number in range(count):
            yield number

    @method
    async def cpu(self) -> float:
        """Seconds of processor time of this process."""
        return time.process_time()


class Device(Actor):
    """Runs operations as an accelerator does: its processor has nothing to do meanwhile."""

    @method
    async def step(self, value: int) -> int:
        return value + 1

    @method
    def run_op(self, value: int, seconds: float) -> int:
        time.sleep(seconds)  # noqa: TID251 - on the actor's thread
        return value

    @method
    def run_ops(self, seconds: float, count: int) -> float:
        """Run operations in a loop; the seconds that each takes."""
        start = time.perf_counter()
        for _ in range(count):
            time.sleep(seconds)  # noqa: TID251 - on the actor's thread
        return (time.perf_counter() - start) / count


class WithTorch(Actor):
    """Uses torch."""

    @method
    async def threads(self) -> int:
        import torch  # noqa: PLC0415 - workers find it preloaded

        return torch.get_num_threads()


@cache
def _made(size: int) -> Any:
    return payload(size)


def payload(size: int) -> Any:
    """So many bytes: a tensor where torch is installed, else bytes."""
    try:
        import torch  # noqa: PLC0415 - optional
    except ImportError:
        return b"\x01" * size
    return torch.ones(size, dtype=torch.uint8)


class Stage(Actor):
    """A stage of workflows that actors hand on to each other."""

    def __init__(self) -> None:
        self._stages: list[Stage] = []
        self._left = 0
        self._all_ended = asyncio.Event()

    @method
    async def meet(self, stages: list[Stage]) -> None:
        """The stages, this one among them."""
        self._stages = stages

    @method
    async def hop(self, name: int) -> int:
        """A hop that the controller asks for."""
        return name

    @method
    async def run(self, names: list[int], hops: int) -> None:
        """Begin workflows here, and wait until they have ended."""
        self._left = len(names)
        self._all_ended.clear()
        for name in names:
            self._stages[(name + hops - 1) % len(self._stages)].hand_on.tell(name, hops - 1)
        await self._all_ended.wait()

    @method
    async def hand_on(self, name: int, hops: int) -> None:
        """A hop; `hops` more follow, the last one where the workflow began."""
        if hops:
            self._stages[(name + hops - 1) % len(self._stages)].hand_on.tell(name, hops - 1)
            return
        self._left -= 1
        if not self._left:
            self._all_ended.set()
