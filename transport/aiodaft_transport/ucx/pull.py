"""What a process knows of a peer that it pulls from, and one such transfer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from aiodaft_transport.exceptions import PeerGone
from aiodaft_transport.ucx.registered_memory import WORD, Stamp, read_word
from aiodaft_transport.ucx.ucp import UcxError

if TYPE_CHECKING:
    from aiodaft_transport.abc import Control
    from aiodaft_transport.memory.registered import AnyBlock
    from aiodaft_transport.ucx.progress import Driver, Endpoint

PIECE: Final = 8 << 20
# Of one transfer. Two keep UCX busy while the loop learns that one is complete.
PIECES_IN_FLIGHT: Final = 2


class RemoteSegment:
    """Memory of a peer that grants are about."""

    __slots__ = ("address", "packed", "rkey", "size", "users")

    def __init__(self, address: int, size: int, packed: bytes) -> None:
        self.address = address
        self.size = size
        self.packed = packed
        self.rkey: int | None = None
        # Transfers that read it.
        self.users = 0

    def key(self, endpoint: Endpoint) -> int:
        """The key to read it with."""
        if self.rkey is None:
            self.rkey = endpoint.unpack(self.packed)
        return self.rkey


class Remote:
    """A peer: how to reach its worker, what of its memory is known here, and what of ours it may read."""

    def __init__(self, control: Control, stamp: Stamp) -> None:
        self.control = control
        self.stamp = stamp
        # Of its worker, once that is known. The endpoint is made with it, and made anew after UCX broke one.
        self.address = b""
        self.endpoint: Endpoint | None = None
        # Keys of endpoints that are no more; transfers that are ending may still use them.
        self.retired: list[int] = []
        # The segment that has nothing but its stamp.
        self.stamped = RemoteSegment(0, 0, b"")
        self.expected_stamp = 0
        self.segments: dict[int, RemoteSegment] = {}
        self.granted: dict[int, AnyBlock] = {}
        # Which of our own segments it knows, and whether it knows our address.
        self.told: set[int] = set()
        self.introduced = False
        self.pulls: set[Pull] = set()
        self.lost: str | None = None

    def cut(self, reason: str) -> None:
        """Fail the transfers from it, and close the connection."""
        endpoint, self.endpoint = self.endpoint, None
        for segment in (*self.segments.values(), self.stamped):
            if segment.rkey is not None:
                self.retired.append(segment.rkey)
                segment.rkey = None
        for pull in list(self.pulls):
            pull.fail(PeerGone(reason))
        if endpoint is not None:
            endpoint.close()


class Pull:
    """One transfer: owns the landing block until nothing can write to it any more."""

    def __init__(self, remote: Remote, driver: Driver, landing: AnyBlock, on_finished: Callable[[], object]) -> None:
        self.landing = landing
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._remote = remote
        self._driver = driver
        self._on_finished = on_finished
        self._begun = 0
        self._in_flight = 0
        self._word = 0
        self._stopped = False
        self._finished = False
        self._quiet: asyncio.Future[None] | None = None

    def begin(self, segment: RemoteSegment, offset: int, memory: int, stamp_memory: int) -> None:
        """Begin the first pieces. What is small may be here when this returns."""
        self._segment = segment
        self._source = segment.address + offset
        self._memory = memory
        self._stamp_memory = stamp_memory
        segment.users += 1
        self._remote.pulls.add(self)
        self._advance()

    def fail(self, error: Exception) -> None:
        """Tell the waiter now; what is in flight completes later."""
        if not self.done.done():
            self.done.set_exception(error)
            # Whoever waited may have been cancelled.
            self.done.exception()
        self._stop()

    def detach(self) -> None:
        """The waiter is gone: begin nothing more, and free the block when nothing is in flight."""
        self.done.cancel()
        self._stop()
        if self._finished:
            # It may have been complete, but was never taken.
            self.landing.release()

    async def wait_quiet(self) -> None:
        """After `fail` or `detach`: wait until nothing can write to the memory any more.

        Cancellation: does not end it, because UCX cannot be stopped either. Whoever calls this because of a
        cancellation passes that one on.
        """
        while not self._finished:
            if self._quiet is None:
                self._quiet = asyncio.get_running_loop().create_future()
            with suppress(asyncio.CancelledError):
                await asyncio.wait([self._quiet])

    def _stop(self) -> None:
        self._stopped = True
        if not self._in_flight:
            self._finish()

    def _advance(self) -> None:
        """Begin what may be begun."""
        try:
            while not self._stopped and self._in_flight < PIECES_IN_FLIGHT and self._begun < self.landing.nbytes:
                self._begin_piece()
            if not self._stopped and not self._in_flight:
                self._check_stamp()
        except UcxError as error:
            self.fail(error)

    def _begin_piece(self) -> None:
        start = self._begun
        size = min(PIECE, self.landing.nbytes - start)
        self._begun += size
        self._get(self._segment, self.landing.address + start, size, self._source + start, self._memory)

    def _check_stamp(self) -> None:
        """Everything is here: was it still granted when it was read?"""
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
        rkey = segment.key(endpoint)
        if not self._driver.get(endpoint, (target, nbytes, memory), (source, rkey), self._completed):
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
        if self._finished:
            return
        self._finished = True
        self._segment.users -= 1
        self._remote.pulls.discard(self)
        # Cancelling a task cancels what it awaits, before the task itself learns of it.
        if self._stopped or self.done.done():
            self.landing.release()
        else:
            self.done.set_result(None)
        if self._quiet is not None:
            self._quiet.set_result(None)
        self._on_finished()
