"""Connections between machines: this process connects to another one, and takes the connections of others.

Only nodes listen. A process connects to the port of the other one's node, which hands the socket on. Both processes may
do so at the same time: then the one with the smaller id refuses, and the other takes the connection. A controller has
no node of its own that could take a connection for it; the node that it is attached to tells it to connect itself.

The process that was connected to answers with one message of a fixed size (`Welcome`).
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from typing import Any, Final, NamedTuple, Protocol

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.address import Address
from aiodaft._protocol.connections.versions import Software, __version__
from aiodaft._protocol.ids import PeerId, is_node, node_of
from aiodaft._protocol.node.worker import GIVEN_UP_AFTER, Order, Silence
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.platform.tasks import TaskOwner
from aiodaft._runtime.process import Process
from aiodaft.exceptions import DaftError, NotAuthenticated, PeerLost
from aiodaft_transport import HandshakeError, Key
from aiodaft_transport.handshake import MAC_SIZE, MAGIC, Purpose

# TCP notices a host that is gone: after 5 s when nothing is under way, after 10 s when something is.
_OPTIONS: Final = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    # Not every system has each of them, or gives it this name.
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (
            ("TCP_KEEPIDLE", 2),
            ("TCP_KEEPINTVL", 1),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", 10_000),
        )
        if hasattr(socket, name)
    ),
)
# The most milliseconds until TCP sends a packet again; else a short partition is felt for up to twice its length.
_RTO_MAX_MS: Final = 44


class Authenticated(NamedTuple):
    """A connection whose ends have proved the cluster key to each other.

    Attributes:
        sock: Not blocking; nothing beyond the handshake was read. The receiver of this owns it.
        to: The process that it wants to reach.
        session: The key of this connection, the same at both ends and for no other connection.
    """

    sock: socket.socket
    sender: str
    to: str
    session: Key


def configure(sock: socket.socket) -> None:
    sock.setblocking(False)
    for level, option, value in _OPTIONS:
        sock.setsockopt(level, option, value)
    # Linux 6.15.
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, 1000)


async def resolve(address: Address) -> list[tuple[int, int, int, str, Any]]:
    try:
        return list(socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
    except socket.gaierror:
        found = await asyncio.get_running_loop().getaddrinfo(*address, type=socket.SOCK_STREAM)
        return list(found)


async def receive_message(sock: socket.socket, size: int, start: bytes = MAGIC) -> bytes:
    loop = asyncio.get_running_loop()
    received = b""
    while len(received) < size:
        part = await loop.sock_recv(sock, size - len(received))
        if not part:
            raise ConnectionResetError(f"the other side ended the connection after {len(received)} of {size} bytes")
        received += part
        if received[: len(start)] != start[: len(received)]:
            raise HandshakeError("the other side does not speak this protocol")
    return received


# A process that does not know the id of the listening one asks for it by this name.
ANY_NODE: Final = PeerId("node")

# Stays the same in later releases, so that they can refuse each other.
_WELCOME: Final = struct.Struct("<B96s96s32s32s")
_LABEL: Final = b"welcome"
STREAM_NUMBER: Final = struct.Struct("<Q")
_PATIENCE: Final = 15.0
_FIRST_PAUSE: Final = 0.02


class Answer(IntEnum):
    # There is no such process.
    GONE = 0
    # Messages may be sent.
    USED = 1
    # The asked process connects itself, or is connected.
    LATER = 2


class Welcome(NamedTuple):
    """The answer, the ids of the listening node and of the coordinator's process, and the node's versions."""

    answer: Answer
    node: PeerId
    coordinator: PeerId
    software: Software

    def sealed(self, session: Key) -> bytes:
        """With a MAC: the bytes come before TLS."""
        packed = _WELCOME.pack(self.answer, *(text.encode() for text in (self.node, self.coordinator, *self.software)))
        return packed + session.mac(_LABEL, packed)

    @classmethod
    def opened(cls, data: bytes, session: Key) -> Welcome:
        packed, proof = data[: _WELCOME.size], data[_WELCOME.size :]
        if not session.made(proof, _LABEL, packed):
            raise NotAuthenticated("the welcome of a node was changed on its way")
        answer, *texts = _WELCOME.unpack(packed)
        node, coordinator, *software = (text.rstrip(b"\0").decode("ascii") for text in texts)
        return cls(Answer(answer), PeerId(node), PeerId(coordinator), Software(*software))

    @property
    def node_name(self) -> str:
        return node_of(self.node)

    @property
    def has_coordinator(self) -> bool:
        return self.node == self.coordinator


WELCOME_SIZE: Final = _WELCOME.size + MAC_SIZE
SOFTWARE: Final = Software(__version__, f"{sys.implementation.name} {sys.version.split()[0]}")


class Door(Protocol):
    async def open(self, address: Address) -> Address:
        """Listen; see `Listener.open`."""
        ...

    def close(self) -> None: ...


class Network(Protocol):
    """A member's ways to other machines; a simulation has its own."""

    @property
    def key(self) -> Key: ...

    @property
    def cluster(self) -> str: ...

    @property
    def reached_by(self) -> tuple[str, ...]: ...

    def packed(self) -> bytes: ...

    def door(
        self,
        tasks: TaskOwner,
        on_control: Callable[[Authenticated], object],
        on_data: Callable[[Authenticated], object],
    ) -> Door:
        """The callbacks own the sockets of processes and of transports."""
        ...

    async def dial(self, address: str, local: PeerId, to: PeerId, purpose: Purpose) -> tuple[socket.socket, Key]:
        """Connect to the port of a node, and prove the cluster key to each other; the socket does not block.

        Raises:
            PeerLost: Nothing listens there, or the other side ended the connection.
            NotAuthenticated: The other side does not have the key.
        """
        ...

    async def secure(self, sock: socket.socket, session: Key, *, server: bool) -> socket.socket: ...

    async def protect(self, stream: socket.socket, session: Key, *, server: bool) -> socket.socket: ...

    async def receive(self, sock: socket.socket, size: int) -> bytes: ...


class Table(Protocol):
    def get(self, remote: PeerId, /) -> Connection | None: ...
    def renew(self, remote: PeerId) -> Connection: ...
    async def is_answered(self, remote: PeerId) -> bool: ...


async def who_listens(network: Network, local: PeerId, address: str) -> Welcome:
    """Ask the node that listens at an address.

    Raises:
        PeerLost: Nothing listens there.
        NotAuthenticated: The listener there is no node of this cluster.
        VersionMismatch: It cannot work with this process.
    """
    try:
        async with asyncio.timeout(_PATIENCE):
            sock, session = await network.dial(address, local, ANY_NODE, Purpose.CONTROL)
            with sock:
                welcome = Welcome.opened(await network.receive(sock, WELCOME_SIZE), session)
                SOFTWARE.check_works_with(welcome.software, address)
                return welcome
    except (OSError, TimeoutError) as error:
        raise PeerLost(f"no node of this cluster answers at {address}: {error}", executed=False) from error


class FarConnections:
    def __init__(self, process: Process, network: Network, table: Table) -> None:
        self._process = process
        self.network = network
        self._table = table
        self.reached_by = network.reached_by
        self.secret = network.packed
        self.on_silent: Callable[[PeerId], object] = lambda node: None

    async def connect(self, connection: Connection, address: str) -> None:
        """Give a connection a socket to a process whose node listens at this address.

        Raises:
            PeerLost: The process is gone, or cannot be reached.
            NotAuthenticated: The listener there is no node of this cluster.
        """
        remote, pause = connection.remote, _FIRST_PAUSE
        try:
            async with asyncio.timeout(_PATIENCE):
                while connection.is_awaited():
                    if not await self._try(connection, address):
                        # The other side connects itself, or finds that an earlier connection is lost.
                        await asyncio.sleep(pause)
                        pause = min(2 * pause, 1.0)
        except TimeoutError:
            raise PeerLost(f"{remote} at {address} could not be reached within {_PATIENCE:g} s") from None
        except OSError as error:
            raise PeerLost(f"{remote} cannot be reached at {address}: {error}") from error

    async def _try(self, connection: Connection, address: str) -> bool:
        """Whether nothing is left to do; False if the other side wants to connect itself."""
        remote = connection.remote
        sock, session = await self.network.dial(address, self._process.id, remote, Purpose.CONTROL)
        try:
            welcome = Welcome.opened(await self.network.receive(sock, WELCOME_SIZE), session)
            if welcome.answer is Answer.GONE:
                raise PeerLost(f"there is no process {remote} at {address}")
            if welcome.answer is Answer.LATER or not connection.is_awaited():
                sock.close()
                return welcome.answer is not Answer.LATER
            secured = await self.network.secure(sock, session, server=False)
        except BaseException:
            sock.close()
            raise
        self.attach(connection, secured)
        return True

    async def open_stream(self, remote: PeerId, address: str, number: int) -> socket.socket:
        """Raises DaftError or OSError: there is no way to the node of the process."""
        plain, session = await self.network.dial(address, self._process.id, remote, Purpose.DATA)
        sock = await self.network.protect(plain, session, server=False)
        sock.send(STREAM_NUMBER.pack(number))
        return sock

    async def accept_stream(self, stream: socket.socket, session: Key) -> tuple[int, socket.socket]:
        """The number of a stream that another process has opened, and the socket to use. Takes over the stream."""
        try:
            async with asyncio.timeout(_PATIENCE):
                stream = await self.network.protect(stream, session, server=True)
                number = await self.network.receive(stream, STREAM_NUMBER.size)
        except BaseException:
            stream.close()
            raise
        return int(STREAM_NUMBER.unpack(number)[0]), stream

    async def accept(self, remote: PeerId, sock: socket.socket, session: Key) -> None:
        """Take a connection that another process has made to this one, or refuse it. Takes over the socket."""
        known = self._table.get(remote)
        if known is not None and known.lost is None and (known.connected or self._process.id < remote):
            if known.connected:
                # Shows whether the connection here is dead: the other side knows of none.
                known.send((m.RELEASE, ()))
            self.refuse(sock, session, Answer.LATER)
            return
        connection = known if known is not None and known.is_awaited() else self._table.renew(remote)
        try:
            sock.send(self._welcome(Answer.USED, session))
            secured = await self.network.secure(sock, session, server=True)
        except (DaftError, OSError) as error:
            sock.close()
            if connection is not known and connection.is_awaited():
                connection.close(PeerLost(f"the connection that {remote} made broke: {error}"))
            return
        self.attach(connection, secured)

    def refuse(self, sock: socket.socket, session: Key, answer: Answer) -> None:
        with sock, suppress(OSError):
            sock.send(self._welcome(answer, session))

    def _welcome(self, answer: Answer, session: Key) -> bytes:
        process = self._process
        return Welcome(answer, process.options.agent, process.coordinator, SOFTWARE).sealed(session)

    def attach(self, connection: Connection, secured: socket.socket) -> None:
        """Use a socket, unless another one came meanwhile."""
        if not connection.is_awaited():
            secured.close()
            return
        connection.attach(secured, far=True)
        if is_node(connection.remote):
            self._look_later(connection, Silence())

    def _look_later(self, connection: Connection, silence: Silence) -> None:
        process = self._process
        process.loop.call_later(process.env.timeouts.silence, self._look, connection, silence)

    def _look(self, connection: Connection, silence: Silence) -> None:
        process, node = self._process, connection.remote
        if connection.lost is not None or process.closed is not None:
            return
        order = silence.look(connection.traffic.control_received, awaited=bool(connection.session.calls))
        if order is Order.GIVE_UP:
            seconds = GIVEN_UP_AFTER * process.env.timeouts.silence
            connection.close(PeerLost(f"{node} has not answered for more than {seconds:g} s"))
            self.on_silent(node)
            return
        if order is Order.ASK:
            process.create_task(self._ask(node), name=f"hear from {node}")
        self._look_later(connection, silence)

    async def _ask(self, node: PeerId) -> None:
        await self._table.is_answered(node)
