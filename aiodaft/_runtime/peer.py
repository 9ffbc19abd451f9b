"""One process of a runtime: its connections, its actors, its values. Controller and workers are the same thing."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from aiodaft._protocol import messages as m
from aiodaft._protocol.ids import AGENT, CHANNELS, NODE, ActorId, CallId, PeerId
from aiodaft._protocol.session import Session
from aiodaft._protocol.siblings import FailedAwaits
from aiodaft._runtime.actors.hosted_actor import HostedActor
from aiodaft._runtime.actors.inbound import Inbound
from aiodaft._runtime.actors.inbound_call import InboundCall
from aiodaft._runtime.actors.responders import LocalResponder
from aiodaft._runtime.agent import Agent
from aiodaft._runtime.calls.call import CallSink, PendingCall, Target
from aiodaft._runtime.calls.following import Followers
from aiodaft._runtime.calls.outgoing import Outgoing
from aiodaft._runtime.calls.replies import Replies
from aiodaft._runtime.channels import Channels, how_ended
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.ring_poller import RingPoller
from aiodaft._runtime.connections.ring_upgrade import RingUpgrades
from aiodaft._runtime.connections.route import Loopback, Route
from aiodaft._runtime.connections.traffic import Traffic, total
from aiodaft._runtime.diagnostics.deadlock_detector import Deadlocks
from aiodaft._runtime.graphs.registry import Graphs
from aiodaft._runtime.objects.blocking import block_on
from aiodaft._runtime.objects.ref_state import RefState
from aiodaft._runtime.objects.ref_table import RefTable
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.objects.streams import StreamState
from aiodaft._runtime.objects.transfer import Transfer
from aiodaft._runtime.platform.eager_start import Starter
from aiodaft._runtime.platform.env import Env
from aiodaft._runtime.platform.error_log import log_error
from aiodaft._runtime.platform.exhaustion import exhausted
from aiodaft._runtime.platform.linux import visible_pid
from aiodaft._runtime.platform.tasks import TaskOwner, current_task
from aiodaft._runtime.platform.threads import HelperThread
from aiodaft._runtime.serialization.errors import copy_error
from aiodaft.actor import Handle
from aiodaft.exceptions import (
    DaftError,
    LocalProtocolError,
    PeerLost,
    ProtocolError,
    RemoteProtocolError,
    RuntimeClosed,
)
from aiodaft.methods import specs_of
from aiodaft_transport import Key, Transport, TransportError, open_transport

if TYPE_CHECKING:
    from aiodaft._runtime.node.node_agent import NodeAgent
    from aiodaft._runtime.objects.ref_state import UnhandledErrors
    from aiodaft.ref import Ref


# Lost connections that are kept to say why.
_REMEMBERED: Final = 1024


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """How a process takes part.

    Attributes:
        id: Its id among its peers.
        node: Name of the machine.
        home: The process that has the node's agent.
        transport: How payloads leave the process.
        direct: Whether what is in GPU memory goes from GPU to GPU, and not by that transport.
        grace: Seconds that cancelled calls get for their cleanup.
        max_pending: Calls to one process that may be without an answer.
    """

    id: PeerId
    node: str
    home: PeerId
    transport: str
    direct: bool
    grace: float
    max_pending: int


class Peer:
    """One process."""

    # Why nothing works any more, once it does not.
    closed: str | None = None
    # Who makes a call: the task that runs; in a worker, the call that it serves.
    current_maker: Callable[[], object]
    _draining = False

    def __init__(self, options: PeerOptions, key: Key, env: Env) -> None:
        self.options = options
        self.id = options.id
        self.node = options.node
        self.grace = options.grace
        self.env = env
        self.pid = visible_pid()
        self.loop = asyncio.get_running_loop()
        self.tasks = TaskOwner(f"aiodaft {options.id}")
        self.helper_thread = HelperThread(self.loop, f"aiodaft {options.id} copies")
        # What transports run there.
        self.in_thread = self.helper_thread.run
        self.connections: dict[PeerId, Connection] = {}
        # Processes that do not answer, as far as the node is here to know.
        self.suspects: set[PeerId] = set()
        self.waiter = RingPoller(self.loop)
        self.starter = Starter(self.loop)
        self.upgrades = RingUpgrades(self)
        self.actors: dict[ActorId, HostedActor] = {}
        self.store = Store(self, self.helper_thread, self._open_transport, options.transport, direct=options.direct)
        self.refs = RefTable(self)
        self.transfer = Transfer(self)
        self.replies = Replies(self)
        # Where calls go; something else takes them while a graph is captured.
        self.sender = Outgoing(self)
        self.outgoing: CallSink = self.sender
        self.followers = Followers(self)
        self.inbound = Inbound(self)
        self.local_caller = LocalResponder(self)
        self.loopback = Loopback(self)
        self.deadlocks = Deadlocks(self)
        self.graphs = Graphs(self)
        # Told of errors that no code saw and no scope owns, and of a wish to exit.
        self.on_unheld: Callable[[BaseException, str], object] = lambda error, what: log_error(what, error)
        self.on_exit: Callable[[BaseException], object] = _ignore_exit
        # Told, in a forked child, that it stayed behind.
        self.on_forked: Callable[[], object] = lambda: None
        self.explain: Callable[[Connection, Exception], Awaitable[DaftError]] = _explain_plainly
        self.current_maker = partial(current_task, self.loop)
        self.failed_awaits: FailedAwaits[weakref.ref[Any]] = FailedAwaits()
        self.key = key
        self.numbers = cast("Iterator[CallId]", itertools.count(1))
        self.next_number = self.numbers.__next__
        self._thread = threading.get_ident()
        self._lost: deque[Connection] = deque()
        self._past_traffic = Traffic()
        self._dropped: deque[RefState] = deque()
        self.handlers = Dispatch(self).handlers()
        self.channels = Channels(self)
        self.add_actor(AGENT, "agent", Agent(self))
        self.add_actor(CHANNELS, "channels", self.channels)

    @property
    def runtime_name(self) -> str:
        """What errors call the runtime that this process is part of."""
        return self.options.home if self.closed is None else f"{self.options.home}, which is closed"

    # Actors.

    def add_actor(self, actor: ActorId, name: str, instance: Any) -> HostedActor:
        """Host an actor that exists already."""
        hosted = HostedActor(self, actor, name, specs_of(type(instance)).get)
        hosted.instance = instance
        self.actors[actor] = hosted
        return hosted

    def handle(self, remote: PeerId, actor: ActorId, label: str, cls: type, sink: UnhandledErrors | None = None) -> Any:
        """A handle of an actor, wherever it is."""
        return Handle(Target(self, remote, actor, label, sink), cls)

    def agent_of(self, remote: PeerId) -> Agent:
        """The agent of a process."""
        return cast("Agent", self.handle(remote, AGENT, f"agent of {remote}", Agent))

    def node_agent(self) -> NodeAgent:
        """The agent of this process's machine."""
        from aiodaft._runtime.node.node_agent import NodeAgent  # noqa: PLC0415 - the node agent is itself hosted by a peer

        return cast("NodeAgent", self.handle(self.options.home, NODE, "node agent", NodeAgent))

    # Links.

    def connection_to(self, remote: PeerId) -> Connection:
        """The connection to a process: an existing one, or one that the node is asked for. It may be lost already."""
        connection = self.connections.get(remote)
        if connection is None:
            connection = self.new_connection(remote)
            self.tasks.create_task(self._ask_introduction(connection), name=f"be introduced to {remote}")
        return connection

    def route_to(self, remote: PeerId) -> Route:
        """The way to a process, or to this one."""
        return self.loopback if remote == self.id else self.connection_to(remote)

    def new_connection(self, remote: PeerId) -> Connection:
        """A connection without a socket yet."""
        session: Session[PendingCall] = Session(self.id, self.pid, remote=remote, max_pending=self.options.max_pending)
        connection = self.connections[remote] = Connection(self, session, remote, self.loop)
        return connection

    def attach(self, remote: PeerId, sock: socket.socket) -> Connection:
        """Use a connected socket for the connection to a process."""
        connection = self.connections.get(remote)
        if connection is None:
            connection = self.new_connection(remote)
        if connection.lost is not None:
            sock.close()
        else:
            connection.attach(sock)
        return connection

    async def _ask_introduction(self, connection: Connection) -> None:
        try:
            await self.node_agent().introduce(connection.remote)
        except Exception as error:  # noqa: BLE001 - without the node's help there is no connection
            connection.close(error)

    def traffic(self) -> Traffic:
        """What this process sent and received in all."""
        return total([self._past_traffic, *(connection.traffic for connection in self.connections.values())])

    def connection_lost(self, connection: Connection, reason: Exception) -> None:
        """A connection ended: everything that went over it fails, with the best explanation there is."""
        self._lost.append(connection)
        while len(self._lost) > _REMEMBERED:
            forgotten = self._lost.popleft()
            self._past_traffic = total([self._past_traffic, forgotten.traffic])
            del self.connections[forgotten.remote]
        self.inbound.connection_lost(connection)
        self.graphs.owner_lost(connection.remote)
        self.store.peer_lost(connection.remote)
        self.store.process_lost(connection.remote)
        self.channels.peer_lost(connection.remote, how_ended(connection))
        self.refs.peer_lost(connection.remote)
        self.transfer.relays.connection_lost(connection.remote)
        if self.closed is None:
            connection.explanation = self.tasks.start(
                self._explain_loss(connection, reason), name=f"explain {connection.remote}"
            )
        else:
            self._fail_all(connection, RuntimeClosed(self.closed))

    def dropped(self, connection: Connection, message: m.Message) -> None:
        """A call will not be sent."""
        if message[0] == m.SEND:
            self.transfer.revoke(connection, message[7])

    async def _explain_loss(self, connection: Connection, reason: Exception) -> DaftError:
        try:
            known = isinstance(reason, DaftError) and not isinstance(reason, PeerLost | ProtocolError)
            error = cast("DaftError", reason) if known else await self.explain(connection, reason)
        except Exception as problem:  # noqa: BLE001 - an explanation that fails must not keep calls waiting
            error = PeerLost(f"the connection to {connection.remote} ended: {reason}")
            error.__cause__ = problem
        self._fail_all(connection, error)
        return error

    def _fail_all(self, connection: Connection, error: DaftError) -> None:
        self.replies.connection_lost(connection, error)
        self.transfer.connection_lost(connection, error)
        self.graphs.connection_lost(connection.remote, error)

    async def explanation(self, connection: Connection) -> DaftError:
        """Why a lost connection was lost."""
        if connection.explanation is None:
            return PeerLost(f"the connection to {connection.remote} ended: {connection.lost}")
        return await asyncio.shield(connection.explanation)

    async def why_lost(self, route: Route, otherwise: str) -> DaftError:
        """Why something of another process did not work: how that ended, once it is known, or that it lives."""
        # The control connection alone says whether a process lives; others may have noticed its end before.
        with suppress(DaftError):
            await self.agent_of(route.remote).answer()
        if route.lost is not None:
            return copy_error(await self.explanation(cast("Connection", route)))
        return PeerLost(f"{route.remote} lives, and {otherwise}")

    # What the parts need of each other.

    def running_call(self, owner: PeerId, number: CallId) -> InboundCall | None:
        """A call of `owner` that is queued or runs here."""
        if owner == self.id:
            return self.local_caller.calls.get(number)
        connection = self.connections.get(owner)
        return None if connection is None else connection.incoming.get(number)

    def incoming_calls(self) -> list[InboundCall]:
        """Every call that is queued or runs here."""
        remote = [call for connection in self.connections.values() for call in connection.incoming.values()]
        answered = [call for hosted in self.actors.values() for call in hosted.abandoned if call.over]
        return [*remote, *self.local_caller.calls.values(), *self.graphs.calls(), *answered]

    def cancel_local(self, number: CallId) -> None:
        """Cancel a call that this process made to itself."""
        call = self.local_caller.calls.get(number)
        if call is not None:
            call.hosted.cancel(call)

    def give_credit(self, stream: StreamState, count: int) -> None:
        """Let a producer go on."""
        if stream.connection is not None:
            stream.connection.send((m.CREDIT, stream.number, count))
        else:
            call = self.local_caller.calls.get(stream.number)
            if call is not None:
                call.add_credit(count)

    def report_unheld(self, state: RefState) -> None:
        """The error of a ref that was dropped before any code saw the error."""
        assert state.error is not None
        if state.maker is not None and self.failed_awaits.excuse(
            state.maker, state.number, state.failed, state.dropped
        ):
            why = "its ref was dropped after the await of another call of the same task had failed"
            what = f"{state.label} failed as well; {why}"
            log_error(what, state.error, logging.INFO)
            return
        what = f"{state.label} failed, and its ref was dropped before any code saw the error"
        if state.sink is not None:
            state.sink.fail(state.error, what)
        else:
            self.on_unheld(state.error, what)

    def exit_requested(self, error: BaseException) -> None:
        """A method raised SystemExit or KeyboardInterrupt."""
        self.on_exit(error)

    def create_task(self, coro: Coroutine[Any, Any, None], /, *, name: str) -> None:
        """Start a task for a transport."""
        self.tasks.create_task(coro, name=name)

    @property
    def is_here(self) -> bool:
        """Whether this is the loop's own thread."""
        return threading.get_ident() == self._thread

    def block_on(self, ref: Ref[Any]) -> Any:
        """Wait for a ref in another thread than the loop's."""
        return block_on(self, ref)

    def call_soon(self, callback: Callable[[], object], /) -> None:
        """Run something on the loop; from any thread, also while garbage is collected."""
        # A closed loop runs nothing; what it would have freed went with it.
        with suppress(RuntimeError):
            if self.is_here:
                self.loop.call_soon(callback)
            else:
                self.loop.call_soon_threadsafe(callback)

    def drop_soon(self, state: RefState) -> None:
        """A `Ref` object is gone; from any thread, also while garbage is collected."""
        self._dropped.append(state)
        if not self._draining:
            self._draining = True
            self.call_soon(self.drop_now)

    def drop_now(self) -> None:
        """Do what the `Ref` objects that are gone leave to be done."""
        self._draining = False
        while self._dropped:
            self._dropped.popleft().drop_handle()

    def _open_transport(self, name: str) -> Transport:
        return open_transport(name, self, self.key, local=self.id)

    def leave(self, reason: str) -> None:
        """Close this process's ends of its connections without the loop, which has ended or belongs to the parent."""
        self.closed = reason
        self.waiter.abandon()
        for connection in self.connections.values():
            connection.abandon()

    def stay_behind(self) -> None:
        """In a forked child: the parent goes on with connections and actors, and with what they send."""
        self.leave("the runtime stayed behind in the process that this one was forked from")
        self.on_forked()

    def abandon(self, reason: str) -> None:
        """Let go of everything where the loop does not run any more."""
        self.leave(reason)
        self.helper_thread.abandon()
        self.store.close()

    def check_open(self, what: str) -> None:
        """Raise RuntimeClosed if nothing works any more."""
        if self.closed is not None:
            raise RuntimeClosed(f"{what}: {self.closed}")

    async def aclose(self, reason: str) -> None:
        """End every connection, task and thread, and free every value. Idempotent."""
        if self.closed is not None:
            return
        self.closed = reason
        self.graphs.abandon(RuntimeClosed(reason))
        self.sender.close(reason)
        self.channels.close()
        for connection in list(self.connections.values()):
            connection.send((m.BYE, reason))
            connection.close(RuntimeClosed(reason))
        for hosted in list(self.actors.values()):
            await hosted.stop(reason, 0)
        self.starter.close()
        await self.tasks.aclose()
        # The helper thread may be copying into memory that the store unmaps.
        await self.helper_thread.aclose()
        self.store.close()
        self.connections.clear()
        self.actors.clear()


def _ignore_exit(error: BaseException) -> None:
    raise LocalProtocolError(f"a system actor raised {type(error).__name__}")


async def _explain_plainly(connection: Connection, reason: Exception) -> DaftError:  # noqa: RUF029 - others have to ask
    return PeerLost(f"the connection to {connection.remote} ended: {reason}")


class Dispatch:
    """The messages that come to one process."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def handlers(self) -> list[Callable[[Connection, m.Message], object]]:
        """What handles each kind, by its number."""
        peer = self._peer
        table: dict[int, Callable[[Connection, m.Message], object]] = {
            m.CALL: peer.inbound.call_came,
            m.SEND: peer.inbound.send_came,
            m.CANCEL: peer.inbound.cancel_came,
            m.CREDIT: peer.inbound.credit_came,
            m.ADOPTED: peer.inbound.adopted_came,
            m.REPLY: peer.replies.replied,
            m.RESULT: peer.replies.answered,
            m.STORED: peer.replies.answered,
            m.ERROR: peer.replies.answered,
            m.ITEM: peer.replies.item_came,
            m.PULL: peer.transfer.asked,
            m.VALUE: peer.transfer.answered,
            m.MOVED: peer.transfer.answered,
            m.BROKEN: peer.transfer.answered,
            m.JOIN: peer.transfer.relays.join_came,
            m.LEAVE: peer.transfer.relays.leave_came,
            m.BORROW: peer.refs.borrow_came,
            m.RELEASE: self._release_came,
            m.NOTE: self._note_came,
            m.INTRODUCE: self._introduction_came,
            m.BYE: self._bye_came,
            m.RING: peer.upgrades.came,
            **peer.graphs.handlers,
        }
        return [table.get(kind, self._unexpected) for kind in range(m.KINDS)]

    def _introduction_came(self, connection: Connection, message: m.Message) -> None:
        remote = PeerId(message[1])
        try:
            (fd,) = connection.take_fds(1)
        except OSError as error:
            # Only what is sent to that process fails.
            (self._peer.connections.get(remote) or self._peer.new_connection(remote)).close(
                exhausted(error, f"there is no connection to {remote}")
            )
            return
        sock = socket.socket(fileno=fd)
        if connection.remote != self._peer.options.home:
            sock.close()
            raise RemoteProtocolError(f"{connection.remote} introduces peers, which only the node may")
        self._peer.attach(remote, sock)

    def _note_came(self, connection: Connection, message: m.Message) -> None:
        _, name, note, count = message
        fds: list[int] = []
        if count:
            # What is missing costs what the note is about, which the transport says.
            with suppress(OSError):
                fds = connection.take_fds(count)
        try:
            self._peer.store.transport_named(name).note_received(connection, note, fds)
        except TransportError as error:
            raise RemoteProtocolError(f"{connection.remote} sent a wrong note: {error}") from error

    def _release_came(self, connection: Connection, message: m.Message) -> None:
        for number in message[1]:
            self._peer.store.drop((connection.remote, number))

    def _bye_came(self, connection: Connection, message: m.Message) -> None:
        connection.dismissed = True
        connection.close(PeerLost(message[1]))

    def _unexpected(self, connection: Connection, message: m.Message) -> None:
        raise RemoteProtocolError(f"{connection.remote} sent an unexpected message of kind {message[0]}")
