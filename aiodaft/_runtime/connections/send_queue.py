"""The sending half of a connection: writes to a socket or a ring at once, and queues the bytes that do not fit."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable

from aiodaft._runtime.connections.shm_ring import RingPair
from aiodaft._runtime.connections.traffic import Traffic
from aiodaft._runtime.platform.sockets import Sockets


class SendQueue:
    """The sending half of a connection."""

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
        """Write the first entry to the ring; False if the ring is full, and will ring when it is not."""
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
        """Drop the queue, the socket and the ring. Their owner closes them."""
        self.drop()
        self._socket = None
        self.ring = None
