"""The composition root of a process: its parts, each with its dependencies; its system actors; answers to its calls."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol, cast

from aiodaft._protocol.calls.outgoing import Location
from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.messages import Message, Value
from aiodaft._protocol.groups.roster import Roster
from aiodaft._protocol.ids import (
    AGENT,
    BLOCKS,
    CHANNELS,
    CHECKPOINTS,
    COLLECTIVES,
    INBOXES,
    KEYED,
    NODE,
    PLANNING,
    RESHARDING,
    SUPERVISOR,
    TURNS,
    ActorId,
    CallId,
    PeerId,
    is_attached,
)
from aiodaft._runtime.actors.host import Enlisted, Fence, Host, Rosters, block_on
from aiodaft._runtime.actors.hosted_actor import HostedActor, InboundCall
from aiodaft._runtime.actors.inbound import Inbound
from aiodaft._runtime.agent import Agent, agent_of
from aiodaft._runtime.calls.call import Caller, CallState, PendingCall, loss_for
from aiodaft._runtime.calls.following import Followers
from aiodaft._runtime.calls.outgoing import Outgoing
from aiodaft._runtime.channels import Channels, leaving_of
from aiodaft._runtime.connections.connection import Connection, Handler
from aiodaft._runtime.connections.connections import UNASKED, Connections
from aiodaft._runtime.connections.route import Route
from aiodaft._runtime.diagnostics.process_view import Deadlocks, Viewer, WaitGraph
from aiodaft._runtime.diagnostics.tracing import Tracing
from aiodaft._runtime.diagnostics.watchdog import Watchdog
from aiodaft._runtime.graphs.graph_value import GraphContext
from aiodaft._runtime.graphs.participant import Graphs
from aiodaft._runtime.groups.blocks import Blocks
from aiodaft._runtime.groups.checkpoints import Checkpoints
from aiodaft._runtime.groups.collectives import Collectives, cut_up
from aiodaft._runtime.groups.inboxes import Inboxes
from aiodaft._runtime.groups.keyed import Keyed
from aiodaft._runtime.groups.line import PLANS, Planning
from aiodaft._runtime.groups.resharding import Resharding
from aiodaft._runtime.groups.turns import TurnKeeper
from aiodaft._runtime.logs.options import Written
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.objects.ref_table import StreamState
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.objects.transfer import Delivery, Objects
from aiodaft._runtime.process import Env, Process, ProcessOptions
from aiodaft._runtime.serialization.decoder import ReceivedValue
from aiodaft._runtime.serialization.errors import decode_failure
from aiodaft.actor import Actor
from aiodaft.exceptions import CallCancelled, DaftError, OutcomeUnknown, RemoteProtocolError, RuntimeClosed
from aiodaft.methods import method, specs_of
from aiodaft.ref import Ref
from aiodaft_transport import Key, Transport, open_transport


class Replies:
    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._tasks = objects.process.tasks

    def replied(self, connection: Connection, message: Message) -> None:
        _, number, value = message
        state: PendingCall | None = connection.session.settle(number)
        if state is None:
            raise _unasked(connection, number)
        state.on_plain(value)

    @staticmethod
    def over_came(connection: Connection, message: Message) -> None:
        for number in m.read_over(message):
            _settled(connection, number).on_plain(None)

    def result_came(self, connection: Connection, message: Message) -> None:
        number, value = m.read_result(message)
        state = _settled(connection, number)
        payload, blobs, refs = value
        if refs:
            self._tasks.create_task(self._adopt_result(connection, number, state, value), name="adopt refs")
        else:
            state.on_result(ReceivedValue(payload, blobs, [], [], connection.definitions.heard))

    @staticmethod
    def stored_came(connection: Connection, message: Message) -> None:
        number, size, kind = m.read_stored(message)
        state = _settled(connection, number)
        if isinstance(state, CallState):
            state.stored_bytes, state.stored_kind = size, kind
        state.on_stored()

    @staticmethod
    def error_came(connection: Connection, message: Message) -> None:
        number, encoded, executed = m.read_error(message)
        state = _settled(connection, number)
        if encoded:
            state.on_error(decode_failure(encoded, executed))
        elif executed is None:
            what = state.origin if isinstance(state, CallState) else state.label
            state.on_error(CallCancelled(f"{what} was cancelled"))
        else:
            state.on_away(connection.remote)

    def item_came(self, connection: Connection, message: Message) -> None:
        number, (payload, blobs, refs) = m.read_item(message)
        state = connection.session.calls.get(number)
        if not isinstance(state, StreamState):
            raise RemoteProtocolError(
                f"{connection.remote} sends an item of call {number}, which is no stream under way"
            )
        if refs or isinstance(blobs, tuple):
            # It keeps its place in the stream while it is fetched.
            item = Delivery(self._objects.store, connection, payload, blobs, refs)
            state.on_item(self._tasks.start_ahead(self._fetch_item(connection, number, item), name="fetch an item"))
        else:
            state.on_item(ReceivedValue(payload, blobs, [], []))

    async def _adopt_result(self, connection: Connection, number: CallId, state: PendingCall, value: Value) -> None:
        payload, blobs, refs = value
        adopted = await self._objects.refs.adopt(refs, connection)
        connection.send(m.adopted(number))
        state.on_result(ReceivedValue(payload, blobs, [], adopted))

    async def _fetch_item(self, connection: Connection, number: CallId, item: Delivery) -> ReceivedValue:
        try:
            return await self._objects.transfer.receive(item)
        finally:
            # Also if it cannot be had: then its refs are not needed.
            if item.refs:
                connection.send(m.adopted(number))

    def connection_lost(self, connection: Connection, error: DaftError) -> None:
        """Fail the calls over a connection: none of them will be answered any more."""
        for used in list(self._objects.borrowing.used.values()):
            if isinstance(used, CallState) and used.connection is connection:
                used.doubt_forwards()
        calls = list(connection.session.calls.items())
        # The last first: the room that the first leaves would send the next.
        unsent = {number for number, _ in reversed(calls) if connection.withdraw(number)}
        for number, state in calls:
            if number not in unsent:
                connection.session.settle(number)
            executed = False if number in unsent or not connection.connected else None
            try:
                state.on_lost(loss_for(state, error, executed))
            except Exception as problem:  # noqa: BLE001 - a logging filter of the user's, say: the other calls fail, too
                message = f"an error raised while {state.label} failed, because {connection.remote} was lost"
                self._objects.process.loop.call_exception_handler({"message": message, "exception": problem})


def _settled(connection: Connection, number: CallId) -> PendingCall:
    state: PendingCall | None = connection.session.settle(number)
    if state is None:
        raise _unasked(connection, number)
    return state


def _unasked(connection: Connection, number: CallId) -> RemoteProtocolError:
    return RemoteProtocolError(f"{connection.remote} answers call {number}, which is not under way")


class NodeContact(Actor):
    """The methods of a node agent, for every process."""

    @method
    async def introduce(self, other: str, known: int) -> str:
        """Connect the calling process with another one; returns the address to connect to if no socket comes.

        `known`: The number of sockets, or news of one that was lost, that have come for it before.
        """
        raise NotImplementedError

    @method
    async def open_stream(self, other: str, number: int) -> str:
        raise NotImplementedError

    @method
    async def locate(self, owner: str, number: int, wait: bool) -> Location:
        raise NotImplementedError

    @method
    async def wait_end(self, peer: str) -> None:
        raise NotImplementedError

    @method
    async def exit_report(self, peer: str, in_flight: int) -> DaftError:
        raise NotImplementedError

    @method
    async def vacate(
        self, owner: str, peer: str, actor: int, reason: str, keep: bool = False, answers: bool = True
    ) -> None:
        raise NotImplementedError


class OwnerContact(Actor):
    """The methods of an owner of actors, for other processes; `Directory` implements it."""

    @method
    async def locate(self, number: int, wait: bool) -> Location:
        """The location of a supervised actor; if it is down, and `wait`, as soon as it is up."""
        raise NotImplementedError

    @method(ordered=False)
    async def roster_after(self, group: str, epoch: int, since: int) -> Roster[Any] | None:
        """A group, as soon as it has a newer epoch: without its members if it has had them `since` that epoch.

        None if there is no such group any more.
        """
        raise NotImplementedError

    @method
    async def process_ended(self, peer: str, error: OutcomeUnknown, wanted: bool) -> None:
        """A worker ended: the error for callers of its actors, and whether the runtime wanted its end."""
        raise NotImplementedError

    @method
    async def actor_died(self, peer: str, actor: int, error: OutcomeUnknown) -> None:
        """An actor's process ended by accident, and no call failed because of that."""
        raise NotImplementedError

    @method
    async def node_draining(self, node: str, grace: float) -> None:
        raise NotImplementedError

    @method
    async def unheld(self, encoded: bytes, what: str) -> None:
        raise NotImplementedError

    @method
    async def show(self, written: Sequence[Written]) -> None:
        raise NotImplementedError


class Addresses(Protocol):
    def address_of(self, peer: PeerId) -> str:
        """The address at which the node of a process listens.

        Raises:
            PeerLost: The node is not in the cluster any more.
        """
        ...


class Peer:
    def __init__(self, options: ProcessOptions, key: Key, env: Env) -> None:
        self.process = process = Process(options, key, env)
        self.connections = Connections(process, self)
        process.connect = self.connections.data_streams.open
        self.store = Store(process, self._open_transport)
        self.objects = Objects(process, self.connections, self.store, self)
        self.refs = self.objects.refs
        self.transfer = self.objects.transfer
        self.host = Host(process, self.store, self.connections.ring_poller)
        self.actors = self.host.actors
        self.inbound = Inbound(self.host, self.transfer, self.refs)
        self.caller = Caller(process, self.connections, self.objects, self.actors)
        self.sender = Outgoing(self.caller, self.inbound)
        self.agent_of = partial(agent_of, self.caller)
        self.fence = Fence(process, self._hear_from_node)
        self.node = cast("NodeContact", self.caller.handle(process.options.agent, NODE, "node agent", NodeContact))
        self.followers = Followers(self.caller, self._locate)
        self.replies = Replies(self.objects)
        self.graphs = Graphs(
            GraphContext(process, self.connections, self.objects, self.sender, self.actors, self.agent_of)
        )
        waits = WaitGraph(self.host, self.connections, self.graphs, self.inbound.find)
        self.deadlocks = Deadlocks(waits, self.agent_of)
        self.host.suspect = self.deadlocks.suspect
        # The nodes, as a process that no node has started knows them; others ask their node agent.
        self.nodes: Addresses | None = None
        # Told, in a forked child, that it stayed behind.
        self.on_forked: Callable[[], object] = lambda: None
        self.channels = Channels(self.caller)
        self.connections.handlers += self._handlers()
        self.tracing = Tracing(self.host, self.sender, self.graphs, self._have_recorded)
        process.provide(Watchdog, Watchdog(process))
        process.provide(Viewer, Viewer(self.host, self.connections, self.objects))
        agent = Agent(self.host, self.objects, self.graphs, self.deadlocks, self, self.followers, self.tracing)
        self.add_actor(AGENT, "agent", agent)
        process.provide(Peer, self)
        process.provide(Store, self.store)
        process.provide(Caller, self.caller)
        process.provide(Followers, self.followers)
        process.provide(Rosters, Rosters(process, self._roster_after))
        process.provide(Channels, self.channels)
        process.provide(Graphs, self.graphs)
        process.provide(Tracing, self.tracing)
        self.add_actor(CHANNELS, "channels", self.channels)
        self.inboxes = Inboxes(self.caller, self.store, process.part(Enlisted))
        self._serve_groups()

    def _serve_groups(self) -> None:
        process, enlisted = self.process, self.process.part(Enlisted)
        resharding = Resharding(self.caller, self.store)
        self.add_actor(RESHARDING, "resharding", resharding)
        self.add_actor(CHECKPOINTS, "checkpoints", Checkpoints(self.caller, self.store, resharding))
        collectives = Collectives(self.store)
        self.add_actor(COLLECTIVES, "collectives", collectives)
        blocks = Blocks(process, enlisted)
        process.provide(Blocks, blocks)
        self.add_actor(BLOCKS, "blocks", blocks)
        process.provide(Inboxes, self.inboxes)
        self.add_actor(INBOXES, "inboxes", self.inboxes)
        keyed = Keyed(self.caller, self.store, enlisted, collectives, self.running_call)
        self.host.on_undone = keyed.withdraw
        process.provide(Keyed, keyed)
        self.add_actor(KEYED, "keyed collectives", keyed)
        planning = Planning(self.caller, enlisted, keyed)
        process.provide(Planning, planning)
        self.add_actor(PLANNING, PLANS, planning)
        self.turns = TurnKeeper(self.caller, self.host, enlisted)
        self.host.gate_for = self.turns.gate_for
        self.add_actor(TURNS, "turns of calls", self.turns)

    def add_actor(self, actor: ActorId, name: str, instance: Any) -> HostedActor:
        hosted = HostedActor(self.host, actor, name, specs_of(type(instance)).get)
        hosted.instance = instance
        self.host.add(hosted)
        return hosted

    def owner(self, controller: PeerId) -> OwnerContact:
        return cast("OwnerContact", self.caller.handle(controller, SUPERVISOR, "supervisor", OwnerContact))

    def _roster_after(self, known: Roster[Any]) -> Ref[Roster[Any] | None]:
        asked: Ref[Roster[Any] | None] = self.owner(known.owner).roster_after(known.id, known.epoch, known.since)
        return asked

    def _have_recorded(self, remote: PeerId, collector: PeerId, number: int, limit: int) -> None:
        self.agent_of(remote).begin_trace.tell(collector, number, limit)

    def _locate(self, owner: PeerId, number: ActorId, wait: bool) -> Ref[Location]:
        if is_attached(owner) and is_attached(self.process.id) and owner != self.process.id:
            return self.node.locate(owner, number, wait)
        return self.owner(owner).locate(number, wait)

    def introduce(self, remote: PeerId, known: int) -> Awaitable[str]:
        return self.node.introduce(remote, known) if self.nodes is None else self._address_of(remote)

    async def ask_stream(self, remote: PeerId, number: int) -> None:
        if is_attached(remote):
            await self.agent_of(remote).open_stream(number)
            return
        address = await (self.node.open_stream(remote, number) if self.nodes is None else self._address_of(remote))
        if address:
            self.connections.data_streams.came(remote, number, await self._open_far_stream(remote, address, UNASKED))

    async def answer_with_stream(self, remote: PeerId, number: int) -> None:
        """Open the stream that another process has asked for, which cannot connect to this one."""
        stream = await self._open_far_stream(remote, await self._address_of(remote), number)
        self.connections.data_streams.came(remote, UNASKED, stream)

    async def lose_node(self, name: str, process: PeerId | None) -> None:
        """A node is no member any more; nothing happens if it is heard nevertheless."""
        if not await self.connections.hears_from(name):
            self.connections.lose_node(name, process)

    def vacate(self, actor: ActorId, reason: str) -> None:
        process = self.process
        self.node.vacate.tell(process.options.owner, process.id, actor, reason)

    def _hear_from_node(self) -> None:
        self.connections.to(self.process.options.agent).catch_up()

    async def _open_far_stream(self, remote: PeerId, address: str, number: int) -> socket.socket:
        assert self.connections.far is not None
        return await self.connections.far.open_stream(remote, address, number)

    def take_stream(self, remote: PeerId, stream: socket.socket) -> None:
        self.store.transport_named("tcp").stream_came(remote, stream)

    async def _address_of(self, remote: PeerId) -> str:
        assert self.nodes is not None
        return self.nodes.address_of(remote)

    def connect(self, remote: PeerId) -> None:
        self.connections.to(remote)

    def ask(self, remote: PeerId) -> Awaitable[object]:
        return self.agent_of(remote).answer()

    def revoke(self, connection: Connection, blobs: Any) -> None:
        self.store.revoke(connection, blobs)

    def take_note(self, transport: str, route: Route, note: bytes, fds: list[int]) -> None:
        if transport == PLANS:
            self.process.part(Planning).descriptors_came(route.remote, note, fds)
        else:
            self.store.transport_named(transport).note_received(route, note, fds)

    def connection_lost(self, connection: Connection) -> None:
        remote = connection.remote
        self.inbound.connection_lost(connection)
        self.graphs.owner_lost(remote)
        self.store.peer_lost(remote)
        self.channels.peer_lost(remote, leaving_of(connection))
        self.refs.peer_lost(remote)
        self.transfer.relays.connection_lost(remote)
        self.turns.connection_lost(remote)

    def connection_explained(self, connection: Connection, error: DaftError) -> None:
        self.replies.connection_lost(connection, error)
        self.transfer.connection_lost(connection, error)
        self.graphs.connection_lost(connection.remote, error)

    def connection_renewed(self, remote: PeerId) -> None:
        self.transfer.doubt(remote)

    def _handlers(self) -> list[Handler]:
        table: dict[int, Handler] = {
            m.CALL: self.inbound.call_came,
            m.TELL: self.inbound.call_came,
            m.APPLY: self.inbound.apply_came,
            m.SEND: self.inbound.send_came,
            m.FORWARD: self.inbound.forward_came,
            m.CANCEL: self.inbound.cancel_came,
            m.CREDIT: self.inbound.credit_came,
            m.ADOPTED: self.inbound.adopted_came,
            m.REPLY: self.replies.replied,
            m.OVER: self.replies.over_came,
            m.RESULT: self.replies.result_came,
            m.STORED: self.replies.stored_came,
            m.ERROR: self.replies.error_came,
            m.ITEM: self.replies.item_came,
            m.PULL: self.transfer.asked,
            m.ASK: self.transfer.ask_came,
            m.RENEWED: self.transfer.renewed_came,
            m.GIVEN: self.transfer.given_came,
            m.VALUE: self.transfer.answered,
            m.MOVED: self.transfer.answered,
            m.BROKEN: self.transfer.answered,
            m.JOIN: self.transfer.relays.join_came,
            m.LEAVE: self.transfer.relays.leave_came,
            m.BORROW: self.refs.borrow_came,
            m.RELEASE: self.store.release_came,
            m.NOTE: self.connections.note_came,
            m.INTRODUCE: self.connections.introduction_came,
            m.ADMIT: self.connections.admission_came,
            m.DATA: self.connections.stream_came,
            m.REACH: self.connections.reach_came,
            m.BYE: self.connections.bye_came,
            m.DEFINE: Connection.define_came,
            m.FORGET: Connection.forget_came,
            m.RING: self.connections.ring_came,
            **self.graphs.handlers,
        }
        return [table.get(kind, _unexpected) for kind in range(m.KINDS)]

    def running_call(self, owner: PeerId, number: CallId) -> InboundCall | None:
        return self.inbound.find(owner, number)

    def cancel_local(self, number: CallId) -> bool:
        return self.inbound.local.cancel(number)

    def credit_local(self, number: CallId, count: int) -> None:
        call = self.inbound.local.calls.get(number)
        if call is not None:
            call.add_credit(count)

    def borrow(self, owner: PeerId, number: CallId) -> Awaitable[object]:
        return self.agent_of(owner).borrow(number)

    def give_back(self, owner: PeerId, number: CallId) -> None:
        self.agent_of(owner).give_back.tell(number)

    def cancel_remote(self, owner: PeerId, number: CallId) -> None:
        self.agent_of(owner).cancel.tell(number)

    def ended_remote(self, owner: PeerId, number: CallId) -> Awaitable[bool]:
        return self.agent_of(owner).ended(number)

    def unread_remote(self, producer: PeerId, owner: PeerId, number: CallId) -> Awaitable[object]:
        return self.agent_of(producer).unread(owner, number)

    def block_on(self, ref: Ref[Any], timeout: float | None) -> Any:
        return block_on(self.process, ref, f"the ref of {state_of(ref).origin}: result()", timeout)

    def cut(self, ref: Ref[Any], count: int) -> list[Ref[Any]]:
        return self.process.on_loop(lambda: cut_up(ref, count))

    def _open_transport(self, name: str) -> Transport:
        return open_transport(name, self.process)

    def leave(self, reason: str) -> None:
        """Close this process's ends of its connections without the loop, which has ended or belongs to the parent."""
        self.process.closed = reason
        self.connections.abandon()

    def stay_behind(self) -> None:
        """In a forked child: the parent goes on with connections and actors, and with their messages."""
        self.leave("the runtime stayed behind in the process that this one was forked from")
        self.on_forked()

    def abandon(self, reason: str) -> None:
        self.leave(reason)
        self.process.helper_thread.abandon()
        self.store.close()

    async def aclose(self, reason: str) -> None:
        if self.process.closed is not None:
            return
        self.process.closed = reason
        self.graphs.abandon(RuntimeClosed(reason))
        self.sender.close(reason)
        self.channels.close()
        self.inboxes.close(reason)
        self.connections.close(reason)
        await self.host.aclose(reason)
        await self.process.tasks.aclose()
        # The helper thread may be copying into memory that the store unmaps.
        await self.process.helper_thread.aclose()
        self.store.close()
        self.connections.forget()
        self.actors.clear()


def _unexpected(connection: Connection, message: m.Message) -> None:
    raise RemoteProtocolError(f"{connection.remote} sent an unexpected message of kind {message[0]}")
