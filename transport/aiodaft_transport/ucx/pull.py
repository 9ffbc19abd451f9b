"""A peer that this process pulls from, and one such transfer."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from ctypes import c_uint64
from itertools import count
from typing import TYPE_CHECKING, Final

from aiodaft_transport.exceptions import PeerGone
from aiodaft_transport.memory.block_pool import Arena, ArenaBlock, Segment
from aiodaft_transport.memory.pull import BasePull
from aiodaft_transport.memory.registered import Region
from aiodaft_transport.peers import SegmentRemote
from aiodaft_transport.ucx.ucp import UcxError, Worker

if TYPE_CHECKING:
    from aiodaft_transport.abc import Control
    from aiodaft_transport.memory.registered import Block
    from aiodaft_transport.ucx.progress import Driver, Endpoint


WORD: Final = 8
_WORDS: Final = 1024


class Pool(Arena):
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


PIECE: Final = 8 << 20
# Pieces of one transfer. Two keep UCX busy while the loop handles the completion of one.
PIECES_IN_FLIGHT: Final = 2


class RemoteSegment:
    __slots__ = ("address", "packed", "rkey", "size", "users")

    def __init__(self, address: int, size: int, packed: bytes) -> None:
        self.address = address
        self.size = size
        self.packed = packed
        # The key to read it with, for the present endpoint.
        self.rkey: int | None = None
        # Transfers that read it.
        self.users = 0


class Remote(SegmentRemote[RemoteSegment]):
    def __init__(self, control: Control, stamp: Stamp) -> None:
        super().__init__(control)
        self.stamp = stamp
        # The address of its worker, once that is known. After UCX broke an endpoint, a new one is made with it.
        self.address = b""
        self.endpoint: Endpoint | None = None
        # Keys of closed endpoints; transfers that are ending may still use them.
        self.retired: list[int] = []
        # The segment with its stamp alone.
        self.stamped = RemoteSegment(0, 0, b"")
        self.expected_stamp = 0
        # Whether it knows the address of this process.
        self.introduced = False
        self.pulls: set[Pull] = set()
        self.lost = False

    def cut(self, driver: Driver, reason: str) -> None:
        endpoint, self.endpoint = self.endpoint, None
        for segment in (*self.segments.values(), self.stamped):
            if segment.rkey is not None:
                self.retired.append(segment.rkey)
                segment.rkey = None
        for pull in list(self.pulls):
            pull.fail(PeerGone(reason))
        if endpoint is not None:
            driver.disconnect(endpoint)


class Pull(BasePull[None]):
    """One transfer. Owns the block that it writes to until it is over."""

    def __init__(self, remote: Remote, driver: Driver, landing: Block, on_finished: Callable[[], object]) -> None:
        super().__init__()
        self.landing = landing
        self._remote = remote
        self._driver = driver
        self._on_finished = on_finished
        self._begun = 0
        self._in_flight = 0
        self._word = 0
        self._stopped = False

    def begin(self, segment: RemoteSegment, offset: int, memory: int, stamp_memory: int) -> None:
        """Begin the first pieces. A small transfer may be over when this returns."""
        self._segment = segment
        self._source = segment.address + offset
        self._memory = memory
        self._stamp_memory = stamp_memory
        segment.users += 1
        self._remote.pulls.add(self)
        self._advance()

    def fail(self, error: Exception) -> None:
        self.set_error(error)
        self._stop()

    def detach(self) -> None:
        """The waiter is gone: begin no more pieces, and release the block when none is in flight."""
        self.done.cancel()
        self._stop()
        if self.is_over:
            # The transfer may have been complete, and its result was never taken.
            self.landing.release()

    def _stop(self) -> None:
        self._stopped = True
        if not self._in_flight:
            self._finish()

    def _advance(self) -> None:
        try:
            while not self._stopped and self._in_flight < PIECES_IN_FLIGHT and self._begun < self.landing.nbytes:
                start, left = self._begun, self.landing.nbytes - self._begun
                self._begun += min(PIECE, left)
                address = self.landing.address + start
                self._get(self._segment, address, min(PIECE, left), self._source + start, self._memory)
            if not self._stopped and not self._in_flight:
                self._check_stamp()
        except UcxError as error:
            self.fail(error)

    def _check_stamp(self) -> None:
        if not self._word:
            self._word = self._remote.stamp.landing_word()
            stamped = self._remote.stamped
            self._get(stamped, self._word, WORD, stamped.address, self._stamp_memory)
            if self._in_flight:
                return
        if read_word(self._word) == self._remote.expected_stamp:
            self._finish()
        else:
            self.fail(PeerGone(f"{self._remote.control.peer} took the grant back while it was read"))

    def _get(self, segment: RemoteSegment, target: int, nbytes: int, source: int, memory: int) -> None:
        endpoint = self._remote.endpoint
        assert endpoint is not None
        if segment.rkey is None:
            segment.rkey = self._driver.worker.unpack(endpoint.handle, segment.packed)
        if not self._driver.get(endpoint, target, nbytes, source, segment.rkey, memory, self._completed):
            self._in_flight += 1

    def _completed(self, status: int) -> None:
        self._in_flight -= 1
        if self._stopped:
            self._stop()
        elif status < 0:
            text = self._driver.worker.library.text(status)
            self.fail(PeerGone(f"{self._remote.control.peer} cannot be read any more: {text}"))
        else:
            self._advance()

    def _finish(self) -> None:
        if self.is_over:
            return
        self._segment.users -= 1
        self._remote.pulls.discard(self)
        # Cancelling a task cancels the awaited future, before the task itself learns of it.
        if self._stopped or self.done.done():
            self.landing.release()
        else:
            self.done.set_result(None)
        self.set_over()
        self._on_finished()
