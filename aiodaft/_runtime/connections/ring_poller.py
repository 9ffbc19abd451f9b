"""Sends to sockets and rings, and reads the rings of one process: polls them for a short while
after each message, and otherwise waits for doorbells.

                     a message was sent or received
             +---------------------------------------------+
             |                                             v
          asleep                                        polling
             ^                                             |
             +---------------------------------------------+
              polling does not pay, and no data came while
              this asked the writers to ring the doorbell

State     `polling`    Writers ring the doorbell   In each turn of the loop
asleep    False        yes                         nothing
polling   True         no                          `_turn`: look, read, or yield the processor

`_protocol.connections.session` decides whether polling pays. A process without traffic uses no processor time.
"""

from __future__ import annotations

import array
import asyncio
import errno
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from mmap import mmap
from typing import Final, Protocol

from aiodaft._protocol.connections.session import Idle, Pace
from aiodaft._runtime.connections.route import Traffic
from aiodaft._runtime.platform.capabilities import Sockets
from aiodaft._runtime.platform.tasks import Wakeups
from aiodaft_transport.system import usable_cpus

# Two rings of bytes in shared memory, one for each direction: one writer, one reader, no lock, no system call.
#
# Memory of one direction, a word per cache line:
#
#     head | tail | reader sleeps | writer sleeps | 128 KiB of data
#
# The writer copies data and then moves the head; the reader copies data and then moves the tail. On x86-64 stores
# become visible in order, so the data below the head is complete.
#
# A side that is about to sleep sets its flag and then checks the other side's word again. The side that moved a word
# then checks the flag, and rings the doorbell (an eventfd) if it is set. A processor may swap a store with a later
# load, so a barrier stands between. On other processors, where Python has no barrier, the doorbell is always rung.

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
    # Taking a lock is a locked instruction, also without contention.
    _acquire()
    _release()


class _Direction:
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
    __slots__ = ("head",)

    def __init__(self, mapping: mmap, start: int, ring_doorbell: Callable[[], object]) -> None:
        super().__init__(mapping, start, ring_doorbell)
        self.head = 0

    def write(self, data: bytes | memoryview) -> int:
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
        words = self.words
        words[_WRITER_SLEEPS] = 1
        barrier()
        return bool(self.head - words[_TAIL] == CAPACITY)


class RingReader(_Direction):
    __slots__ = ("tail",)

    def __init__(self, mapping: mmap, start: int, ring_doorbell: Callable[[], object]) -> None:
        super().__init__(mapping, start, ring_doorbell)
        self.tail = 0

    @property
    def filled(self) -> bool:
        return self.words[HEAD] != self.tail

    def read(self, most: int) -> bytes:
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
        if self._closed:
            return
        self._closed = True
        self.writer.release()
        self.reader.release()
        self._mapping.close()
        os.close(self.doorbell)
        os.close(self._theirs)


def offer_rings() -> tuple[RingPair, tuple[int, int, int]]:
    """Returns this side, and the descriptors for the peer: memory, its doorbell, the other doorbell.

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
    """Takes over the doorbells; the caller closes the memory.

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


# Looks at rings in one turn of the loop; together they take less than ten microseconds.
_LOOKS: Final = 64

_now = time.perf_counter


class RingUser(Protocol):
    def ring_readable(self) -> None: ...

    def ring_writable(self) -> None: ...


class RingPoller:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.wakeups = Wakeups(loop)
        self._writes: deque[Callable[[], object]] = deque()
        # Replaced with every change, so that a loop over the old tuple detects the change.
        self._rings: tuple[tuple[RingPair, RingUser], ...] = ()
        # Turns run in the context of the code that added the last ring, not in that of a task that sends.
        self._context = copy_context()
        self.turns = 0
        self.pace = Pace(may_poll=ORDERED and usable_cpus() > 1)
        self.polling = False

    def add(self, ring: RingPair, user: RingUser) -> None:
        self._rings = (*self._rings, (ring, user))
        self._context = copy_context()
        self._loop.add_reader(ring.doorbell, self._rang, ring, user)
        self.look()

    def remove(self, ring: RingPair) -> None:
        others = tuple(entry for entry in self._rings if entry[0] is not ring)
        if len(others) < len(self._rings):
            self._rings = others
            self._loop.remove_reader(ring.doorbell)

    def abandon(self) -> None:
        self._rings = ()

    def look(self) -> None:
        self.pace.since = _now()
        if self._rings and not self.polling:
            self.polling = True
            self._wake()
            self._loop.call_soon(self._turn, context=self._context)

    def before_looking(self, write: Callable[[], object]) -> None:
        self._writes.append(write)
        self.look()

    def _rang(self, ring: RingPair, user: RingUser) -> None:
        ring.quiet()
        try:
            user.ring_writable()
            if self._read():
                self.pace.came(_now())
        finally:
            # The doorbell does not ring again for data that was not read.
            self.look()
        self.wakeups.run()

    def _write(self) -> None:
        while self._writes:
            self._writes.popleft()()

    def _turn(self) -> None:
        self.turns += 1
        try:
            if self._writes:
                self._write()
            found = self._find()
            if found:
                self.pace.came(_now())
            else:
                now = _now()
                idle = self.pace.idle(now)
                if idle is Idle.YIELD:
                    os.sched_yield()
                    self.pace.yielded(_now() - now)
                elif idle is Idle.SLEEP and self._asleep():
                    self.polling = False
                    return
        except BaseException:
            # SystemExit or KeyboardInterrupt; the program may catch it outside of the loop, and go on.
            self._loop.call_soon(self._turn, context=self._context)
            raise
        self._loop.call_soon(self._turn, context=self._context)
        if found:
            self.wakeups.run()
            if self._writes:
                self._write()

    def _find(self) -> bool:
        # A turn of the loop takes longer than a look.
        rings, pace = self._rings, self.pace
        alone = pace.may_poll and not (pace.threads or pace.crowded)
        for _ in range(_LOOKS // (len(rings) or 1) + 1 if alone else 1):
            for ring, _ in rings:
                reader = ring.reader
                # `reader.filled`, inlined.
                if reader.words[HEAD] != reader.tail:
                    return self._read()
        return False

    def _read(self) -> bool:
        found = False
        rings, wakeups = self._rings, self.wakeups
        wakeups.collecting = True
        try:
            for ring, user in rings:
                if ring.reader.filled:
                    found = True
                    user.ring_readable()
                    if self._rings is not rings:
                        break
        finally:
            wakeups.collecting = False
        return found

    def _asleep(self) -> bool:
        for ring, _ in self._rings:
            ring.reader.sleep()
        barrier()
        if any(ring.reader.filled for ring, _ in self._rings):
            self._wake()
            return False
        return True

    def _wake(self) -> None:
        for ring, _ in self._rings:
            ring.reader.wake()


_MAX: Final = 8
SPACE: Final = socket.CMSG_SPACE(_MAX * array.array("i").itemsize)


class Descriptors:
    """Received descriptors that were not taken yet. Owns them.

    A read ends behind the bytes that descriptors were sent with, so those of one message come with one read.
    """

    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets
        # None: this process had no room for them.
        self._came: deque[list[int] | None] = deque()

    def add(self, ancillary: list[tuple[int, int, bytes]], flags: int) -> None:
        fds = array.array("i")
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        if flags & socket.MSG_CTRUNC:
            self._sockets.close_all(fds)
            self._came.append(None)
        elif fds:
            self._came.append(list(fds))

    @property
    def some_came(self) -> bool:
        return bool(self._came)

    def take(self, count: int) -> list[int]:
        fds = self._came.popleft() if self._came else []
        if fds is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if len(fds) != count:
            self._sockets.close_all(fds)
            raise LookupError(f"{len(fds)} descriptors came, not {count}")
        return fds

    def close(self) -> None:
        while self._came:
            self._sockets.close_all(self._came.popleft() or ())


class SendQueue:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        traffic: Traffic,
        look: Callable[[], object],
        broken: Callable[[OSError], object],
        sockets: Sockets,
    ) -> None:
        self._loop = loop
        self._traffic = traffic
        # Called before a write to a ring: the answer may come soon.
        self._look = look
        self._broken = broken
        self._sockets = sockets
        self._socket: socket.socket | None = None
        self.ring: RingPair | None = None
        self._waiting: deque[tuple[memoryview, tuple[int, ...], RingPair | None]] = deque()

    def attach(self, connection: socket.socket) -> None:
        self._socket = connection
        self.flush()

    def add(self, data: bytes, fds: tuple[int, ...]) -> None:
        self._waiting.append((memoryview(data), fds, self.ring))

    def write(self, data: bytes) -> None:
        connection, ring = self._socket, self.ring
        assert connection is not None
        if self._waiting:
            self.add(data, ())
            self.flush()
            return
        try:
            if ring is None:
                sent = connection.send(data)
                self._traffic.control_sent += sent
            else:
                self._look()
                sent = ring.writer.write(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._broken(error)
            return
        if sent < len(data):
            self._waiting.append((memoryview(data)[sent:], (), ring))
            self.flush()

    def flush(self) -> None:
        connection = self._socket
        if connection is None:
            return
        try:
            while self._waiting:
                data, fds, ring = self._waiting[0]
                if ring is not None:
                    if not self._put(connection, ring, data, fds):
                        return
                    continue
                sent = socket.send_fds(connection, [data], list(fds)) if fds else connection.send(data)
                self._traffic.control_sent += sent
                self._sockets.close_all(fds)
                self._sent(sent)
        except BlockingIOError:
            self._loop.add_writer(connection.fileno(), self._writable)
        except OSError as error:
            self._broken(error)

    def _put(self, connection: socket.socket, ring: RingPair, data: memoryview, fds: tuple[int, ...]) -> bool:
        if fds:
            # Before their message, so that the reader of the message finds them.
            socket.send_fds(connection, [b"\0"], list(fds))
            self._sockets.close_all(fds)
        self._look()
        sent = ring.writer.write(data)
        self._sent(sent)
        return bool(sent) or not ring.writer.wait_for_room()

    def _sent(self, count: int) -> None:
        data, _, ring = self._waiting[0]
        if count < len(data):
            self._waiting[0] = (data[count:], (), ring)
        else:
            self._waiting.popleft()

    def _writable(self) -> None:
        if self._socket is not None:
            self._loop.remove_writer(self._socket.fileno())
            self.flush()

    def drop(self) -> None:
        for _, fds, _ in self._waiting:
            self._sockets.close_all(fds)
        self._waiting.clear()

    def close(self) -> None:
        self.drop()
        self._socket = None
        self.ring = None
