"""Channels between processes: carries out what the state machines of `_protocol.channel` decide.

Small items travel with the messages, large ones as refs: from their sender straight to their receiver. Who holds a
channel is counted as with refs, because every `Channel` object holds a ref of its maker.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from aiodaft._protocol.channel import (
    FOR_KEEPERS,
    ChannelId,
    Command,
    Keeper,
    Kind,
    Leaving,
    Message,
    Outcome,
    Settle,
    Tell,
    refusal,
)
from aiodaft._protocol.channel_end import End
from aiodaft._protocol.ids import CHANNELS, CallId, PeerId
from aiodaft._protocol.messages import WANT_NOTHING
from aiodaft._protocol.value import HERE
from aiodaft._runtime.actors.hosted_actor import current_call
from aiodaft._runtime.calls.call import Request, Target, TellState
from aiodaft._runtime.objects.received import ReceivedValue
from aiodaft._runtime.objects.ref_state import RefState, state_of
from aiodaft._runtime.platform.context import current_deadline
from aiodaft._runtime.serialization.encoder import is_plain
from aiodaft._runtime.serialization.errors import add_note
from aiodaft.actor import Actor
from aiodaft.exceptions import ChannelClosed, DaftError
from aiodaft.methods import method, specs_of
from aiodaft.ref import Ref

if TYPE_CHECKING:
    from aiodaft._runtime.connections.connection import Connection
    from aiodaft._runtime.objects.store import Store
    from aiodaft._runtime.peer import Peer


class Parcel:
    """An item that is queued as its ref: it stays with its sender until it is received.

    No dataclass, because refs in those are replaced by their values.
    """

    __slots__ = ("_ref",)

    def __init__(self, ref: Ref[Any]) -> None:
        self._ref = ref

    def __reduce__(self) -> tuple[Any, ...]:
        kept = state_of(self._ref).stored
        if kept is not None and kept.is_inline:
            return Letter, (kept.payload, kept.inline, kept.refs)
        return Parcel, (self._ref,)

    async def open(self, store: Store) -> Any:
        """The item, brought here if it is elsewhere."""
        return await self._ref


class Letter:
    """A small item that came from another process: encoded until it is received."""

    __slots__ = ("_arrived",)

    def __init__(self, payload: bytes, inline: bytes | None, refs: list[Ref[Any]]) -> None:
        self._arrived = ReceivedValue(payload, inline, [], refs)

    def __reduce__(self) -> tuple[Any, ...]:
        arrived = self._arrived
        return Letter, (arrived.payload, arrived.inline, arrived.refs)

    async def open(self, store: Store) -> Any:
        """The item."""
        return await store.decode(self._arrived, refs=self._arrived.refs)


class Token(RefState):
    """What every process holds of a channel, so that its maker knows of all of them."""

    handles = 1
    status = HERE
    value = None

    def __init__(self, channels: Channels, number: CallId) -> None:
        self.objects = objects = channels.peer.objects
        self.process = objects.process
        self.number = number
        self._channels = channels

    @property
    def label(self) -> str:
        return "Channel"

    def handle_dropped(self) -> None:
        self.objects.drop_soon(self)

    def borrow(self, peer: PeerId) -> None:
        super().borrow(peer)
        self._channels.holder_came(self.number, peer)

    def drop_handle(self) -> None:
        super().drop_handle()
        if not self.handles:
            self._channels.holder_left(self.number, self.process.id, Leaving.DROPPED)

    def give_back(self, peer: PeerId) -> None:
        super().give_back(peer)
        if not self.borrowers or peer not in self.borrowers:
            self._channels.holder_left(self.number, peer, Leaving.DROPPED)
        self._look_for_sole_holder()

    def forget(self, peer: PeerId) -> None:
        super().forget(peer)
        self._look_for_sole_holder()

    def free_if_unheld(self) -> None:
        super().free_if_unheld()
        if self.held:
            self._look_for_sole_holder()
        else:
            self._channels.drop(self.number)

    def _look_for_sole_holder(self) -> None:
        if self.handles or self.borrowers is None or len(self.borrowers) != 1:
            return
        (holder,) = self.borrowers
        # A call under way has the channel as an argument: what its callee holds of it is the same handle.
        connection = self._channels.peer.connections.get(holder)
        calls = [] if connection is None else connection.session.calls.values()
        if sum((call.inputs or []).count(self) for call in calls) == self.uses:
            self._channels.tell_alone(self.number, holder)


class NoteState(TellState):
    """A message about a channel; it holds the refs in it while it is under way, and goes also if one has failed."""

    def __init__(self, label: str, body: Any, undelivered: Callable[[], None]) -> None:
        super().__init__(label, own=True)
        self.inputs = []
        self._body = body
        self._undelivered = undelivered

    def on_error(self, error: BaseException) -> None:
        super().on_error(error)
        self._undelivered()


def how_ended(connection: Connection) -> Leaving:
    """What the end of a connection says of the process at its other end."""
    return Leaving.ENDED if connection.dismissed else Leaving.DIED


class Channels(Actor):
    """The channels of one process; every process has this actor, and they send each other messages."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.keepers: dict[ChannelId, Keeper] = {}
        self.ends: dict[ChannelId, End] = {}
        # Values may be decoded in a thread, and bring channels.
        self._lock = threading.Lock()
        # Of the channels that were made here.
        self._tokens: weakref.WeakValueDictionary[CallId, Token] = weakref.WeakValueDictionary()
        self._endpoints: weakref.WeakValueDictionary[ChannelId, Endpoint] = weakref.WeakValueDictionary()
        # Users that wait, by channel and ticket.
        self._waiting: dict[tuple[ChannelId, int], asyncio.Future[Settle]] = {}
        self._note = specs_of(Channels)["note"]

    def create(self, capacity: int) -> Endpoint:
        """A new channel, whose queue is here."""
        number = self.peer.process.next_number()
        channel_id = (self.peer.process.id, number)
        token = self._tokens[number] = Token(self, number)
        self.keepers[channel_id] = Keeper(self.peer.process.id, self.peer.process.id, capacity)
        return self.endpoint(channel_id, self.peer.process.id, Ref(token))

    def endpoint(self, channel_id: ChannelId, keeper: PeerId, token: Ref[None]) -> Endpoint:
        """This process's end of a channel; `keeper` is the process that is thought to have the queue."""
        with self._lock:
            endpoint = self._endpoints.get(channel_id)
            if endpoint is None:
                end = self.ends.setdefault(channel_id, End(keeper))
                endpoint = self._endpoints[channel_id] = Endpoint(self, channel_id, end, token)
                self.peer.process.call_soon(partial(self.register, channel_id))
            return endpoint

    async def wait(self, channel_id: ChannelId, ticket: int, commands: list[Command]) -> Settle:
        """Carry out what begins something, and wait for its outcome."""
        waiting: asyncio.Future[Settle] = self.peer.process.loop.create_future()
        self._waiting[channel_id, ticket] = waiting
        try:
            self.run(channel_id, commands)
            return await waiting
        finally:
            del self._waiting[channel_id, ticket]

    def close(self) -> None:
        """The runtime is closed: nothing will come any more."""
        for (_, ticket), waiting in list(self._waiting.items()):
            if not waiting.done():
                waiting.set_result(Settle(ticket, Outcome.LOST))

    # Who holds a channel.

    def let_go(self, channel_id: ChannelId) -> None:
        """An endpoint is gone."""
        self._forget_if_idle(channel_id)

    def register(self, channel_id: ChannelId) -> None:
        """There is an endpoint; its maker knows, unless that is gone."""
        end, connection = self.ends.get(channel_id), self.peer.connections.get(channel_id[0])
        if end is not None and connection is not None and connection.lost is not None:
            self.run(channel_id, [Tell(end.keeper, Message(Kind.HELD, 0, self.peer.process.id))])

    def holder_came(self, number: CallId, peer: PeerId) -> None:
        """A process holds a channel of this one."""
        channel_id = (self.peer.process.id, number)
        keeper = self.keepers.get(channel_id)
        if keeper is not None:
            self.run(channel_id, keeper.holder_came(peer))

    def holder_left(self, number: CallId, peer: PeerId, how: Leaving) -> None:
        """A process holds a channel of this one no more."""
        channel_id = (self.peer.process.id, number)
        keeper = self.keepers.get(channel_id)
        if keeper is not None:
            self.run(channel_id, keeper.holder_left(peer, how))

    def tell_alone(self, number: CallId, holder: PeerId) -> None:
        """Only that process holds a channel of this one."""
        self.run((self.peer.process.id, number), [Tell(holder, Message(Kind.ALONE))])

    def drop(self, number: CallId) -> None:
        """No process holds a channel of this one."""
        channel_id = (self.peer.process.id, number)
        keeper = self.keepers.pop(channel_id, None)
        if keeper is not None:
            self.run(channel_id, keeper.drop())

    def peer_lost(self, remote: PeerId, how: Leaving) -> None:
        """The connection to a process is gone."""
        for number, token in list(self._tokens.items()):
            if token.borrowers and remote in token.borrowers:
                self.holder_left(number, remote, how)
        for channel_id in list(self.keepers.keys() | self.ends.keys()):
            self.run(channel_id, self._lost(channel_id, remote, how))

    def _lost(self, channel_id: ChannelId, remote: PeerId, how: Leaving) -> list[Command]:
        keeper, end = self.keepers.get(channel_id), self.ends.get(channel_id)
        commands = [] if keeper is None else keeper.peer_lost(remote, how)
        return commands if end is None else [*commands, *end.peer_lost(remote)]

    # Carrying out.

    def run(self, channel_id: ChannelId, commands: list[Command]) -> None:
        """Carry out what a state machine decided, and what follows from that in this process."""
        left = deque(commands)
        while left:
            command = left.popleft()
            if isinstance(command, Settle):
                waiting = self._waiting.get((channel_id, command.ticket))
                if waiting is not None and not waiting.done():
                    waiting.set_result(command)
            elif command.to == self.peer.process.id:
                left.extend(self._handle(channel_id, self.peer.process.id, command.message))
            else:
                left.extend(self._tell(channel_id, command))
        keeper = self.keepers.get(channel_id)
        if keeper is not None and keeper.is_over:
            del self.keepers[channel_id]
        self._forget_if_idle(channel_id)

    def _handle(self, channel_id: ChannelId, sender: PeerId, message: Message) -> list[Command]:
        if message.kind not in FOR_KEEPERS:
            end = self.ends.get(channel_id)
            if end is not None:
                return end.handle(sender, message)
            # A keeper that counts by itself still has this process among those that hold the channel.
            left = Message(Kind.LEFT, 0, (self.peer.process.id, int(Leaving.DROPPED)))
            return [Tell(sender, left)] if message.kind is Kind.COUNTING else []
        if message.kind is Kind.QUEUE:
            self.keepers[channel_id] = Keeper(self.peer.process.id, channel_id[0], message.body.capacity)
        keeper = self.keepers.get(channel_id)
        if keeper is not None:
            return keeper.handle(sender, message)
        refused = refusal(message)
        return [] if refused is None else [Tell(sender, refused)]

    def _tell(self, channel_id: ChannelId, command: Tell) -> list[Command]:
        peer, to, (kind, ticket, body) = self.peer, command.to, command.message
        if peer.process.closed is not None:
            return []
        connection = peer.connections.to(to)
        if connection.lost is not None:
            return self._lost(channel_id, to, how_ended(connection))
        target = Target(peer.caller, to, CHANNELS, f"channels of {to}", None)
        arguments = (*channel_id, int(kind), ticket, body)
        state = NoteState(self._note.label, body, partial(self._undelivered, channel_id, to))
        # What processes tell each other is not subject to the deadline of one who sends or receives.
        token = current_deadline.set(None)
        try:
            peer.sender.submit(
                Request(target, self._note, arguments, {}, peer.process.next_number(), WANT_NOTHING, state)
            )
        finally:
            current_deadline.reset(token)
        return []

    def _undelivered(self, channel_id: ChannelId, to: PeerId) -> None:
        """A process could not take a message, such as a long queue: for this channel it is as good as gone."""
        self.run(channel_id, self._lost(channel_id, to, Leaving.ENDED))

    def _forget_if_idle(self, channel_id: ChannelId) -> None:
        with self._lock:
            end = self.ends.get(channel_id)
            if end is None or not end.is_idle or channel_id in self._endpoints:
                return
            del self.ends[channel_id]
        self.run(channel_id, end.leave(self.peer.process.id))

    @method
    async def note(self, maker: str, number: int, kind: int, ticket: int, body: Any) -> None:
        """Another process says something about a channel."""
        call = current_call.get()
        assert call is not None
        channel_id = (PeerId(maker), CallId(number))
        self.run(channel_id, self._handle(channel_id, call.caller, Message(Kind(kind), ticket, body)))


class Endpoint:
    """One process's end of a channel; shared by all its `Channel` objects there."""

    def __init__(self, channels: Channels, channel_id: ChannelId, end: End, token: Ref[None]) -> None:
        self.id = channel_id
        # Counts this process among those that hold the channel.
        self.token = token
        self._channels = channels
        self._peer = channels.peer
        self._end = end
        # One at a time, in their order.
        self._sending = asyncio.Lock()
        self._receiving = asyncio.Lock()

    def __del__(self) -> None:
        # In any thread.
        self._peer.process.call_soon(partial(self._channels.let_go, self.id))

    def __repr__(self) -> str:
        return f"<Channel {self.id[1]} of {self.id[0]}>"

    def hand_on(self) -> PeerId:
        """The channel travels to another process; the process that has the queue, as far as this one knows."""
        self._end.is_passive = False
        return self._end.keeper

    async def send(self, value: Any) -> None:
        """Send an item; waits while the channel is full."""
        self._check()
        async with self._sending:
            item = value if is_plain(value) else await self._pack(value)
            ticket = self._peer.process.next_number()
            try:
                settled = await self._channels.wait(self.id, ticket, self._end.send(ticket, item))
            except BaseException:
                self._channels.run(self.id, self._end.stop_sending())
                raise
        if settled.outcome is not Outcome.DONE:
            raise await self._error(settled, "nothing can be sent: the channel is closed")

    async def _pack(self, value: Any) -> Parcel:
        ref: Ref[Any] = Ref(self._peer.refs.put(value, "Channel.send"))
        await ref.ready()
        if ref.exception() is not None:
            await ref
        return Parcel(ref)

    async def receive(self) -> Any:
        """The next item; cancelling this loses none."""
        self._check()
        async with self._receiving:
            try:
                settled, received = await self._receive()
            except BaseException:
                self._channels.run(self.id, self._end.stop_receiving())
                raise
            self._end.took()
        if settled.outcome is not Outcome.DONE:
            raise await self._error(settled, "the channel is closed, and everything in it has been received")
        return received.result()

    async def _receive(self) -> tuple[Settle, Received]:
        end, channels = self._end, self._channels
        ticket = self._peer.process.next_number()
        settled = await channels.wait(self.id, ticket, end.receive(ticket))
        received = Received(settled.body)
        if settled.outcome is Outcome.DONE:
            await received.open(self._peer.store)
            settled = await channels.wait(self.id, ticket, end.confirm(ticket))
        return settled, received

    async def aclose(self) -> None:
        """Close the channel: what is in it can still be received."""
        self._check()
        ticket = self._peer.process.next_number()
        await self._channels.wait(self.id, ticket, self._end.close(ticket))
        self._peer.process.check_open("the channel cannot be closed")

    def _check(self) -> None:
        self._peer.process.check_open("the channel cannot be used")
        if asyncio._get_running_loop() is not self._peer.process.loop:
            raise RuntimeError("a channel is used on another event loop than the one its runtime was opened on")

    async def _error(self, settled: Settle, closed: str) -> DaftError:
        self._peer.process.check_open("the channel cannot be used")
        process = settled.body
        if settled.outcome is Outcome.CLOSED:
            return ChannelClosed(closed, executed=False)
        if process is None:
            return ChannelClosed("the channel is gone: its maker has ended, and no process held it any more")
        error = await self._peer.connections.why_lost(
            self._peer.connections.route_to(process), "cannot be reached from here"
        )
        if settled.outcome is Outcome.ORPHANED:
            add_note(error, f"nothing will come through {self}: of the processes that sent, none is left")
        else:
            add_note(error, f"{self} is lost, and what was in it: this process had its queue")
        return error


class Received:
    """What a receive has got: an item, once it is here, or why it cannot be had."""

    def __init__(self, item: Any) -> None:
        self._item = item
        self._error: Exception | None = None

    async def open(self, store: Store) -> None:
        """Bring it here."""
        if isinstance(self._item, Parcel | Letter):
            try:
                self._item = await self._item.open(store)
            except Exception as error:  # noqa: BLE001 - whoever receives the item gets it
                self._error = error

    def result(self) -> Any:
        """The item, or the error."""
        if self._error is not None:
            raise self._error
        return self._item
