"""TLS 1.3 on a connection between hosts: a socket for `Connection` and its `SendQueue`.

    secured = await secure(sock, identity, session, server=False)  # the process that connected
    secured = await secure(sock, identity, session, server=True)  # the process that the connection is for
    connection.attach(secured, far=True)

It ends in the two processes themselves. Both show the certificate of the cluster, which is in the key file. First, each
side sends a MAC of it under the session key of the handshake: so the other end of TLS is the process that has proved
the cluster key on this connection, and not another one.
"""

from __future__ import annotations

import asyncio
import hashlib
import select
import socket
import ssl
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from aiodaft._runtime.connections.identity import Identity
from aiodaft.exceptions import DaftError, NotAuthenticated, PeerLost
from aiodaft_transport import Key
from aiodaft_transport.system import start_thread

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


T = TypeVar("T")

DEADLINE: Final = 5.0
RECORD: Final = 16 << 10
_LABELS: Final = {True: b"tls server", False: b"tls client"}
_PROOF_SIZE: Final = 32


class SecureSocket(ssl.SSLSocket):
    """A socket with TLS that behaves like one without: it is never blocking, and nothing waits in it.

    When `send` has raised BlockingIOError, the next one must be of the same data. Descriptors cannot be sent.
    """

    def send(self, data: ReadableBuffer, flags: int = 0) -> int:
        try:
            return self.write(data)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            raise BlockingIOError from None

    def recvmsg_into(  # type: ignore[override]  # SSLSocket has none
        self, buffers: Iterable[Any], ancbufsize: int = 0, flags: int = 0
    ) -> tuple[int, list[tuple[int, int, bytes]], int, None]:
        """The first buffer has room for a record, so no byte stays where the event loop does not see it.

        Raises:
            BlockingIOError: No record is complete.
            ValueError: The buffer is too small.
        """
        buffer = memoryview(next(iter(buffers)))
        if len(buffer) < RECORD:
            raise ValueError(f"a buffer for TLS has at least {RECORD} bytes, not {len(buffer)}")
        try:
            return cast("int", self.read(len(buffer), buffer)), [], 0, None
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None


async def secure(sock: socket.socket, identity: Identity, session: Key, *, server: bool) -> SecureSocket:
    """Use TLS on a connection that both ends have authenticated.

    Cancellation: closes the socket.

    Args:
        sock: It is closed on failure.
        server: Whether this is the end that was connected to.

    Raises:
        NotAuthenticated: The other end is not the process that has proved the cluster key.
        PeerLost: The connection ended, or the other end did not finish within `DEADLINE`. `.executed` is False.
    """
    context = identity.server_context if server else identity.client_context
    context.sslsocket_class = SecureSocket
    try:
        async with asyncio.timeout(DEADLINE):
            sock.setblocking(False)
            # A socket that was reset meanwhile would be lost, open, in an error of `wrap_socket`.
            sock.getpeername()
            sock = secured = context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)
            assert isinstance(secured, SecureSocket)
            await _complete(secured, secured.do_handshake)
            await _exchange_proofs(secured, identity, session, server=server)
    except OSError as error:
        sock.close()
        raise _plainly(error) from error
    except BaseException:
        sock.close()
        raise
    return secured


async def _exchange_proofs(secured: SecureSocket, identity: Identity, session: Key, *, server: bool) -> None:
    if secured.getpeercert(binary_form=True) != identity.certificate:
        raise NotAuthenticated("the other end of a connection shows another certificate than that of the cluster")
    bound = hashlib.sha256(identity.certificate).digest()
    await _complete(secured, lambda: secured.write(session.mac(_LABELS[server], bound)))
    proof = await _complete(secured, lambda: secured.read(_PROOF_SIZE))
    if not proof:
        raise ssl.SSLEOFError("the other end closed it")
    # The proof is a record of its own: nothing that came with it waits where the event loop does not see it.
    if secured.pending() or not session.made(proof, _LABELS[not server], bound):
        raise NotAuthenticated("the other end of a connection is not the process that has proved the cluster key")


async def _complete(secured: SecureSocket, step: Callable[[], T]) -> T:
    loop = asyncio.get_running_loop()
    fd = secured.fileno()
    while True:
        ready = loop.create_future()
        try:
            return step()
        except ssl.SSLWantReadError:
            loop.add_reader(fd, _wake, ready)
            stop = loop.remove_reader
        except ssl.SSLWantWriteError:
            loop.add_writer(fd, _wake, ready)
            stop = loop.remove_writer
        try:
            await ready
        finally:
            stop(fd)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _plainly(error: OSError) -> DaftError:
    if isinstance(error, TimeoutError):
        return PeerLost(f"the other end of a connection did not finish TLS in {DEADLINE:g} s", executed=False)
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return NotAuthenticated(f"TLS with the other end of a connection failed: {error.reason}")
    return PeerLost(f"the connection ended before TLS was set up: {error}", executed=False)


# TLS on a stream for payload. Transports use a plain socket, with calls that TLS has not. So they get one end of a
# socketpair, and a thread copies between the other end and the connection with TLS.

_BUFFER: Final = 256 << 10


async def protect(stream: socket.socket, identity: Identity, session: Key, *, server: bool) -> socket.socket:
    """A socket for payload over an authenticated connection, encrypted if the key file says so.

    Cancellation: closes the connection.

    Args:
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
        # A connection that breaks is the end of the stream, as without TLS.
        with suppress(OSError):
            while not (arriving.over or leaving.over):
                _wait_until_ready(secured, plain, arriving, leaving)
                arriving.go_on()
                leaving.go_on()


def _wait_until_ready(secured: socket.socket, plain: socket.socket, arriving: _Direction, leaving: _Direction) -> None:
    poller = select.poll()
    for sock, has_left, gets_left in ((secured, arriving.left, leaving.left), (plain, leaving.left, arriving.left)):
        # The end of a socket that none waits for would be told of again and again.
        events = 0 if has_left else select.POLLIN
        events |= select.POLLOUT if gets_left else 0
        if events:
            poller.register(sock, events)
    poller.poll()


class _Direction:
    def __init__(self, source: socket.socket, target: socket.socket, size: int) -> None:
        self._source = source
        self._target = target
        self._buffer = memoryview(bytearray(size))
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
