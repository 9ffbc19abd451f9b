"""Sockets between simulated processes: bytes take their time, come in pieces, and links are cut at any byte."""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Self, cast

from aiodaft._runtime.platform.capabilities import Sockets
from simulated.simulated_loop import SimulatedLoop, SimulatedProcess

# Real descriptors are smaller.
_FIRST_FD = 1_000_000


@dataclass
class NetworkConditions:
    """The behaviour of the network in one simulation.

    Attributes:
        delay: The longest that bytes are under way, in seconds.
        room: Bytes that a socket takes before it has to be read.
        chop: The probability that one read gets only part of the bytes that are there.
    """

    delay: float = 0.001
    room: int = 64 << 10
    chop: float = 0.0


@dataclass
class Packet:
    """Bytes that were written at once, and the descriptors that came with them."""

    data: bytes
    fds: list[int] = field(default_factory=list)


class End:
    """One end of a stream."""

    def __init__(self, net: SimulatedNetwork) -> None:
        self.net = net
        self.other: End
        # Open descriptors of it, and the process that has them; none while they travel.
        self.fds: dict[int, SimulatedProcess | None] = {}
        self.arrived: deque[Packet] = deque()
        self.under_way: deque[Packet] = deque()
        # Bytes of both.
        self.load = 0
        self.last_arrival = 0.0
        self.closed = False
        # Nothing more will come.
        self.ended = False
        self.broken = False

    # The number of the error that reads find when nothing more will come; None: it is the end of the stream.
    errno: int | None = None

    @property
    def room(self) -> int:
        """Bytes that the other side can write to this end now."""
        return self.net.conditions.room - self.load

    @property
    def refuses(self) -> bool:
        return self.closed or self.broken or self.other.closed

    def close(self) -> None:
        """The last descriptor is closed: the other side reads the bytes under way, and then the end."""
        if self.closed:
            return
        self.closed = True
        self.net.drop(self)
        self.other.travel(None)

    def travel(self, packet: Packet | None) -> None:
        """Something (None: the end) was sent to this end."""
        loop, rng = self.net.loop, self.net.loop.rng
        if packet is not None:
            self.under_way.append(packet)
            self.load += len(packet.data)
        arrival = loop.time() + rng.random() * self.net.conditions.delay
        self.last_arrival = max(self.last_arrival, arrival)
        loop.at(self.last_arrival, self._arrive, packet)

    def _arrive(self, packet: Packet | None) -> None:
        if packet is None:
            self.ended = True
        elif not self.under_way or self.under_way[0] is not packet:
            # The link was cut meanwhile.
            return
        else:
            self.arrived.append(self.under_way.popleft())
        self.net.wake(self)

    def cut(self) -> None:
        """Lose the bytes that are under way, from some byte on, and end."""
        coming, self.under_way = self.under_way, deque()
        torn = False
        for packet in coming:
            kept = 0 if torn else self.net.loop.rng.randrange(len(packet.data) + 1)
            torn = kept < len(packet.data)
            if kept:
                self.arrived.append(Packet(packet.data[:kept], packet.fds))
            else:
                self.net.close_all(packet.fds)
        self.ended = self.broken = True
        self.net.wake(self)


class SimulatedSocket:
    """A process's handle of an end; the part of `socket.socket` that links use."""

    family = socket.AF_UNIX

    def __init__(self, end: End, fd: int) -> None:
        self.end = end
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def send(self, data: Any, flags: int = 0) -> int:
        return self.sendmsg([data])

    def sendmsg(self, buffers: list[Any], ancillary: Any = ()) -> int:
        (data,) = buffers
        target = self.end.other
        if self.end.refuses:
            raise BrokenPipeError("the other side is gone")
        sent = min(len(data), target.room)
        if sent <= 0:
            raise BlockingIOError
        net = self.end.net
        fds = [net.copy_to_send(fd) for level, kind, passed in ancillary for fd in array.array("i", passed)]
        target.travel(Packet(bytes(data[:sent]), fds))
        return sent

    def recv_into(self, buffer: Any) -> int:
        return self.recvmsg_into([buffer])[0]

    def recvmsg_into(self, buffers: list[Any], space: int = 0) -> tuple[int, list[Any], int, None]:
        end, net = self.end, self.end.net
        if not end.arrived:
            if end.errno is not None:
                raise OSError(end.errno, os.strerror(end.errno))
            if end.ended:
                return 0, [], 0, None
            raise BlockingIOError
        packet = end.arrived.popleft()
        count = min(sum(map(len, buffers)), len(packet.data))
        if count > 1 and net.loop.rng.random() < net.conditions.chop:
            count = net.loop.rng.randrange(1, count + 1)
        if count < len(packet.data):
            end.arrived.appendleft(Packet(packet.data[count:]))
        end.load -= count
        net.own(packet.fds)
        if net._writable(end.other):
            net.wake(end.other)
        left = memoryview(packet.data)[:count]
        for buffer in buffers:
            size = min(len(buffer), len(left))
            buffer[:size], left = left[:size], left[size:]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", packet.fds).tobytes())] if packet.fds else []
        return count, rights, 0, None

    def getsockopt(self, level: int, option: int) -> int:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_ERROR)
        # The next read tells.
        return 0

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Nothing here depends on options."""

    def shutdown(self, how: int) -> None:
        assert how == socket.SHUT_RDWR
        self.end.ended = self.end.broken = True
        self.end.other.travel(None)
        self.end.net.wake(self.end)

    def close(self) -> None:
        self.end.net.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class SimulatedNetwork(Sockets):
    """All sockets of a simulation."""

    def __init__(self, loop: SimulatedLoop, conditions: NetworkConditions) -> None:
        self.loop = loop
        self.conditions = conditions
        self._numbers = count(_FIRST_FD)
        self._open: dict[int, End] = {}
        self._real: set[int] = set()
        # Ends with a scheduled reader or writer.
        self._woken: set[int] = set()
        self.ends: list[End] = []
        loop.on_watch = lambda fd: self.wake(self._open[fd])

    def connect(self, first: SimulatedProcess, second: SimulatedProcess) -> tuple[socket.socket, socket.socket]:
        return self.join(End(self), first, End(self), second)

    def join(
        self, one: End, first: SimulatedProcess, other: End, second: SimulatedProcess
    ) -> tuple[socket.socket, socket.socket]:
        """The same with these ends."""
        ends = one, other
        one.other, other.other = other, one
        self.ends.append(one)
        ours = SimulatedSocket(ends[0], self._new_fd(ends[0], first))
        theirs = SimulatedSocket(ends[1], self._new_fd(ends[1], second))
        return _as_socket(ours), _as_socket(theirs)

    def _new_fd(self, end: End, owner: SimulatedProcess | None) -> int:
        fd = next(self._numbers)
        self._open[fd] = end
        end.fds[fd] = owner
        self._close_at_death(fd, owner)
        return fd

    def _close_at_death(self, fd: int, owner: SimulatedProcess | None) -> None:
        if owner is not None:
            owner.on_death.append(lambda: self.close(fd))

    def connections(self) -> list[End]:
        self.ends = [end for end in self.ends if not (end.closed or end.other.closed or end.broken)]
        return self.ends

    def wake(self, end: End) -> None:
        """An end may have become readable or writable: call its reader or writer while it is."""
        for fd, owner in list(end.fds.items()):
            watched = fd in self.loop.readers or fd in self.loop.writers
            if owner is not None and watched and fd not in self._woken and (self._readable(end) or self._writable(end)):
                self._woken.add(fd)
                self.loop.within(owner, self._serve, fd, end)

    def _serve(self, fd: int, end: End) -> None:
        self._woken.discard(fd)
        if fd in self.loop.readers and self._readable(end):
            self.loop.note("read", fd)
            self.loop.readers[fd]()
        if fd in self.loop.writers and self._writable(end):
            self.loop.writers[fd]()
        if not end.closed and ((fd in self.loop.readers and self._readable(end)) or fd in self.loop.writers):
            self.wake(end)

    def _readable(self, end: End) -> bool:
        return bool(end.arrived) or end.ended

    def _writable(self, end: End) -> bool:
        # As unix sockets are: not for a few bytes.
        return end.other.room * 2 > self.conditions.room or end.refuses

    def drop(self, end: End) -> None:
        """Drop the unread data of an end, and close its descriptors."""
        for packet in (*end.arrived, *end.under_way):
            self.close_all(packet.fds)
        end.arrived.clear()
        end.under_way.clear()

    # The operating system's part.

    def pair(self) -> tuple[socket.socket, socket.socket]:
        return self.connect(self.loop.current, self.loop.current)

    def of_fd(self, fd: int) -> socket.socket:
        return _as_socket(SimulatedSocket(self._open[fd], fd))

    def dup(self, fd: int) -> int:
        return self._dup(fd, self.loop.current)

    def copy_to_send(self, fd: int) -> int:
        """A descriptor on its way, which belongs to no process."""
        return self._dup(fd, None)

    def _dup(self, fd: int, owner: SimulatedProcess | None) -> int:
        if fd < _FIRST_FD:
            copy = os.dup(fd)
            self._real.add(copy)
            return copy
        return self._new_fd(self._open[fd], owner)

    def close(self, fd: int) -> None:
        if fd < _FIRST_FD:
            self._real.discard(fd)
            os.close(fd)
            return
        end = self._open.pop(fd, None)
        if end is not None:
            del end.fds[fd]
            self.loop.readers.pop(fd, None)
            self.loop.writers.pop(fd, None)
            if not end.fds:
                end.close()

    def own(self, fds: list[int]) -> None:
        """Descriptors have come to the process that runs."""
        for fd in fds:
            if fd < _FIRST_FD:
                self._real.discard(fd)
            else:
                self._open[fd].fds[fd] = self.loop.current
                self._close_at_death(fd, self.loop.current)

    def bury(self) -> None:
        for fd in self._real:
            with suppress(OSError):
                os.close(fd)


def _as_socket(simulated: SimulatedSocket) -> socket.socket:
    """It has the methods of a socket that connections need."""
    return cast("socket.socket", simulated)
