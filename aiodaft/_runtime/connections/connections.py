"""The connections of one process, and why each lost one was lost."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, Protocol, cast

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.messages import RING_OFFERED, RING_REFUSED, RING_USED, RING_WANTED, Message
from aiodaft._protocol.connections.session import Session, Step
from aiodaft._protocol.ids import PeerId, is_attached, node_of
from aiodaft._runtime.connections.connection import Connection, Handler
from aiodaft._runtime.connections.far import FarConnections
from aiodaft._runtime.connections.ring_poller import RingPoller, offer_rings, take_rings
from aiodaft._runtime.connections.route import Loopback, Route, Traffic, total
from aiodaft._runtime.platform.capabilities import Sockets
from aiodaft._runtime.platform.linux import exhausted
from aiodaft._runtime.platform.tasks import logger
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization.errors import copy_error
from aiodaft.exceptions import (
    DaftError,
    PeerLost,
    ProtocolError,
    RemoteProtocolError,
    ResourceExhausted,
    RuntimeClosed,
)
from aiodaft_transport import Key, PeerGone, TransportError

# Seconds that the processes of a node get to answer when the coordinator says that it is gone.
_LAST_WORD: Final = 2.0


class ConnectionEvents(Protocol):
    def introduce(self, remote: PeerId, known: int) -> Awaitable[str]: ...
    def ask(self, remote: PeerId) -> Awaitable[object]: ...
    def connection_lost(self, connection: Connection) -> None: ...
    def connection_explained(self, connection: Connection, error: DaftError) -> None: ...
    def connection_renewed(self, remote: PeerId) -> None: ...
    def revoke(self, connection: Connection, blobs: Any) -> None: ...
    def take_note(self, transport: str, route: Route, note: bytes, fds: list[int]) -> None: ...
    def ask_stream(self, remote: PeerId, number: int) -> Awaitable[object]: ...
    def take_stream(self, remote: PeerId, stream: socket.socket) -> None: ...


class Connections(dict[PeerId, Connection]):
    """The connections of one process by the process at the other end, some of them lost."""

    def __init__(self, process: Process, owner: ConnectionEvents) -> None:
        super().__init__()
        self._process = process
        self._owner = owner
        self.handlers: list[Handler] = []
        self.ring_poller = RingPoller(process.loop)
        self.loopback = Loopback(process, self.handlers, owner.take_note)
        self.data_streams = DataStreams(process, owner.ask_stream, owner.take_stream)
        self.explain: Callable[[Connection, Exception], Awaitable[DaftError]] = _explain_plainly
        # Processes that the node agent reports as silent.
        self.suspects: set[PeerId] = set()
        self.far: FarConnections | None = None
        self._lost: deque[Connection] = deque()
        self._introduced: Counter[PeerId] = Counter()
        self._past_traffic = Traffic()

    def to(self, remote: PeerId) -> Connection:
        """The connection to a process; it may be lost. A new one is asked of the node agent."""
        connection = self.get(remote)
        if connection is None or connection.renewable:
            connection = self.renew(remote)
            asking = self._ask_introduction(connection, self._introduced[remote])
            self._process.tasks.create_task(asking, name=f"be introduced to {remote}")
        return connection

    def renew(self, remote: PeerId) -> Connection:
        before = self.get(remote)
        connection = self[remote] = self.make(remote)
        if before is not None:
            self._past_traffic = total([self._past_traffic, before.traffic_so_far()])
            self._lost.remove(before)
            # If `before` never had a socket, the other process may not have lost a connection.
            connection.send(m.renewed(str(before.lost)))
            # The process lives. Later, this would fail the calls over the new connection.
            self._explained(before, PeerLost(f"the connection to {remote} ended: {before.lost}"))
            self._owner.connection_renewed(remote)
        return connection

    def route_to(self, remote: PeerId) -> Route:
        return self.loopback if remote == self._process.id else self.to(remote)

    def attach(self, remote: PeerId, sock: socket.socket) -> Connection:
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
        connection = Connection(
            process, session, remote, self.ring_poller, self.handlers, self._connection_lost, self._dropped
        )
        if self.far is not None and self.far.reached_by and not connection.shares_memory:
            connection.send(m.reach(self.far.reached_by))
        return connection

    async def _ask_introduction(self, connection: Connection, known: int) -> None:
        try:
            address = await self._owner.introduce(connection.remote, known)
            if address:
                assert self.far is not None
                await self.far.connect(connection, address)
        except Exception as error:  # noqa: BLE001 - without the node agent's help there is no connection
            connection.close(error)

    def traffic(self) -> Traffic:
        return total([self._past_traffic, *(connection.traffic_so_far() for connection in self.values())])

    def _connection_lost(self, connection: Connection, reason: Exception) -> None:
        connection.explanation = self._process.loop.create_future()
        self._lost.append(connection)
        while len(self._lost) > self._process.env.remembered:
            forgotten = self._lost.popleft()
            self._past_traffic = total([self._past_traffic, forgotten.traffic_so_far()])
            del self[forgotten.remote]
        self.data_streams.peer_lost(connection.remote)
        self._owner.connection_lost(connection)
        if self._process.closed is None:
            explaining = self._explain_loss(connection, reason)
            self._process.tasks.create_task(explaining, name=f"explain {connection.remote}")
        else:
            self._explained(connection, RuntimeClosed(self._process.closed))

    async def hears_from(self, name: str) -> bool:
        """Whether a process of a node answers, within seconds: then the coordinator is cut off."""
        asked = [
            self._process.tasks.start(self.is_answered(remote), name=f"hear from {remote}")
            for remote, connection in self.items()
            if node_of(remote) == name and not is_attached(remote) and connection.far and connection.lost is None
        ]
        try:
            async with asyncio.timeout(_LAST_WORD):
                for answer in asyncio.as_completed(asked):
                    if await answer:
                        return True
        except TimeoutError:
            pass
        finally:
            for task in asked:
                task.cancel()
        return False

    async def is_answered(self, remote: PeerId) -> bool:
        try:
            await self._owner.ask(remote)
        except DaftError:
            return False
        return True

    def lose_node(self, name: str, process: PeerId | None) -> None:
        """A node is gone: so are its processes. `process`: the one that serves it now, if it has come again."""
        for connection in list(self.values()):
            remote = connection.remote
            # A controller that is attached there may be on another machine.
            if node_of(remote) == name and remote != process and connection.far and not is_attached(remote):
                connection.explained = True
                connection.close(PeerLost(f"{remote} is lost: no process of its node answers"))

    def _dropped(self, connection: Connection, message: Message) -> None:
        if message[0] == m.SEND:
            *_, (_, blobs, _, _), _ = m.read_send(message)
            self._owner.revoke(connection, blobs)

    async def _explain_loss(self, connection: Connection, reason: Exception) -> None:
        try:
            known = isinstance(reason, DaftError) and not isinstance(reason, PeerLost | ProtocolError)
            explained = known or connection.explained
            error = cast("DaftError", reason) if explained else await self.explain(connection, reason)
        except Exception as problem:  # noqa: BLE001 - an explanation that fails must not keep calls waiting
            error = PeerLost(f"the connection to {connection.remote} ended: {reason}")
            error.__cause__ = problem
        self._explained(connection, error)

    def _explained(self, connection: Connection, error: DaftError) -> None:
        assert connection.explanation is not None
        if not connection.explanation.done():
            connection.explanation.set_result(error)
            # A node that could not be reached, or was not in the cluster, may come back.
            not_reached = self.far is not None and not connection.connected
            lives = type(error) is PeerLost if connection.far else self._lives_here(connection, error)
            may_live = not_reached or lives
            connection.renewable = may_live and self._process.closed is None
            self._owner.connection_explained(connection, error)

    def _lives_here(self, connection: Connection, error: DaftError) -> bool:
        if self._process.options.agent in {self._process.id, connection.remote}:
            return False
        # The end of a process names its actors.
        return isinstance(error, ResourceExhausted) or (type(error) is PeerLost and not error.actor)

    async def explanation(self, connection: Connection) -> DaftError:
        assert connection.explanation is not None
        return await asyncio.shield(connection.explanation)

    async def why_lost(self, route: Route, otherwise: str) -> DaftError:
        """Why another process did not do something: how it ended, or `otherwise` if it lives."""
        # Only its connection shows whether a process lives, and that may show its end late.
        with suppress(DaftError):
            await self._owner.ask(route.remote)
        if route.lost is not None:
            return copy_error(await self.explanation(cast("Connection", route)))
        return PeerLost(f"{route.remote} lives, and {otherwise}")

    def reach_came(self, connection: Connection, message: Message) -> None:
        ours = () if self.far is None else self.far.reached_by
        connection.reached_by = tuple(name for name in m.read_reach(message) if name in ours)

    def introduction_came(self, connection: Connection, message: Message) -> None:
        remote = m.read_introduce(message)
        self._introduced[remote] += 1
        sock = self._socket_with(connection, remote)
        known = self.get(remote)
        if sock is not None and known is not None and not known.is_awaited() and self._process.closed is None:
            # The other process has lost that one.
            known.close(PeerLost(f"the connection to {remote} ended"))
            self.renew(remote)
        if sock is not None:
            self.attach(remote, sock)

    def admission_came(self, connection: Connection, message: Message) -> None:
        remote, session = m.read_admit(message)
        sock = self._socket_with(connection, remote)
        if sock is not None and self.far is not None:
            accepting = self.far.accept(remote, sock, Key(session))
            self._process.tasks.create_task(accepting, name=f"be connected to {remote}")

    def stream_came(self, connection: Connection, message: Message) -> None:
        remote, number, session = m.read_data(message)
        stream = self._socket_with(connection, remote, number)
        if stream is not None and number == FROM_AFAR:
            self.stream_from_afar(remote, stream, Key(session))
        elif stream is not None:
            self.data_streams.came(remote, number, stream)

    def stream_from_afar(self, remote: PeerId, stream: socket.socket, session: Key) -> None:
        taking = self._take_stream(remote, stream, session)
        self._process.tasks.create_task(taking, name=f"take a stream of {remote}")

    async def _take_stream(self, remote: PeerId, stream: socket.socket, session: Key) -> None:
        assert self.far is not None
        try:
            number, stream = await self.far.accept_stream(stream, session)
        except (DaftError, OSError) as error:
            logger.debug("a stream of %s ended: %s", remote, error)
            self.data_streams.lost(remote, FROM_AFAR, PeerGone(f"a stream of {remote} ended: {error}"))
        else:
            self.data_streams.came(remote, number, stream)

    def _socket_with(self, connection: Connection, remote: PeerId, stream: int | None = None) -> socket.socket | None:
        try:
            (fd,) = connection.take_fds(1)
        except OSError as error:
            refused = exhausted(error, f"there is no connection to {remote}")
            if stream is None:
                self.setdefault(remote, self.make(remote)).close(refused)
            else:
                self.data_streams.lost(remote, stream, refused)
            return None
        sock = self._process.env.sockets.of_fd(fd)
        if connection.remote != self._process.options.agent:
            sock.close()
            raise RemoteProtocolError(f"{connection.remote} introduces peers, which only the node may")
        return sock

    def join_by_stream(self, first: PeerId, second: PeerId, number: int) -> None:
        """Give two processes the ends of a new stream, which the first one has asked for under a number."""
        sockets = self._process.env.sockets
        ours, theirs = sockets.pair()
        with ours, theirs:
            for to, other, stream, end in ((first, second, number, ours), (second, first, UNASKED, theirs)):
                if to == self._process.id:
                    self.data_streams.came(other, stream, sockets.of_fd(sockets.dup(end.fileno())))
                else:
                    self.to(to).send_fds(m.data(other, stream), (end.fileno(),))

    def note_came(self, connection: Connection, message: Message) -> None:
        name, note, count = m.read_note(message)
        fds: list[int] = []
        if count:
            # Without them, the transport fails the transfer that the note is about.
            with suppress(OSError):
                fds = connection.take_fds(count)
        try:
            self._owner.take_note(name, connection, note, fds)
        except TransportError as error:
            raise RemoteProtocolError(f"{connection.remote} sent a wrong note: {error}") from error

    def want_rings(self, route: Route) -> None:
        if not isinstance(route, Connection) or not route.shares_memory or route.lost is not None:
            return
        if self._process.options.transport == "shm":
            take_step(route, route.upgrade.want())

    @staticmethod
    def ring_came(connection: Connection, message: Message) -> None:
        take_step(connection, connection.upgrade.handle(m.read_ring(message)))

    def bye_came(self, connection: Connection, message: Message) -> None:
        connection.dismissed = True
        connection.close(PeerLost(m.read_bye(message)))

    def close(self, reason: str) -> None:
        for connection in list(self.values()):
            connection.send(m.bye(reason))
            connection.close(RuntimeClosed(reason))
            self._explained(connection, RuntimeClosed(reason))

    def forget(self) -> None:
        self._past_traffic = self.traffic()
        self._lost.clear()
        self.clear()

    def abandon(self) -> None:
        self.ring_poller.abandon()
        for connection in self.values():
            connection.abandon()


async def _explain_plainly(connection: Connection, reason: Exception) -> DaftError:  # noqa: RUF029 - others have to ask
    return PeerLost(f"the connection to {connection.remote} ended: {reason}")


def take_step(connection: Connection, step: Step) -> None:
    if step is Step.ASK:
        connection.send(m.ring(RING_WANTED))
    elif step is Step.OFFER:
        _offer(connection)
    elif step is Step.TAKE:
        _take(connection)
    elif step is Step.DROP:
        connection.drop_offer()
    elif step is not Step.NOTHING:
        # A read ends at a descriptor, so the byte that goes with the next one is never taken for a message.
        with suppress(OSError):
            Sockets().close_all(connection.take_fds(1))
        if step is Step.USE:
            connection.use_offer(m.ring(RING_USED))
        connection.read_rings()


def _offer(connection: Connection) -> None:
    try:
        ring, fds = offer_rings()
        connection.offer = ring, fds[0]
        connection.send_fds(m.ring(RING_OFFERED), fds)
    except OSError:
        connection.drop_offer()
        connection.upgrade.failed()


def _take(connection: Connection) -> None:
    memory: int | None = None
    try:
        memory, ours, theirs = connection.take_fds(3)
        ring = take_rings(memory, ours, theirs)
    except (OSError, ValueError) as error:
        if memory is not None:
            os.close(memory)
        if isinstance(error, ValueError):
            raise RemoteProtocolError(f"the rings of {connection.remote} cannot be used: {error}") from error
        connection.upgrade.failed()
        connection.send(m.ring(RING_REFUSED))
    else:
        connection.write_rings(ring, m.ring(RING_USED), memory)


# A stream that another process asked for.
UNASKED: Final = 0
# The number of a stream of another machine: the first bytes on it say it.
FROM_AFAR: Final = -1
_PATIENCE: Final = 20.0


class DataStreams:
    def __init__(
        self,
        process: Process,
        ask: Callable[[PeerId, int], Awaitable[object]],
        take: Callable[[PeerId, socket.socket], object],
    ) -> None:
        """`ask` asks the node agent for a stream with a number; `take` takes the streams that others asked for."""
        self._process = process
        self._ask = ask
        self._take = take
        self._numbers = itertools.count(UNASKED + 1)
        self._asked: dict[int, tuple[PeerId, asyncio.Future[socket.socket]]] = {}

    async def open(self, remote: str) -> socket.socket:
        """Open a stream; see `Host.connect`.

        Raises:
            PeerGone: The process is lost, or there is no way to it.
            ResourceExhausted: There is no descriptor for it.
        """
        peer, number = PeerId(remote), next(self._numbers)
        if peer == self._process.id:
            ours, theirs = self._process.env.sockets.pair()
            self._take(peer, theirs)
            return ours
        stream: asyncio.Future[socket.socket] = self._process.loop.create_future()
        self._asked[number] = peer, stream
        self._process.tasks.create_task(self._ask_for(peer, number), name=f"ask for a stream to {peer}")
        try:
            return await stream
        except BaseException:
            if stream.done() and not stream.cancelled() and stream.exception() is None:
                stream.result().close()
            raise
        finally:
            self._asked.pop(number, None)

    async def _ask_for(self, peer: PeerId, number: int) -> None:
        try:
            await self._ask(peer, number)
        except ResourceExhausted as error:
            self.failed(number, error)
        except (DaftError, OSError) as error:
            self.failed(number, PeerGone(f"there is no stream to {peer}: {error}"))
        else:
            if number in self._asked:
                # The other process has opened it, and it may be lost on its way to this one.
                late = PeerGone(f"a stream of {peer} did not come within {_PATIENCE:g} s")
                self._process.loop.call_later(_PATIENCE, self.failed, number, late)

    def came(self, peer: PeerId, number: int, stream: socket.socket) -> None:
        if number == UNASKED:
            self._take(peer, stream)
            return
        _, waiting = self._asked.pop(number, (peer, None))
        if waiting is None or waiting.done():
            stream.close()
        else:
            waiting.set_result(stream)

    def failed(self, number: int, error: Exception) -> None:
        _, waiting = self._asked.pop(number, (None, None))
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)

    def lost(self, peer: PeerId, number: int, error: Exception) -> None:
        """The number of a stream from afar is not known."""
        if number != FROM_AFAR:
            self.failed(number, error)
        elif is_attached(peer):
            self._fail_all(peer, error)

    def peer_lost(self, peer: PeerId) -> None:
        self._fail_all(peer, PeerGone(f"{peer} is gone"))

    def _fail_all(self, peer: PeerId, error: Exception) -> None:
        for number in [number for number, (asked, _) in self._asked.items() if asked == peer]:
            self.failed(number, error)
