"""Payload over TCP: works between any two hosts, and on one host where shared memory does not.

The producer listens on one port of a chosen interface (default: loopback); consumers connect, prove the cluster key,
and request the blocks they were granted. Bytes go from the block straight into the socket, and from the socket straight
into the buffer of the value: Python copies nothing.

A connection is a stranger until it has proved the key. Strangers have a table of their own; if it is full, the oldest
one is dropped, so that strangers take no connection from a peer. A consumer that is dropped before it has proved the
key connects again.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, ClassVar, Final, cast

from aiodaft_transport.abc import size_of
from aiodaft_transport.exceptions import GrantError, HandshakeError, PeerGone
from aiodaft_transport.handshake import (
    ACCEPT_SIZE,
    CHALLENGE_SIZE,
    HELLO_SIZE,
    NONCE_SIZE,
    ClientHandshake,
    Key,
    ServerHandshake,
)
from aiodaft_transport.memory.address import check_target, exposed_view
from aiodaft_transport.memory.host_pool import DEFAULT_KEEP, Arena, ArenaBlock
from aiodaft_transport.memory.registered import Block, Regions
from aiodaft_transport.peers import PeerTransport, Remote

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from aiodaft_transport.abc import Control, Grant, Host

_REQUEST: Final = struct.Struct("<Q")  # id of a grant
_REPLY: Final = struct.Struct("<Q")  # bytes that follow; 0: not granted
_RETURN: Final = struct.Struct("<Q")  # note: id of a grant that is returned unused
_SOCKET_BUFFER: Final = 4 << 20
_CHUNK: Final = 1 << 20
_MAX_STRANGERS: Final = 64
# Attempts of a consumer to connect, if it is dropped before the handshake is over.
_ATTEMPTS: Final = 16
# Errors of accept() for lack of resources, or because the stranger left; the listener itself still works.
_PASSING: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED})
_ACCEPT_PAUSE: Final = 0.1
# Idle connections kept open to one peer, and the most in use at a time: a peer that many consumers connect to needs
# room for all of them in its table of strangers.
_IDLE_CONNECTIONS: Final = 4
_MAX_CONNECTIONS: Final = 8


class _Remote(Remote):
    """A peer, and the connections to and from it."""

    def __init__(self) -> None:
        super().__init__()
        self.idle: list[socket.socket] = []
        # In use, here or by the peer.
        self.open: set[socket.socket] = set()
        self.turn = asyncio.Semaphore(_MAX_CONNECTIONS)


class TcpTransport(PeerTransport[Block, _Remote]):
    """Transfers over TCP sockets."""

    name: ClassVar[str] = "tcp"

    def __init__(
        self,
        host: Host,
        key: Key,
        *,
        name: str,
        interface: str = "127.0.0.1",
        keep: int = DEFAULT_KEEP,
        handshake_timeout: float = 5.0,
    ) -> None:
        if _is_wildcard(interface):
            raise ValueError("a transport listens on one named interface, never on all of them")
        super().__init__(host)
        self._key = key
        self._name = name
        self._interface = interface
        self._handshake_timeout = handshake_timeout
        # The pools that blocks come from, and that values arrive in.
        self.arena = Arena(shared=False, keep=keep)
        self.landing = Arena(shared=False, keep=keep)
        # A socket sends from any memory: unregistering undoes nothing.
        self._regions = Regions(self.arena.next_number, lambda number: None)
        self._listener: socket.socket | None = None
        self._accepting = False
        # Connections that have not proved the key yet, oldest first.
        self._strangers: dict[socket.socket, None] = {}

    def allocate(self, nbytes: int) -> ArenaBlock:
        return self.arena.allocate(nbytes)

    async def fetch(self, grant: Grant, control: Control) -> memoryview:
        with self._declining(grant, control):
            landing = self.landing.allocate(size_of(grant))
        try:
            await self.fetch_into(grant, control, landing.view)
        except BaseException:
            landing.release()
            raise
        return exposed_view(landing.segment.region, landing.offset, landing.nbytes, landing.release)

    async def fetch_into(self, grant: Grant, control: Control, target: memoryview) -> None:
        address, port, nbytes, grant_id = cast(tuple[str, int, int, int], grant)
        # If the request was sent, this returns the grant twice, which does no harm.
        with self._declining(grant, control):
            check_target(target, nbytes)
            remote = self._remote(control)
            async with remote.turn, self._connection(control.peer, remote, address, port) as connection:
                await self._pull(connection, grant_id, target)

    def decline(self, grant: Grant, control: Control) -> None:
        control.send_note(self.name, _RETURN.pack(cast(int, grant[3])))

    def note_received(self, control: Control, note: bytes, fds: Sequence[int]) -> None:
        if len(note) != _RETURN.size:
            raise GrantError(f"{control.peer} sent an invalid note")
        if control.peer in self.remotes:
            self.remotes[control.peer].take_back(*_RETURN.unpack(note))

    def close(self) -> None:
        self._closed = True
        if self._listener is not None:
            # A pending accept ends with an error once its socket is shut down.
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            if not self._accepting:
                self._listener.close()
        self._lose_all()
        self.arena.close()
        self.landing.close()

    def _meet(self, control: Control) -> _Remote:
        return _Remote()

    def _offer(self, block: Block, remote: _Remote) -> tuple[str, int]:
        return self._interface, self._listening().getsockname()[1]

    def _part(self, remote: _Remote) -> None:
        for connection in remote.open:
            _shut_down(connection)
        for connection in remote.idle:
            connection.close()

    # The producer's side.

    def _listening(self) -> socket.socket:
        if self._listener is None:
            self._listener = socket.create_server((self._interface, 0), backlog=128)
            self._listener.setblocking(False)
            self._host.create_task(self._accept(self._listener), name="tcp accept")
        return self._listener

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._accepting = True
        with listener:
            while not self._closed:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError as error:
                    if self._closed or error.errno not in _PASSING:
                        return
                    # The stranger waits in the listener's queue.
                    await asyncio.sleep(_ACCEPT_PAUSE)
                    continue
                if len(self._strangers) >= _MAX_STRANGERS:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    _shut_down(oldest)
                self._strangers[connection] = None
                self._host.create_task(self._serve(connection), name="tcp serve")

    async def _serve(self, connection: socket.socket) -> None:
        _configure(connection)
        with connection:
            try:
                async with asyncio.timeout(self._handshake_timeout):
                    peer = await self._admit(connection)
            except (HandshakeError, PeerGone, OSError, TimeoutError):
                return
            finally:
                self._strangers.pop(connection, None)
            # One that was granted nothing gets no bytes.
            remote = self.remotes.setdefault(peer, _Remote())
            remote.open.add(connection)
            try:
                with suppress(PeerGone, OSError):
                    while not self._closed:
                        await self._answer(connection, remote)
            finally:
                remote.open.discard(connection)

    async def _admit(self, connection: socket.socket) -> str:
        loop = asyncio.get_running_loop()
        handshake = ServerHandshake(self._key, os.urandom(NONCE_SIZE))
        await loop.sock_sendall(connection, handshake.challenge)
        peer, accept = handshake.receive_hello(await _receive_exactly(connection, HELLO_SIZE))
        await loop.sock_sendall(connection, accept)
        return peer

    async def _answer(self, connection: socket.socket, remote: _Remote) -> None:
        loop = asyncio.get_running_loop()
        (grant_id,) = _REQUEST.unpack(await _receive_exactly(connection, _REQUEST.size))
        block = cast("Block | None", remote.granted.get(grant_id))
        if block is None:
            await loop.sock_sendall(connection, _REPLY.pack(0))
            return
        try:
            await loop.sock_sendall(connection, _REPLY.pack(block.nbytes))
            view = block.view
            for start in range(0, block.nbytes, _CHUNK):
                await loop.sock_sendall(connection, view[start : start + _CHUNK])
                await asyncio.sleep(0)
        finally:
            remote.take_back(grant_id)

    # The consumer's side.

    @asynccontextmanager
    async def _connection(
        self, peer: str, remote: _Remote, address: str, port: int
    ) -> AsyncGenerator[socket.socket, None]:
        """Lend a connection to a peer; one that failed is closed. May wait while connecting."""
        connection = remote.idle.pop() if remote.idle else await self._dial(peer, remote, address, port)
        # From now on, `peer_lost` ends it.
        remote.open.add(connection)
        reusable = False
        try:
            yield connection
            reusable = True
        finally:
            remote.open.discard(connection)
            if reusable and len(remote.idle) < _IDLE_CONNECTIONS and self.remotes.get(peer) is remote:
                remote.idle.append(connection)
            else:
                connection.close()

    async def _dial(self, peer: str, remote: _Remote, address: str, port: int) -> socket.socket:
        """A new connection to a peer, after the handshake."""
        left = _ATTEMPTS
        while True:
            left -= 1
            connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            # `peer_lost` ends it.
            remote.open.add(connection)
            try:
                await self._connect(connection, address, port)
            except BaseException as error:
                connection.close()
                lost = self.remotes.get(peer) is not remote
                if not left or lost or not isinstance(error, _Dropped):
                    raise
            else:
                return connection
            finally:
                remote.open.discard(connection)

    async def _connect(self, connection: socket.socket, address: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            _configure(connection)
            await loop.sock_connect(connection, (address, port))
        except OSError as error:
            raise PeerGone(f"no connection to {address}:{port}: {error}") from error
        try:
            handshake = ClientHandshake(self._key, os.urandom(NONCE_SIZE), self._name)
            hello = handshake.receive_challenge(await _receive_exactly(connection, CHALLENGE_SIZE))
            await loop.sock_sendall(connection, hello)
            handshake.receive_accept(await _receive_exactly(connection, ACCEPT_SIZE))
        except (PeerGone, OSError) as error:
            raise _Dropped(f"{address}:{port} ended the connection before the handshake was over: {error}") from error

    async def _pull(self, connection: socket.socket, grant_id: int, target: memoryview) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(connection, _REQUEST.pack(grant_id))
            (length,) = _REPLY.unpack(await _receive_exactly(connection, _REPLY.size))
            if length != len(target):
                raise GrantError(f"grant {grant_id} was for {len(target)} bytes but the peer has {length}")
            received = 0
            while received < length:
                count = await loop.sock_recv_into(connection, target[received : received + _CHUNK])
                if not count:
                    raise PeerGone(f"the connection ended after {received} of {length} bytes")
                received += count
                # A fast sender would keep the loop busy for the whole block.
                await asyncio.sleep(0)
        except OSError as error:
            raise PeerGone(f"the connection broke: {error}") from error


class _Dropped(PeerGone):
    """The other side ended a connection before the handshake was over: it had too many strangers."""


def _is_wildcard(interface: str) -> bool:
    try:
        # Accepts the spellings of the resolver: 0, 0.0, 0x0.
        return socket.inet_aton(interface) == bytes(4)
    except OSError:
        return interface in ("", "::")


def _shut_down(connection: socket.socket) -> None:
    # The task that uses the socket sees the end of the stream and closes it.
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _configure(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)


async def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    buffer = bytearray(size)
    view = memoryview(buffer)
    received = 0
    while received < size:
        count = await loop.sock_recv_into(connection, view[received:])
        if not count:
            raise PeerGone(f"the connection ended after {received} of {size} bytes")
        received += count
    return bytes(buffer)
