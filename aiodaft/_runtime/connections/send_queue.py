"""The sending half of a connection: writes to a socket or a ring at once, and queues the bytes that do not fit."""

from __future__ import annotations

import array
import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Final

from aiodaft._runtime.connections.ring_poller import RingPair
from aiodaft._runtime.connections.route import Traffic
from aiodaft._runtime.platform.capabilities import Sockets

_MAX: Final = 8
# Room for ancillary data that a read needs.
SPACE: Final = socket.CMSG_SPACE(_MAX * array.array("i").itemsize)


class Descriptors:
    """Received descriptors that were not taken yet. Owns them.

    A read ends behind the bytes that descriptors were sent with, so those of one message come with one read.
    """

    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets
        # The descriptors of each message; None where this process had no room for all of them.
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
        """Hand the descriptors of the next message to the caller.

        Raises:
            LookupError: Another number of them was received.
            OSError: This process had no room for them.
        """
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
        # Called when the socket fails.
        self._broken = broken
        self._sockets = sockets
        self._socket: socket.socket | None = None
        # Replaces the socket for data that is sent from now on.
        self.ring: RingPair | None = None
        # Bytes, their descriptors, and the ring that they go to; None for the socket.
        self._waiting: deque[tuple[memoryview, tuple[int, ...], RingPair | None]] = deque()

    def attach(self, connection: socket.socket) -> None:
        self._socket = connection
        self.flush()

    def add(self, data: bytes, fds: tuple[int, ...]) -> None:
        """Queue bytes and descriptors. The descriptors are closed once they are sent."""
        self._waiting.append((memoryview(data), fds, self.ring))

    def write(self, data: bytes) -> None:
        connection, ring = self._socket, self.ring
        assert connection is not None
        if self._waiting:
            self.add(data, ())
            self.flush()
            return
        # The usual case: all of it goes at once.
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
