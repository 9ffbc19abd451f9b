"""Memory for UCX: pools that register each segment once, and the words that tell a reader that it read in time."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from ctypes import c_uint64
from itertools import count
from typing import Final

from aiodaft_transport.memory.host_pool import Arena, ArenaBlock, Segment
from aiodaft_transport.memory.registered import Region
from aiodaft_transport.ucx.ucp import Worker

WORD: Final = 8
_WORDS: Final = 1024


class Pool(Arena):
    """An arena that registers each segment once, at its first use."""

    def __init__(self, on_segment_closed: Callable[[int], object] | None = None) -> None:
        super().__init__(shared=False, on_segment_closed=self.closed)
        self._on_closed = on_segment_closed
        self._registered: dict[int, tuple[Worker, int]] = {}
        # The number of segments registered so far.
        self.registrations = 0

    def memory_of(self, segment: Segment | Region, worker: Worker) -> int:
        """The handle of a segment, or of a region that is told of by `closed`."""
        known = self._registered.get(segment.id)
        if known is None:
            known = self._registered[segment.id] = worker, worker.register(segment.address, segment.size)
            self.registrations += 1
        return known[1]

    def key_of(self, segment: Segment | Region, worker: Worker) -> bytes:
        return worker.pack(self.memory_of(segment, worker))

    def closed(self, segment_id: int) -> None:
        """A segment or region is no more. In any thread, while its memory is still there."""
        known = self._registered.pop(segment_id, None)
        if known is not None:
            worker, memory = known
            worker.unregister(memory)
        if self._on_closed is not None:
            self._on_closed(segment_id)


class Stamp:
    """A random word that a peer reads after each value: while it is unchanged, the value was still granted.

    Without it, a producer that gave up a peer could reuse a block while that peer, not knowing it yet, copies it, and
    the torn value would be taken for a good one. The rest of the block is where the peer's own stamp is read into.
    """

    __slots__ = ("_numbers", "address", "block", "value")

    def __init__(self, pool: Pool) -> None:
        self.block: ArenaBlock = pool.allocate((1 + _WORDS) * WORD)
        self.address = self.block.address
        # Zero is the value of a stamp that is over.
        self.value = secrets.randbits(64) | 1
        c_uint64.from_address(self.address).value = self.value
        self._numbers = count()

    def landing_word(self) -> int:
        """Address of a cleared word; of 1,024 reads at the same time, each has one of its own."""
        address = self.address + (1 + next(self._numbers) % _WORDS) * WORD
        c_uint64.from_address(address).value = 0
        return address

    def expire(self) -> None:
        """From now on, nothing that the peer reads counts."""
        c_uint64.from_address(self.address).value = 0


def read_word(address: int) -> int:
    return c_uint64.from_address(address).value
