"""Memory that the members of a group on one host share, and signals between them.

    words of all ranks | of each rank: why it has left | half 0: terms, window | half 1: terms, window

A rank writes into a half of its own, signals the others, and reads theirs when all have signalled. Halves take turns:
when a rank writes into one again, all others have signalled once more since, and so have read it.

The words of a rank count its signals. Ranks look at those of the others for a few microseconds, and then sleep: each
has an eventfd, which the rank that is the last to signal writes to. Processors that show others the writes of a rank
out of order have no words that count. There all ranks write to the eventfds of all, and the sum of the signals in one
counts: no rank can signal again before all have signalled as often, so it is full only when each has come. Bytes that a
rank writes before its signal are seen by those that have read the signal.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections.abc import Callable, Iterable, Sequence
from mmap import PAGESIZE, mmap
from typing import Any, Final, TypeVar

from aiodaft._runtime.actors.hosted_actor import InboundCall
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization.errors import copy_error
from aiodaft.exceptions import CallCancelled
from aiodaft_transport.memory import address_of, copy_memory

T = TypeVar("T")

# Bytes of a value that are under way at once, and of the terms of an exchange.
WINDOW: Final = 1 << 20
TERMS: Final = PAGESIZE
_HALF: Final = TERMS + WINDOW
_RANK: Final = PAGESIZE + 2 * _HALF
# The words of a rank, on a cache line of its own: the signals that it has sent; the numbers of its terms in each half;
# one more than the signals that it had sent when it has left, or 0.
_WORDS: Final = 8
_SENT, _NUMBER, _LEAVES = 0, 1, 3
_WORD: Final = 8
# Added to the signals of a rank that only have it look.
_LOOK: Final = 1 << 32
# Looks at the words before a thread sleeps: as long as it takes to wake it.
_LOOKS: Final = 100
_MAX_KEPT: Final = 500
ORDERED: Final = os.uname().machine == "x86_64"


def make_line(size: int) -> list[int]:
    """Descriptors for a line of so many members: the memory, and the signals of each.

    Raises:
        OSError: There are no descriptors or no memory left.
    """
    opened = [os.memfd_create("aiodaft-line", os.MFD_CLOEXEC)]
    try:
        os.ftruncate(opened[0], _first(size) + size * _RANK)
        opened.extend(os.eventfd(0, os.EFD_CLOEXEC) for _ in range(size))
    except BaseException:
        close_all(opened)
        raise
    return opened


def _first(size: int) -> int:
    return -(-size * _WORDS * _WORD // PAGESIZE) * PAGESIZE


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


class Line:
    """The end of one rank. Owns the descriptors, and closes them if it cannot be made.

    Raises:
        OSError: The system refuses the mapping.
    """

    def __init__(self, process: Process, group: str, rank: int, fds: Sequence[int]) -> None:
        self.group = group
        self.rank = rank
        self.size = len(fds) - 1
        memory, *signals = fds
        self.signals = signals
        try:
            self._mapping: Any = mmap(memory, _first(self.size) + self.size * _RANK)
        except OSError:
            close_all(signals)
            raise
        finally:
            # The mapping has a duplicate.
            os.close(memory)
        # Held by the thread or the task that does an exchange; the call that it belongs to; its half.
        self.turn = threading.Lock()
        self.call: InboundCall | None = None
        self.half = 0
        self.error: BaseException | None = None
        self._loop = process.loop
        self._address = address_of(self._mapping)
        self._words: Any = memoryview(self._mapping)[: _first(self.size)].cast("Q")
        self._mine = signals[rank]
        self._others = [fd for fd in signals if fd != self._mine]
        self._at = rank * _WORDS
        self._places = [other * _WORDS for other in range(self.size)]
        self._theirs = [place for place in self._places if place != self._at]
        # Signals that were sent to each other rank, and those of all others that were read.
        self._sent = self._came = 0
        # The terms in each half of this rank.
        self._told = [b"", b""]
        self._looks = _LOOKS if ORDERED and self.size <= len(os.sched_getaffinity(0)) else 0
        self._closing = False
        self._gate = threading.Lock()
        self._fence = threading.Lock()
        self.kept: dict[Any, Any] = {}
        # Watched by the loop: uvloop would make reads of the signals themselves fail where a thread has to block.
        self._poll: select.epoll | None = None

    def put(self, at: int, address: int, nbytes: int) -> None:
        copy_memory(self._address + self._start(self.rank) + TERMS + at, address, nbytes)

    def get(self, rank: int, at: int, address: int, nbytes: int) -> None:
        copy_memory(address, self._address + self._start(rank) + TERMS + at, nbytes)

    def keep(self, key: Any, make: Callable[[], T]) -> T:
        found: T | None = self.kept.get(key)
        if found is None:
            if len(self.kept) >= _MAX_KEPT:
                self.kept.clear()
            found = self.kept[key] = make()
        return found

    def views(self, at: int, count: int, dtype: Any) -> list[Any]:
        key = self.half, at, count, dtype
        return self.keep(key, lambda: [self.view(rank, at, count, dtype) for rank in range(self.size)])

    def view(self, rank: int, at: int, count: int, dtype: Any) -> Any:
        import torch  # noqa: PLC0415 - optional package

        # Inside of such a mode it could only be read outside.
        with torch.inference_mode(False):
            if not count:
                return torch.empty(0, dtype=dtype)
            return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=self._start(rank) + TERMS + at)

    def tell(self, number: int, terms: bytes) -> None:
        half = self.half
        self._words[self._at + _NUMBER + half] = number
        if self._told[half] is not terms:
            start = self._start(self.rank)
            self._mapping[start : start + len(terms)] = terms
            self._told[half] = terms

    def numbers(self) -> tuple[int, ...]:
        words, at = self._words, _NUMBER + self.half
        return tuple([words[place + at] for place in self._places])

    def terms(self) -> list[bytes]:
        starts = map(self._start, range(self.size))
        return [self._mapping[start : start + TERMS] for start in starts]

    def _start(self, rank: int) -> int:
        return _first(self.size) + rank * _RANK + PAGESIZE + self.half * _HALF

    def signal(self) -> None:
        self._sent += 1
        self._words[self._at + _SENT] = self._sent
        if ORDERED:
            # A lock is taken by an atomic instruction: before that, no later read of the others' words is done. So of
            # ranks that signal at once, one sees that it is the last.
            with self._fence:
                pass
            if not self.all_came():
                return
        for fd in self._others:
            os.eventfd_write(fd, 1)

    def all_came(self) -> bool:
        if not ORDERED:
            return self._came >= self._sent * len(self._others)
        words, sent = self._words, self._sent
        for at in self._theirs:  # noqa: SIM110 - a generator takes longer
            if words[at] < sent:
                return False
        return True

    def come_soon(self) -> bool:
        """Whether all others signal within a few microseconds."""
        for _ in range(self._looks):
            if self.all_came():
                return True
        return self.all_came()

    async def wait_here(self, _: object) -> None:
        while not self.all_came():
            self._check()
            self._came += os.eventfd_read(self._mine) % _LOOK

    async def wait_on_loop(self, _: object) -> None:
        if self._poll is None:
            self._poll = select.epoll()
            self._poll.register(self._mine, select.EPOLLIN)
        while not self.all_came():
            self._check()
            readable = self._loop.create_future()
            self._loop.add_reader(self._poll, _set, readable)
            try:
                await readable
            finally:
                self._loop.remove_reader(self._poll)
            self._came += os.eventfd_read(self._mine) % _LOOK

    def _check(self) -> None:
        for rank in range(self.size):
            at = rank * _WORDS
            # One that has left after this step has come to it.
            if self.error is None and self._words[at + _LEAVES] and self._words[at + _LEAVES] <= self._sent:
                start = _first(self.size) + rank * _RANK
                reason = self._mapping[start : start + PAGESIZE].rstrip(b"\0").decode(errors="replace")
                self.error = CallCancelled(f"the plan of {self.group}: rank {rank} has left it: {reason}")
        if self.error is not None:
            # With frames, it would keep views of the memory.
            raise copy_error(self.error)

    def leave(self, error: BaseException, reason: str) -> None:
        with self._gate:
            if self.error is None and self.signals:
                self.error = error
                page, start = reason.encode()[:PAGESIZE], _first(self.size) + self.rank * _RANK
                self._mapping[start : start + len(page)] = page
                self._words[self._at + _LEAVES] = self._sent + 1
                for fd in self.signals:
                    os.eventfd_write(fd, _LOOK)

    def fail(self, error: BaseException) -> None:
        """End the line for this member: the others hear of it by themselves."""
        with self._gate:
            if self.error is None and self.signals:
                self.error = error
                os.eventfd_write(self._mine, _LOOK)

    def release(self) -> None:
        self.call = None
        self.turn.release()
        if self._closing:
            self.close()

    def close(self) -> None:
        self._closing = True
        if self.turn.acquire(blocking=False):
            with self._gate:
                fds, self.signals = self.signals, []
            if self._poll is not None:
                self._poll.close()
            self.kept.clear()
            self._words = self._mapping = None
            close_all(fds)
            self.turn.release()


def _set(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)
