"""The connections of one process, and why each lost one was lost."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol, cast

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.messages import Message
from aiodaft._protocol.connections.session import Session
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.connections.connection import Connection, Handler
from aiodaft._runtime.connections.ring_poller import RingPoller
from aiodaft._runtime.connections.ring_upgrade import take_step
from aiodaft._runtime.connections.route import Loopback, Route
from aiodaft._runtime.connections.traffic import Traffic, total
from aiodaft._runtime.platform.exhaustion import exhausted
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization.errors import copy_error
from aiodaft.exceptions import DaftError, PeerLost, ProtocolError, RemoteProtocolError, RuntimeClosed
from aiodaft_transport import TransportError


class ConnectionsOwner(Protocol):
    """What the connections need of their process. `Peer` implements and explains it."""

    def introduce(self, remote: PeerId) -> Awaitable[object]: ...
    def ask(self, remote: PeerId) -> Awaitable[object]: ...
    def connection_lost(self, connection: Connection) -> None: ...
    def connection_explained(self, connection: Connection, error: DaftError) -> None: ...
    def revoke(self, connection: Connection, blobs: Any) -> None: ...
    def take_note(self, transport: str, route: Route, note: bytes, fds: list[int]) -> None: ...


class Connections(dict[PeerId, Connection]):
    """The connections of one process by the process at the other end, some of them lost, and the loopback to itself."""

    def __init__(self, process: Process, owner: ConnectionsOwner) -> None:
        super().__init__()
        self._process = process
        self._owner = owner
        # For each kind of message the function that handles it; Peer fills it in.
        self.handlers: list[Handler] = []
        self.ring_poller = RingPoller(process.loop)
        self.loopback = Loopback(process, self.handlers, owner.take_note)
        self.explain: Callable[[Connection, Exception], Awaitable[DaftError]] = _explain_plainly
        # Processes that the node agent reports as silent.
        self.suspects: set[PeerId] = set()
        self._lost: deque[Connection] = deque()
        self._past_traffic = Traffic()

    def to(self, remote: PeerId) -> Connection:
        """The connection to a process; it may be lost. A new one is asked of the node agent."""
        connection = self.get(remote)
        if connection is None:
            connection = self[remote] = self.make(remote)
            self._process.tasks.create_task(self._ask_introduction(connection), name=f"be introduced to {remote}")
        return connection

    def route_to(self, remote: PeerId) -> Route:
        """The route to a process, or to this one."""
        return self.loopback if remote == self._process.id else self.to(remote)

    def attach(self, remote: PeerId, sock: socket.socket) -> Connection:
        """Use a connected socket for the connection to a process."""
        connection = self.setdefault(remote, self.make(remote))
        if connection.lost is not None:
            sock.close()
        else:
            connection.attach(sock)
        return connection

    def make(self, remote: PeerId, towards: str | None = None) -> Connection:
        """A connection that is in no table; errors call the other end `towards`, if that is given."""
        process, name = self._process, remote if towards is None else PeerId(towards)
        session: Session[Any] = Session(process.id, process.pid, remote=name, max_pending=process.options.max_pending)
        return Connection(
            process, session, remote, self.ring_poller, self.handlers, self._connection_lost, self._dropped
        )

    async def _ask_introduction(self, connection: Connection) -> None:
        try:
            await self._owner.introduce(connection.remote)
        except Exception as error:  # noqa: BLE001 - without the node agent's help there is no connection
            connection.close(error)

    def traffic(self) -> Traffic:
        """What this process sent and received over all connections."""
        return total([self._past_traffic, *(connection.traffic for connection in self.values())])

    def _connection_lost(self, connection: Connection, reason: Exception) -> None:
        """Fail everything that went over a connection, with the best explanation."""
        self._lost.append(connection)
        while len(self._lost) > self._process.env.remembered:
            forgotten = self._lost.popleft()
            self._past_traffic = total([self._past_traffic, forgotten.traffic])
            del self[forgotten.remote]
        self._owner.connection_lost(connection)
        if self._process.closed is None:
            explaining = self._explain_loss(connection, reason)
            connection.explanation = self._process.tasks.start(explaining, name=f"explain {connection.remote}")
        else:
            self._owner.connection_explained(connection, RuntimeClosed(self._process.closed))

    def _dropped(self, connection: Connection, message: Message) -> None:
        if message[0] == m.SEND:
            *_, (_, blobs, _, _), _ = m.read_send(message)
            self._owner.revoke(connection, blobs)

    async def _explain_loss(self, connection: Connection, reason: Exception) -> DaftError:
        try:
            known = isinstance(reason, DaftError) and not isinstance(reason, PeerLost | ProtocolError)
            error = cast("DaftError", reason) if known else await self.explain(connection, reason)
        except Exception as problem:  # noqa: BLE001 - an explanation that fails must not keep calls waiting
            error = PeerLost(f"the connection to {connection.remote} ended: {reason}")
            error.__cause__ = problem
        self._owner.connection_explained(connection, error)
        return error

    async def explanation(self, connection: Connection) -> DaftError:
        """Why a lost connection was lost."""
        if connection.explanation is None:
            return PeerLost(f"the connection to {connection.remote} ended: {connection.lost}")
        return await asyncio.shield(connection.explanation)

    async def why_lost(self, route: Route, otherwise: str) -> DaftError:
        """Why another process did not do something: how it ended, or `otherwise` if it lives."""
        # Only its connection shows whether a process lives, and that may show its end late.
        with suppress(DaftError):
            await self._owner.ask(route.remote)
        if route.lost is not None:
            return copy_error(await self.explanation(cast("Connection", route)))
        return PeerLost(f"{route.remote} lives, and {otherwise}")

    # Messages about connections.

    def introduction_came(self, connection: Connection, message: Message) -> None:
        """Handle INTRODUCE, which brings the socket to another process."""
        remote = m.read_introduce(message)
        try:
            (fd,) = connection.take_fds(1)
        except OSError as error:
            # Only messages to that process fail.
            refused = exhausted(error, f"there is no connection to {remote}")
            self.setdefault(remote, self.make(remote)).close(refused)
            return
        sock = self._process.env.sockets.of_fd(fd)
        if connection.remote != self._process.options.home:
            sock.close()
            raise RemoteProtocolError(f"{connection.remote} introduces peers, which only the node may")
        self.attach(remote, sock)

    def note_came(self, connection: Connection, message: Message) -> None:
        """Handle NOTE, from a transport to the same one here."""
        name, note, count = m.read_note(message)
        fds: list[int] = []
        if count:
            # Without its descriptors, the transport fails the transfer that the note is about.
            with suppress(OSError):
                fds = connection.take_fds(count)
        try:
            self._owner.take_note(name, connection, note, fds)
        except TransportError as error:
            raise RemoteProtocolError(f"{connection.remote} sent a wrong note: {error}") from error

    def want_rings(self, route: Route) -> None:
        """Use rings, if the route leads to another process that shares memory. Idempotent."""
        if self._process.options.transport == "shm" and isinstance(route, Connection) and route.lost is None:
            take_step(route, route.upgrade.want())

    @staticmethod
    def ring_came(connection: Connection, message: Message) -> None:
        take_step(connection, connection.upgrade.handle(m.read_ring(message)))

    def bye_came(self, connection: Connection, message: Message) -> None:
        """Handle BYE: the process ends its connection."""
        connection.dismissed = True
        connection.close(PeerLost(m.read_bye(message)))

    # The end.

    def close(self, reason: str) -> None:
        """End every connection."""
        for connection in list(self.values()):
            connection.send(m.bye(reason))
            connection.close(RuntimeClosed(reason))

    def abandon(self) -> None:
        """Close this process's ends of its connections where the loop does not run."""
        self.ring_poller.abandon()
        for connection in self.values():
            connection.abandon()


async def _explain_plainly(connection: Connection, reason: Exception) -> DaftError:  # noqa: RUF029 - others have to ask
    return PeerLost(f"the connection to {connection.remote} ended: {reason}")
