"""Two rings of bytes in shared memory, one for each direction: one writer, one reader, no lock, no system call.

Memory of one direction, a word per cache line:

    head | tail | reader sleeps | writer sleeps | 128 KiB of data

The writer copies data and then moves the head; the reader copies data and then moves the tail. On x86-64 stores become
visible in order, so the data below the head is complete.

A side that is about to sleep sets its flag and then checks the other side's word again. The side that moved a word then
checks the flag, and rings the doorbell (an eventfd) if it is set. A processor may swap a store with a later load, so a
barrier stands between. On other processors, where Python has no barrier, the doorbell is always rung.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from mmap import mmap
from typing import Final

# Words, each in a cache line of its own.
HEAD: Final = 0
_TAIL: Final = 8
_READER_SLEEPS: Final = 16
_WRITER_SLEEPS: Final = 24
_WORDS: Final = 32
_HEADER: Final = _WORDS * 8

# Bytes that one direction holds; further bytes wait in the writer.
CAPACITY: Final = 128 << 10
SIZE: Final = 2 * (_HEADER + CAPACITY)

# Whether stores become visible in order, and a locked instruction is a full barrier.
ORDERED: Final = os.uname().machine in ("x86_64", "AMD64")

_lock = threading.Lock()
_acquire, _release = _lock.acquire, _lock.release


def barrier() -> None:
    """A full barrier: later loads are not made before earlier stores."""
    # Taking a lock is a locked instruction, also without contention.
    _acquire()
    _release()


class _Direction:
    """One of the two rings, mapped in this process."""

    __slots__ = ("_mapping", "_ring_doorbell", "_start", "words")

    def __init__(self, mapping: mmap, start: int, ring_doorbell: Callable[[], object]) -> None:
        with memoryview(mapping) as region:
            self.words = region[start : start + _HEADER].cast("Q")
        # Slices of a mapping are cheaper than slices of a view.
        self._mapping = mapping
        self._start = start + _HEADER
        self._ring_doorbell = ring_doorbell

    def release(self) -> None:
        self.words.release()


class RingWriter(_Direction):
    """The writing end."""

    __slots__ = ("head",)

    def __init__(self, mapping: mmap, start: int, ring_doorbell: Callable[[], object]) -> None:
        super().__init__(mapping, start, ring_doorbell)
        # All bytes that were ever written.
        self.head = 0

    def write(self, data: bytes | memoryview) -> int:
        """Write as much as there is room for, wake a sleeping reader, and return the number of bytes written."""
        words, head = self.words, self.head
        count, room = len(data), CAPACITY - (head - words[_TAIL])
        if count > room:
            count, data = room, data[:room]
        if not count:
            return 0
        at, start, mapping = head % CAPACITY, self._start, self._mapping
        first = CAPACITY - at
        if count <= first:
            mapping[start + at : start + at + count] = data
        else:
            mapping[start + at : start + CAPACITY] = data[:first]
            mapping[start : start + count - first] = data[first:]
        words[HEAD] = self.head = head + count
        barrier()
        if words[_READER_SLEEPS] or not ORDERED:
            words[_READER_SLEEPS] = 0
            self._ring_doorbell()
        return count

    def wait_for_room(self) -> bool:
        """Ask the reader to ring when there is room; False if there is room already."""
        words = self.words
        words[_WRITER_SLEEPS] = 1
        barrier()
        return bool(self.head - words[_TAIL] == CAPACITY)


class RingReader(_Direction):
    """The reading end."""

    __slots__ = ("tail",)

    def __init__(self, mapping: mmap, start: int, ring_doorbell: Callable[[], object]) -> None:
        super().__init__(mapping, start, ring_doorbell)
        # All bytes that were ever read.
        self.tail = 0

    @property
    def filled(self) -> bool:
        return self.words[HEAD] != self.tail

    def read(self, most: int) -> bytes:
        """Read at most `most` bytes; empty if there is no data."""
        words, tail = self.words, self.tail
        count = words[HEAD] - tail
        if count > most:
            count = most
        if not count:
            return b""
        at, start, mapping = tail % CAPACITY, self._start, self._mapping
        first = CAPACITY - at
        if count <= first:
            data = mapping[start + at : start + at + count]
        else:
            data = mapping[start + at : start + CAPACITY] + mapping[start : start + count - first]
        words[_TAIL] = self.tail = tail + count
        barrier()
        if words[_WRITER_SLEEPS]:
            words[_WRITER_SLEEPS] = 0
            self._ring_doorbell()
        return data

    def sleep(self) -> None:
        """Ask the writer to ring. The caller then calls `barrier` and checks `filled` again."""
        self.words[_READER_SLEEPS] = 1

    def wake(self) -> None:
        self.words[_READER_SLEEPS] = 0


class RingPair:
    """Both directions on one side. Owns the mapping and both doorbells."""

    def __init__(self, memory: int, ours: int, theirs: int, *, first: bool) -> None:
        self.doorbell = ours
        self._theirs = theirs
        self._mapping = mmap(memory, SIZE)
        here, there = (0, SIZE // 2) if first else (SIZE // 2, 0)
        self.writer = RingWriter(self._mapping, here, self._ring)
        self.reader = RingReader(self._mapping, there, self._ring)
        self._closed = False

    def _ring(self) -> None:
        os.eventfd_write(self._theirs, 1)

    def quiet(self) -> None:
        try:
            os.eventfd_read(self.doorbell)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Unmap, and close the doorbells. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.writer.release()
        self.reader.release()
        self._mapping.close()
        os.close(self.doorbell)
        os.close(self._theirs)


def offer_rings() -> tuple[RingPair, tuple[int, int, int]]:
    """Make rings. Returns this side, and the descriptors for the peer: memory, its doorbell, the other doorbell.

    The caller closes the memory.

    Raises:
        OSError: There are no descriptors or no memory left.
    """
    memory = os.memfd_create("aiodaft-ring", os.MFD_CLOEXEC)
    opened = [memory]
    try:
        os.ftruncate(memory, SIZE)
        opened += [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2)]
        _, ours, theirs = opened
        return RingPair(memory, ours, theirs, first=True), (memory, theirs, ours)
    except BaseException:
        for fd in opened:
            os.close(fd)
        raise


def take_rings(memory: int, ours: int, theirs: int) -> RingPair:
    """Open the peer's side of offered rings. Takes over the doorbells; the caller closes the memory.

    Raises:
        ValueError: The memory has another size.
        OSError: The system refuses the mapping.
    """
    try:
        if os.fstat(memory).st_size != SIZE:
            raise ValueError("the memory does not have the size of two rings")
        return RingPair(memory, ours, theirs, first=False)
    except (OSError, ValueError):
        os.close(ours)
        os.close(theirs)
        raise
