"""Actors that give one large value to many, and tell what that cost them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from here import current_peer

from aiodaft import Actor, method


def made(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The same bytes everywhere, no page like another."""
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)


def digest(value: Any) -> str:
    return hashlib.blake2b(value).hexdigest()


def memory(field: str) -> int:
    """Bytes of this process's memory of one kind, as the kernel counts it."""
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel does not count {field}")


class Source(Actor):
    """Makes a value for others."""

    @method
    async def make(self, nbytes: int) -> Any:
        return made(nbytes)

    @method
    async def sent(self) -> int:
        """Bytes of large values that went out."""
        return current_peer().connections.traffic().payload_sent

    @method
    async def landing_blocks(self) -> int:
        """Blocks of own memory that values came to over TCP."""
        return current_peer().store.transport_named("tcp").landing.live_blocks()  # type: ignore[attr-defined, no-any-return]

    @method
    async def transports(self) -> set[str]:
        """The transports that its process has used."""
        return set(current_peer().store.transports)

    @method
    async def members(self) -> int:
        """The number of processes that are getting, or passing on, a value of this one."""
        return sum(len(fanout.members) for fanout in current_peer().transfer.relays.table.fanouts.values())

    @method
    async def live_blocks(self) -> int:
        return current_peer().store.transport.arena.live_blocks()  # type: ignore[attr-defined, no-any-return]


class Sink(Source):
    """Takes a value; may keep it, and write to it."""

    def __init__(self) -> None:
        self.value: Any = None

    @method
    async def take(self, value: Any) -> str:
        return digest(value)

    @method
    async def spoil(self, value: Any) -> str:
        """Overwrites its argument."""
        found = digest(value)
        value[:] = 0
        return found

    @method
    async def hold(self, value: Any) -> tuple[str, int, int]:
        """Keeps the value; bytes of own memory, and of memory shared with others, that reading it took."""
        before = memory("Private_Dirty"), memory("Shared_Dirty")
        found = digest(value)
        self.value = value
        return found, memory("Private_Dirty") - before[0], memory("Shared_Dirty") - before[1]
