"""A peer that this process pulls from, and one such transfer."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from ctypes import c_uint64
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from aiodaft_transport.abc import BasePull, SegmentRemote
from aiodaft_transport.exceptions import PeerGone
from aiodaft_transport.memory import Arena, ArenaBlock, Region, Segment
from aiodaft_transport.ucx.ucp import Library, UcxError, Worker

if TYPE_CHECKING:
    from aiodaft_transport.abc import Control
    from aiodaft_transport.memory import Block


# Closing waits so long, at most, for operations in flight; they need milliseconds.
_CLOSE_TIME: Final = 5.0

logger: Final = logging.getLogger("aiodaft")

Completed: TypeAlias = Callable[[int], object]


class Endpoint(NamedTuple):
    handle: int
    number: int


class Driver:
    """Makes progress on the running loop. Call everything on that loop, except `worker.unregister`."""

    def __init__(self, library: Library, options: Mapping[str, str], turn_seconds: float) -> None:
        self.worker = Worker(library, options)
        # `progress` itself copies between processes.
        self._turn_seconds = turn_seconds
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Completed] = {}
        self._endpoints: dict[int, tuple[Endpoint, Completed]] = {}
        self._turning = False
        self._scheduled = False
        self._closed = False
        self.turns = 0
        self._loop.add_reader(self.worker.event_fd, self.turn)

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    def connect(self, address: bytes, on_failed: Completed) -> Endpoint:
        """UCX calls `on_failed` if it notices that the peer is gone."""
        number = next(self._numbers)
        endpoint = Endpoint(self.worker.connect(address, number), number)
        self._endpoints[number] = endpoint, on_failed
        # The caller must have the endpoint before `on_failed` is called.
        self._turn_soon()
        return endpoint

    def disconnect(self, endpoint: Endpoint) -> None:
        if self._endpoints.pop(endpoint.number, None) is None:
            return
        number = next(self._numbers)
        if not self.worker.disconnect(endpoint.handle, number):
            self._waiting[number] = lambda status: None
        self.turn()

    def get(
        self, endpoint: Endpoint, target: int, nbytes: int, source: int, rkey: int, memory: int, on_completed: Completed
    ) -> bool:
        """As `Worker.get`; True if it is done, else `on_completed` gets the status.

        The memory at both ends and the key must stay valid until then.
        """
        number = next(self._numbers)
        if self.worker.get(endpoint.handle, target, nbytes, source, rkey, memory, number):
            return True
        self._waiting[number] = on_completed
        return False

    def turn(self) -> None:
        """Works for `turn_seconds` at most; the rest follows in the next turn of the loop."""
        if self._turning or self._scheduled or self._closed:
            # The turn that called a callback continues its operations; operations begun together share a turn.
            return
        self._turning = True
        self.turns += 1
        try:
            self._work()
        finally:
            self._turning = False

    def _work(self) -> None:
        worker = self.worker
        until = time.perf_counter() + self._turn_seconds
        while not self._closed:
            busy = worker.progress()
            if worker.completed or worker.failed:
                self._settle()
            elif not busy and worker.arm():
                return
            if time.perf_counter() >= until:
                self._turn_soon()
                return

    def _turn_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._scheduled_turn)

    def _scheduled_turn(self) -> None:
        self._scheduled = False
        self.turn()

    def _settle(self) -> None:
        completed, failed = self.worker.completed, self.worker.failed
        while completed:
            number, status = completed.popleft()
            self._waiting.pop(number)(status)
        while failed:
            number, status = failed.popleft()
            known = self._endpoints.get(number)
            if known is not None:
                known[1](status)

    def close(self) -> None:
        """Afterwards UCX accesses no memory. Idempotent."""
        if self._closed:
            return
        for endpoint, _ in list(self._endpoints.values()):
            self.disconnect(endpoint)
        quiet = self._quieten()
        self._closed = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self.worker.event_fd)
        if quiet:
            self.worker.destroy()
        else:
            # UCX would abort the process if it were destroyed now.
            logger.error("UCX still has operations in flight; its worker and their memory are not freed")

    def _quieten(self) -> bool:
        until = time.perf_counter() + _CLOSE_TIME
        while time.perf_counter() < until:
            busy = self.worker.progress()
            if self.worker.completed or self.worker.failed:
                self._settle()
            elif not busy and not self._waiting and self.worker.arm():
                # A worker can be armed only if it has no work left, also none of closed endpoints.
                return True
        return False


WORD: Final = 8
_WORDS: Final = 1024


class Pool(Arena):
    def __init__(self, on_segment_closed: Callable[[int], object] | None = None) -> None:
        super().__init__(shared=False, on_segment_closed=self.closed)
        self._on_closed = on_segment_closed
        self._registered: dict[int, tuple[Worker, int]] = {}
        self.registrations = 0

    def memory_of(self, segment: Segment | Region, worker: Worker) -> int:
        known = self._registered.get(segment.id)
        if known is None:
            known = self._registered[segment.id] = worker, worker.register(segment.address, segment.size)
            self.registrations += 1
        return known[1]

    def key_of(self, segment: Segment | Region, worker: Worker) -> bytes:
        return worker.pack(self.memory_of(segment, worker))

    def closed(self, segment_id: int) -> None:
        """In any thread, while the memory is still there."""
        known = self._registered.pop(segment_id, None)
        if known is not None:
            worker, memory = known
            worker.unregister(memory)
        if self._on_closed is not None:
            self._on_closed(segment_id)


class Stamp:
    """A random word that a peer reads after each value: while it is unchanged, the value was still granted.

    Without it, a producer that gave up a peer could reuse a block while that peer copies it, and the torn value would
    be taken for a good one. The rest of the block is where the peer's own stamp is read into.
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
        """Of 1,024 reads at the same time, each has a cleared word of its own."""
        address = self.address + (1 + next(self._numbers) % _WORDS) * WORD
        c_uint64.from_address(address).value = 0
        return address

    def expire(self) -> None:
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
        self.users = 0


class Remote(SegmentRemote[RemoteSegment]):
    def __init__(self, control: Control, stamp: Stamp) -> None:
        super().__init__(control)
        self.stamp = stamp
        # After UCX broke an endpoint, a new one is made with the address.
        self.address = b""
        self.endpoint: Endpoint | None = None
        # Transfers that are ending may still use them.
        self.retired: list[int] = []
        self.stamped = RemoteSegment(0, 0, b"")
        self.expected_stamp = 0
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
    """Owns the block that it writes to until the transfer is over."""

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
        """A small transfer may be over when this returns."""
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
        """The waiter is gone: begin no more pieces."""
        self.done.cancel()
        self._stop()
        if self.is_over:
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
