"""One process of a runtime: its links, its actors, its values. Controller and workers are the same thing."""

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
from aiodaft._runtime.actors.hosted_actor import Cell
from aiodaft._runtime.actors.inbound import Hosted
from aiodaft._runtime.actors.inbound_call import IncomingCall
from aiodaft._runtime.actors.responders import LocalCaller
from aiodaft._runtime.agent import Agent
from aiodaft._runtime.calls.call import CallSink, State, Target
from aiodaft._runtime.calls.following import Followers
from aiodaft._runtime.calls.outgoing import Outgoing
from aiodaft._runtime.calls.replies import Replies
from aiodaft._runtime.channels import Channels, how_ended
from aiodaft._runtime.connections.connection import Link
from aiodaft._runtime.connections.ring_poller import Waiter
from aiodaft._runtime.connections.ring_upgrade import Upgrades
from aiodaft._runtime.connections.route import Loopback, Neighbour
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
from aiodaft._runtime.platform.threads import Offload
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
    from aiodaft._runtime.node.node_agent import Node
    from aiodaft._runtime.objects.ref_state import ErrorSink
    from aiodaft.ref import Ref


# Lost links that are kept to say why.
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
        self.offload = Offload(self.loop, f"aiodaft {options.id} copies")
        # What transports run there.
        self.in_thread = self.offload.run
        self.links: dict[PeerId, Link] = {}
        # Processes that do not answer, as far as the node is here to know.
        self.suspects: set[PeerId] = set()
        self.waiter = Waiter(self.loop)
        self.starter = Starter(self.loop)
        self.upgrades = Upgrades(self)
        self.cells: dict[ActorId, Cell] = {}
        self.store = Store(self, self.offload, self._open_transport, options.transport, direct=options.direct)
        self.refs = RefTable(self)
        self.transfer = Transfer(self)
        self.replies = Replies(self)
        # Where calls go; something else takes them while a graph is captured.
        self.sender = Outgoing(self)
        self.outgoing: CallSink = self.sender
        self.followers = Followers(self)
        self.hosted = Hosted(self)
        self.local_caller = LocalCaller(self)
        self.loopback = Loopback(self)
        self.deadlocks = Deadlocks(self)
        self.graphs = Graphs(self)
        # Told of errors that no code saw and no scope owns, and of a wish to exit.
        self.on_unheld: Callable[[BaseException, str], object] = lambda error, what: log_error(what, error)
        self.on_exit: Callable[[BaseException], object] = _ignore_exit
        # Told, in a forked child, that it stayed behind.
        self.on_forked: Callable[[], object] = lambda: None
        self.explain: Callable[[Link, Exception], Awaitable[DaftError]] = _explain_plainly
        self.current_maker = partial(current_task, self.loop)
        self.failed_awaits: FailedAwaits[weakref.ref[Any]] = FailedAwaits()
        self.key = key
        self.numbers = cast("Iterator[CallId]", itertools.count(1))
        self.next_number = self.numbers.__next__
        self._thread = threading.get_ident()
        self._lost: deque[Link] = deque()
        self._past_traffic = Traffic()
        self._dropped: deque[RefState] = deque()
        self.handlers = Dispatch(self).handlers()
        self.channels = Channels(self)
        self.add_cell(AGENT, "agent", Agent(self))
        self.add_cell(CHANNELS, "channels", self.channels)

    @property
    def runtime_name(self) -> str:
        """What errors call the runtime that this process is part of."""
        return self.options.home if self.closed is None else f"{self.options.home}, which is closed"

    # Actors.

    def add_cell(self, actor: ActorId, name: str, instance: Any) -> Cell:
        """Host an actor that exists already."""
        cell = Cell(self, actor, name, specs_of(type(instance)).get)
        cell.instance = instance
        self.cells[actor] = cell
        return cell

    def handle(self, remote: PeerId, actor: ActorId, label: str, cls: type, sink: ErrorSink | None = None) -> Any:
        """A handle of an actor, wherever it is."""
        return Handle(Target(self, remote, actor, label, sink), cls)

    def agent_of(self, remote: PeerId) -> Agent:
        """The agent of a process."""
        return cast("Agent", self.handle(remote, AGENT, f"agent of {remote}", Agent))

    def node_agent(self) -> Node:
        """The agent of this process's machine."""
        from aiodaft._runtime.node.node_agent import Node  # noqa: PLC0415 - the node agent is itself hosted by a peer

        return cast("Node", self.handle(self.options.home, NODE, "node agent", Node))

    # Links.

    def link_to(self, remote: PeerId) -> Link:
        """The link to a process: an existing one, or one that the node is asked for. It may be lost already."""
        link = self.links.get(remote)
        if link is None:
            link = self.new_link(remote)
            self.tasks.create_task(self._ask_introduction(link), name=f"be introduced to {remote}")
        return link

    def way_to(self, remote: PeerId) -> Neighbour:
        """The way to a process, or to this one."""
        return self.loopback if remote == self.id else self.link_to(remote)

    def new_link(self, remote: PeerId) -> Link:
        """A link without a socket yet."""
        session: Session[State] = Session(self.id, self.pid, remote=remote, max_pending=self.options.max_pending)
        link = self.links[remote] = Link(self, session, remote, self.loop)
        return link

    def attach(self, remote: PeerId, connection: socket.socket) -> Link:
        """Use a connected socket for the link to a process."""
        link = self.links.get(remote)
        if link is None:
            link = self.new_link(remote)
        if link.lost is not None:
            connection.close()
        else:
            link.attach(connection)
        return link

    async def _ask_introduction(self, link: Link) -> None:
        try:
            await self.node_agent().introduce(link.remote)
        except Exception as error:  # noqa: BLE001 - without the node's help there is no link
            link.close(error)

    def traffic(self) -> Traffic:
        """What this process sent and received in all."""
        return total([self._past_traffic, *(link.traffic for link in self.links.values())])

    def link_lost(self, link: Link, reason: Exception) -> None:
        """A link ended: everything that went over it fails, with the best explanation there is."""
        self._lost.append(link)
        while len(self._lost) > _REMEMBERED:
            forgotten = self._lost.popleft()
            self._past_traffic = total([self._past_traffic, forgotten.traffic])
            del self.links[forgotten.remote]
        self.hosted.link_lost(link)
        self.graphs.owner_lost(link.remote)
        self.store.peer_lost(link.remote)
        self.store.process_lost(link.remote)
        self.channels.peer_lost(link.remote, how_ended(link))
        self.refs.peer_lost(link.remote)
        self.transfer.relays.link_lost(link.remote)
        if self.closed is None:
            link.explanation = self.tasks.start(self._explain_loss(link, reason), name=f"explain {link.remote}")
        else:
            self._fail_all(link, RuntimeClosed(self.closed))

    def dropped(self, link: Link, message: m.Message) -> None:
        """A call will not be sent."""
        if message[0] == m.SEND:
            self.transfer.revoke(link, message[7])

    async def _explain_loss(self, link: Link, reason: Exception) -> DaftError:
        try:
            known = isinstance(reason, DaftError) and not isinstance(reason, PeerLost | ProtocolError)
            error = cast("DaftError", reason) if known else await self.explain(link, reason)
        except Exception as problem:  # noqa: BLE001 - an explanation that fails must not keep calls waiting
            error = PeerLost(f"the connection to {link.remote} ended: {reason}")
            error.__cause__ = problem
        self._fail_all(link, error)
        return error

    def _fail_all(self, link: Link, error: DaftError) -> None:
        self.replies.link_lost(link, error)
        self.transfer.link_lost(link, error)
        self.graphs.link_lost(link.remote, error)

    async def explanation(self, link: Link) -> DaftError:
        """Why a lost link was lost."""
        if link.explanation is None:
            return PeerLost(f"the connection to {link.remote} ended: {link.lost}")
        return await asyncio.shield(link.explanation)

    async def why_lost(self, way: Neighbour, otherwise: str) -> DaftError:
        """Why something of another process did not work: how that ended, once it is known, or that it lives."""
        # The control link alone says whether a process lives; others may have noticed its end before.
        with suppress(DaftError):
            await self.agent_of(way.remote).answer()
        if way.lost is not None:
            return copy_error(await self.explanation(cast("Link", way)))
        return PeerLost(f"{way.remote} lives, and {otherwise}")

    # What the parts need of each other.

    def running_call(self, owner: PeerId, number: CallId) -> IncomingCall | None:
        """A call of `owner` that is queued or runs here."""
        if owner == self.id:
            return self.local_caller.calls.get(number)
        link = self.links.get(owner)
        return None if link is None else link.incoming.get(number)

    def incoming_calls(self) -> list[IncomingCall]:
        """Every call that is queued or runs here."""
        remote = [call for link in self.links.values() for call in link.incoming.values()]
        answered = [call for cell in self.cells.values() for call in cell.abandoned if call.over]
        return [*remote, *self.local_caller.calls.values(), *self.graphs.calls(), *answered]

    def cancel_local(self, number: CallId) -> None:
        """Cancel a call that this process made to itself."""
        call = self.local_caller.calls.get(number)
        if call is not None:
            call.cell.cancel(call)

    def give_credit(self, stream: StreamState, count: int) -> None:
        """Let a producer go on."""
        if stream.link is not None:
            stream.link.send((m.CREDIT, stream.number, count))
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
        """Close this process's ends of its links, and use the loop no more: it has ended, or is that of the parent."""
        self.closed = reason
        self.waiter.abandon()
        for link in self.links.values():
            link.abandon()

    def stay_behind(self) -> None:
        """In a forked child: the parent goes on with links and actors, and with what they send."""
        self.leave("the runtime stayed behind in the process that this one was forked from")
        self.on_forked()

    def abandon(self, reason: str) -> None:
        """Let go of everything where the loop does not run any more."""
        self.leave(reason)
        self.offload.abandon()
        self.store.close()

    def check_open(self, what: str) -> None:
        """Raise RuntimeClosed if nothing works any more."""
        if self.closed is not None:
            raise RuntimeClosed(f"{what}: {self.closed}")

    async def aclose(self, reason: str) -> None:
        """End every link, task and thread, and free every value. Idempotent."""
        if self.closed is not None:
            return
        self.closed = reason
        self.graphs.abandon(RuntimeClosed(reason))
        self.sender.close(reason)
        self.channels.close()
        for link in list(self.links.values()):
            link.send((m.BYE, reason))
            link.close(RuntimeClosed(reason))
        for cell in list(self.cells.values()):
            await cell.stop(reason, 0)
        self.starter.close()
        await self.tasks.aclose()
        # The helper thread may be copying into memory that the store unmaps.
        await self.offload.aclose()
        self.store.close()
        self.links.clear()
        self.cells.clear()


def _ignore_exit(error: BaseException) -> None:
    raise LocalProtocolError(f"a system actor raised {type(error).__name__}")


async def _explain_plainly(link: Link, reason: Exception) -> DaftError:  # noqa: RUF029 - others have to ask
    return PeerLost(f"the connection to {link.remote} ended: {reason}")


class Dispatch:
    """The messages that come to one process."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def handlers(self) -> list[Callable[[Link, m.Message], object]]:
        """What handles each kind, by its number."""
        peer = self._peer
        table: dict[int, Callable[[Link, m.Message], object]] = {
            m.CALL: peer.hosted.call_came,
            m.SEND: peer.hosted.send_came,
            m.CANCEL: peer.hosted.cancel_came,
            m.CREDIT: peer.hosted.credit_came,
            m.ADOPTED: peer.hosted.adopted_came,
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

    def _introduction_came(self, link: Link, message: m.Message) -> None:
        remote = PeerId(message[1])
        try:
            (fd,) = link.take_fds(1)
        except OSError as error:
            # Only what is sent to that process fails.
            (self._peer.links.get(remote) or self._peer.new_link(remote)).close(
                exhausted(error, f"there is no connection to {remote}")
            )
            return
        connection = socket.socket(fileno=fd)
        if link.remote != self._peer.options.home:
            connection.close()
            raise RemoteProtocolError(f"{link.remote} introduces peers, which only the node may")
        self._peer.attach(remote, connection)

    def _note_came(self, link: Link, message: m.Message) -> None:
        _, name, note, count = message
        fds: list[int] = []
        if count:
            # What is missing costs what the note is about, which the transport says.
            with suppress(OSError):
                fds = link.take_fds(count)
        try:
            self._peer.store.transport_named(name).note_received(link, note, fds)
        except TransportError as error:
            raise RemoteProtocolError(f"{link.remote} sent a wrong note: {error}") from error

    def _release_came(self, link: Link, message: m.Message) -> None:
        for number in message[1]:
            self._peer.store.drop((link.remote, number))

    def _bye_came(self, link: Link, message: m.Message) -> None:
        link.dismissed = True
        link.close(PeerLost(message[1]))

    def _unexpected(self, link: Link, message: m.Message) -> None:
        raise RemoteProtocolError(f"{link.remote} sent an unexpected message of kind {message[0]}")
