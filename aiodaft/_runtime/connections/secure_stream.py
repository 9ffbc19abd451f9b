"""TLS on a stream for payload, for clusters that encrypt those, too.

Transports use a plain socket, with calls that TLS has not. So they get one end of a socketpair, and a thread copies
between the other end and the connection with TLS. It ends with either of them.
"""

from __future__ import annotations

import select
import socket
from contextlib import ExitStack, suppress
from typing import Final

from aiodaft._runtime.connections.identity import Identity
from aiodaft._runtime.connections.secure_socket import RECORD, SecureSocket, secure
from aiodaft_transport import Key
from aiodaft_transport.system import start_thread

# Bytes that are under way in one direction.
_BUFFER: Final = 256 << 10


async def protect(stream: socket.socket, identity: Identity, session: Key, *, server: bool) -> socket.socket:
    """A socket for payload over an authenticated connection, encrypted if the key file says so.

    Cancellation: closes the connection.

    Args:
        stream: The connection, which this takes over.
        identity: The identity that both ends prove.
        session: The key of this connection.
        server: Whether this is the end that was connected to.

    Raises:
        NotAuthenticated: The other end is not the process that has proved the cluster key.
        PeerLost: The connection ended.
        OSError: There is no descriptor or thread for it.
    """
    if not identity.encrypts_payloads:
        return stream
    secured = await secure(stream, identity, session, server=server)
    with ExitStack() as opened:
        opened.enter_context(secured)
        ours, theirs = map(opened.enter_context, socket.socketpair())
        ours.setblocking(False)
        theirs.setblocking(False)
        start_thread(_copy, secured, theirs, name="aiodaft encrypts")
        opened.pop_all()
    return ours


def _copy(secured: SecureSocket, plain: socket.socket) -> None:
    with secured, plain:
        arriving, leaving = _Direction(secured, plain, RECORD), _Direction(plain, secured, _BUFFER)
        # A connection that breaks is the end of the stream, as for a socket without TLS.
        with suppress(OSError):
            while not (arriving.over or leaving.over):
                _wait_until_ready(secured, plain, arriving, leaving)
                arriving.go_on()
                leaving.go_on()


def _wait_until_ready(secured: socket.socket, plain: socket.socket, arriving: _Direction, leaving: _Direction) -> None:
    poller = select.poll()
    for sock, has_left, gets_left in ((secured, arriving.left, leaving.left), (plain, leaving.left, arriving.left)):
        # Each direction either waits for more, or for room. The end of a socket that none waits for would be told of
        # again and again.
        events = 0 if has_left else select.POLLIN
        events |= select.POLLOUT if gets_left else 0
        if events:
            poller.register(sock, events)
    poller.poll()


class _Direction:
    """Copies from one socket to another."""

    def __init__(self, source: socket.socket, target: socket.socket, size: int) -> None:
        self._source = source
        self._target = target
        self._buffer = memoryview(bytearray(size))
        # Read, and not written.
        self.left = self._buffer[:0]
        self.over = False

    def go_on(self) -> None:
        with suppress(BlockingIOError):
            if not self.left:
                count = self._source.recvmsg_into([self._buffer])[0]
                self.left = self._buffer[:count]
                self.over = not count
            while self.left:
                self.left = self.left[self._target.send(self.left) :]
