"""An actor that takes all file descriptors, or threads, of its process."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
from transport_probes import no_more_files, no_more_threads

from aiodaft import Actor, Channel, method


class Hoarder(Actor):
    """Its methods go on while nothing can be opened in its process."""

    def __init__(self) -> None:
        self._hoard = ExitStack()

    @method
    async def hoard(self) -> None:
        """From now on this process opens nothing more."""
        self._hoard.enter_context(no_more_files())

    @method
    async def hoard_threads(self) -> None:
        """From now on this process starts no thread."""
        self._hoard.enter_context(no_more_threads())

    @method
    async def release(self) -> str:
        """It may again."""
        self._hoard.close()
        return "released"

    @method
    def total(self, value: Any) -> float:
        return float(value.sum())

    @method
    def ones(self, count: int) -> Any:
        return np.ones(count, np.float32)

    @method
    async def zeros(self, count: int) -> bytes:
        return bytes(count)

    @method
    async def size(self, data: bytes) -> int:
        return len(data)

    @method
    async def total_of(self, other: Hoarder, count: int) -> float:
        """Of a value that comes from another actor."""
        return float((await other.ones(count)).sum())

    @method
    async def receive(self, channel: Channel[bytes]) -> bytes:
        """The next item of a channel."""
        return await channel.recv()
