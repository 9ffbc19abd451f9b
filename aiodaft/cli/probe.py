"""The actor that `aiodaft doctor` runs on each node: it reports on its machine, and measures the way to others."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from statistics import median
from typing import Final, NamedTuple

import aiodaft
from aiodaft._runtime.platform.interfaces import interface_to, interfaces
from aiodaft.actor import Actor
from aiodaft.methods import method
from aiodaft_transport.ucx import INTERFACE_VARIABLE

# The most calls that are measured, and the most seconds that they may take, unless one takes longer.
_CALLS: Final = 100
_SECONDS: Final = 0.1
_FEWEST: Final = 3
# Bytes of the first value, and of the largest one.
_SMALLEST: Final = 1 << 20
_LARGEST: Final = 64 << 20


class Facts(NamedTuple):
    """The facts that a process reports on its machine."""

    python: str
    aiodaft: str
    interfaces: dict[str, list[str]]
    # The interface that it names for `ucx`; empty: none.
    ucx: str

    def __str__(self) -> str:
        shown = [f"{name} {' '.join(ips)}" for name, ips in self.interfaces.items() if name != "lo"]
        if self.ucx:
            shown.append(f"ucx over {self.ucx}")
        return "  ".join([f"python {self.python}, aiodaft {self.aiodaft}", *shown])


def facts() -> Facts:
    return Facts(platform.python_version(), aiodaft.__version__, interfaces(), os.environ.get(INTERFACE_VARIABLE) or "")


class Probe(Actor, cpus=0):
    def __init__(self) -> None:
        self._value = b""

    @method
    async def facts(self) -> Facts:
        return facts()

    @method
    async def echo(self) -> None: ...

    @method
    async def prepare(self, size: int) -> None:
        self._value = bytes(size)

    @method(transport="tcp")
    async def give_tcp(self) -> bytes:
        return self._value

    @method(transport="ucx")
    async def give_ucx(self) -> bytes:
        return self._value

    @method
    async def call(self, other: Probe) -> float:
        return await call(other)

    @method
    async def fetch(self, other: Probe, transport: str) -> float:
        return await fetch(other, transport)

    @method
    async def way(self, address: str) -> str:
        return way(address)


async def call(other: Probe) -> float:
    """Seconds of a call of another process: the median."""
    await other.echo()
    taken: list[float] = []
    while len(taken) < _FEWEST or (sum(taken) < _SECONDS and len(taken) < _CALLS):
        taken.append(await _timed(other.echo))
    return median(taken)


async def fetch(other: Probe, transport: str) -> float:
    """Bytes per second at which a large value comes from another process: the best that was seen."""
    give, size, best = {"tcp": other.give_tcp, "ucx": other.give_ucx}[transport], _SMALLEST, 0.0
    while True:
        await other.prepare(size)
        # The first one opens the connections and memory that the others use.
        await give()
        seconds = min([await _timed(give) for _ in range(_FEWEST)])
        best = max(best, size / seconds)
        if size == _LARGEST or seconds > _SECONDS:
            return best
        size *= 4


async def _timed(step: Callable[[], Awaitable[object]]) -> float:
    start = time.perf_counter()
    await step()
    return time.perf_counter() - start


def way(address: str) -> str:
    """The interface that leads to a node; empty if that is not known."""
    with suppress(OSError):
        here = interface_to(address)
        return next((name for name, ips in interfaces().items() if here in ips), "")
    return ""
