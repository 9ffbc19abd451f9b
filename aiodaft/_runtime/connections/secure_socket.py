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
import socket
import ssl
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from aiodaft._runtime.connections.identity import Identity
from aiodaft.exceptions import DaftError, NotAuthenticated, PeerLost
from aiodaft_transport import Key

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

T = TypeVar("T")

# Seconds until both ends have proved their identity.
DEADLINE: Final = 5.0
# The most that one record of TLS carries.
RECORD: Final = 16 << 10
_LABELS: Final = {True: b"tls server", False: b"tls client"}
_PROOF_SIZE: Final = 32


class SecureSocket(ssl.SSLSocket):
    """A socket with TLS that behaves like one without: it is never blocking, and nothing waits in it.

    `send` may raise BlockingIOError when a part of the data is on its way. The next `send` must be of the same data, as
    it is in a queue. Descriptors cannot be sent.
    """

    def send(self, data: ReadableBuffer, flags: int = 0) -> int:
        try:
            return self.write(data)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            raise BlockingIOError from None

    def recvmsg_into(  # type: ignore[override]  # SSLSocket has none
        self, buffers: Iterable[Any], ancbufsize: int = 0, flags: int = 0
    ) -> tuple[int, list[tuple[int, int, bytes]], int, None]:
        """Read into the first buffer; it has room for a record, so no byte stays where the event loop does not see it.

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
        sock: A connected socket, which this takes over: it is closed on failure.
        identity: The identity that both ends prove.
        session: The key of this connection, from `Authenticated`.
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
    """Do something that may have to wait for the other end, and is then to be repeated."""
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
