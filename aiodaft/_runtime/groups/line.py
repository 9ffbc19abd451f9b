"""Memory that the members of a group on one host share, and signals between them.

    of each rank: how it has left | half 0: terms, window | half 1: terms, window

A rank writes into a half of its own, signals the others, and reads theirs when all have signalled. Halves take turns:
when a rank writes into one again, all others have signalled once more since, and so have read it.

A rank has one eventfd, which all others write to. It counts signals, and not their senders: no rank can signal again
before all have signalled as often, so the count is full only when each has come. Bytes that a rank writes before its
signal are seen by those that read the signal, on any processor.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections.abc import Iterable, Sequence
from mmap import PAGESIZE, mmap
from typing import Any, Final

from aiodaft._runtime.actors.hosted_actor import InboundCall
from aiodaft._runtime.process import Process
from aiodaft.exceptions import CallCancelled
from aiodaft_transport.memory.address import address_of, copy_memory

# Bytes of a value that are under way at once, and of the terms of an exchange.
WINDOW: Final = 1 << 20
TERMS: Final = PAGESIZE
_HALF: Final = TERMS + WINDOW
_RANK: Final = PAGESIZE + 2 * _HALF
# Added to the signals of a rank that sends no more.
_LEFT: Final = 1 << 32
# Bytes of the number of signals that a rank has sent.
_COUNT: Final = 8
_MAX_VIEWS: Final = 200


def make_line(size: int) -> list[int]:
    """Descriptors for a line of so many members: the memory, and the signals of each.

    Raises:
        OSError: There are no descriptors or no memory left.
    """
    opened = [os.memfd_create("aiodaft-line", os.MFD_CLOEXEC)]
    try:
        os.ftruncate(opened[0], size * _RANK)
        opened.extend(os.eventfd(0, os.EFD_CLOEXEC) for _ in range(size))
    except BaseException:
        close_all(opened)
        raise
    return opened


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
        # Until it is closed.
        self.signals = signals
        try:
            self._mapping: Any = mmap(memory, self.size * _RANK)
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
        # Why there is no further exchange.
        self.error: BaseException | None = None
        self._loop = process.loop
        self._address = address_of(self._mapping)
        self._mine = signals[rank]
        self._others = [fd for fd in signals if fd != self._mine]
        # Signals that were sent to each other rank, and those of the others that were read and belong to no earlier
        # step; whether a rank has left.
        self._sent = self._came = 0
        self._broken = self._closing = False
        # Held to write when this is not the turn, and to close.
        self._gate = threading.Lock()
        self._views: dict[Any, list[Any]] = {}
        # Watched by the loop: uvloop would make reads of the signals themselves fail where a thread has to block.
        self._poll: select.epoll | None = None

    # An exchange, by the holder of the turn.

    def put(self, at: int, address: int, nbytes: int) -> None:
        """Copy bytes into the window of this rank."""
        copy_memory(self._address + self._start(self.rank) + TERMS + at, address, nbytes)

    def get(self, rank: int, at: int, address: int, nbytes: int) -> None:
        """Copy bytes out of the window of a rank."""
        copy_memory(address, self._address + self._start(rank) + TERMS + at, nbytes)

    def views(self, at: int, count: int, dtype: Any) -> list[Any]:
        """Some elements in the windows of all ranks, as flat tensors."""
        key = self.half, at, count, dtype
        found = self._views.get(key)
        if found is None:
            import torch  # noqa: PLC0415 - optional package

            if len(self._views) == _MAX_VIEWS:
                self._views.clear()
            found = self._views[key] = [
                torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=self._start(rank) + TERMS + at)
                for rank in range(self.size)
            ]
        return found

    def put_terms(self, terms: bytes) -> None:
        start = self._start(self.rank)
        self._mapping[start : start + len(terms)] = terms

    def terms(self, nbytes: int = TERMS) -> list[bytes]:
        """The first bytes of the terms of each rank."""
        starts = map(self._start, range(self.size))
        return [self._mapping[start : start + nbytes] for start in starts]

    def _start(self, rank: int) -> int:
        return rank * _RANK + PAGESIZE + self.half * _HALF

    def signal(self) -> None:
        """Tell all others that this rank is as far as this."""
        self._sent += 1
        for fd in self._others:
            os.eventfd_write(fd, 1)

    def wait(self) -> None:
        """Block this thread until all others have signalled.

        Raises:
            BaseException: The error that has ended the line.
        """
        missing = self.size - 1
        while self._came < missing:
            self._check()
            self._add(os.eventfd_read(self._mine))
        self._came -= missing

    async def wait_on_loop(self) -> None:
        """The same, in a task."""
        missing = self.size - 1
        if self._poll is None:
            self._poll = select.epoll()
            self._poll.register(self._mine, select.EPOLLIN)
        while self._came < missing:
            self._check()
            readable = self._loop.create_future()
            self._loop.add_reader(self._poll, _set, readable)
            try:
                await readable
            finally:
                self._loop.remove_reader(self._poll)
            self._add(os.eventfd_read(self._mine))
        self._came -= missing

    def _add(self, signals: int) -> None:
        self._came += signals % _LEFT
        self._broken = self._broken or signals >= _LEFT

    def _check(self) -> None:
        if self._broken and self.error is None:
            for rank in range(self.size):
                page = self._mapping[rank * _RANK : rank * _RANK + PAGESIZE]
                reason = page[_COUNT:].rstrip(b"\0").decode(errors="replace")
                # One that has left after this step has come to it.
                if reason and int.from_bytes(page[:_COUNT], "little") < self._sent:
                    self.error = CallCancelled(f"the plan of {self.group}: rank {rank} has left it: {reason}")
                    break
        if self.error is not None:
            raise self.error

    # The end.

    def leave(self, error: BaseException, reason: str) -> None:
        """End the line for all members, from any thread; does nothing if it has ended."""
        with self._gate:
            if self.error is None and self.signals:
                self.error = error
                page = self._sent.to_bytes(_COUNT, "little") + reason.encode()[: PAGESIZE - _COUNT]
                self._mapping[self.rank * _RANK : self.rank * _RANK + len(page)] = page
                for fd in self.signals:
                    os.eventfd_write(fd, _LEFT)

    def fail(self, error: BaseException) -> None:
        """End the line for this member: the others hear of it by themselves."""
        with self._gate:
            if self.error is None and self.signals:
                self.error = error
                os.eventfd_write(self._mine, _LEFT)

    def release(self) -> None:
        """End a turn."""
        self.call = None
        self.turn.release()
        if self._closing:
            self.close()

    def close(self) -> None:
        """Free its memory, now or at the end of the turn under way. Idempotent."""
        self._closing = True
        if self.turn.acquire(blocking=False):
            with self._gate:
                fds, self.signals = self.signals, []
            if self._poll is not None:
                self._poll.close()
            self._views.clear()
            self._mapping = None
            close_all(fds)
            self.turn.release()


def _set(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)
