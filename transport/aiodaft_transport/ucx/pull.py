"""A peer that this process pulls from, and one such transfer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from aiodaft_transport.exceptions import PeerGone
from aiodaft_transport.memory.pull import BasePull
from aiodaft_transport.peers import SegmentRemote
from aiodaft_transport.ucx.registered_memory import WORD, Stamp, read_word
from aiodaft_transport.ucx.ucp import UcxError

if TYPE_CHECKING:
    from aiodaft_transport.abc import Control
    from aiodaft_transport.memory.registered import Block
    from aiodaft_transport.ucx.progress import Driver, Endpoint

PIECE: Final = 8 << 20
# Pieces of one transfer. Two keep UCX busy while the loop handles the completion of one.
PIECES_IN_FLIGHT: Final = 2


class RemoteSegment:
    """A segment of a peer."""

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
    """A peer: also its worker."""

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
        """Fail the transfers from it, and close the connection."""
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
        """All bytes are here: check that they were still granted when they were read."""
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
