"""Channels between processes: carries out the commands of the state machines in `_protocol.channels.channel_end`.

Small items travel with the messages. Large items travel as refs, from their sender straight to their receiver. Holders
of a channel are counted as holders of a ref: every `Channel` object holds a ref that the channel's maker owns.

    user -> Port -> Endpoint -> End ------- Message -------> Keeper    One `Channels` actor per process passes the
            (per user)  (one per process)                  (the queue)   messages between its `ChannelTable` and others.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from aiodaft._protocol.channels.channel import ChannelId, Command, Kind, Leaving, Message, Outcome, Settle, Tell
from aiodaft._protocol.channels.channel_end import ChannelTable, End
from aiodaft._protocol.connections.messages import WANT_NOTHING
from aiodaft._protocol.ids import CHANNELS, CallId, PeerId
from aiodaft._protocol.objects.value import HERE
from aiodaft._runtime.actors.hosted_actor import current_call, serving
from aiodaft._runtime.calls.call import Caller, Request, Target, TellState
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.objects.ref_state import RefState, state_of
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.platform.tasks import under
from aiodaft._runtime.serialization.containers import builder
from aiodaft._runtime.serialization.decoder import ReceivedValue
from aiodaft._runtime.serialization.encoder import is_plain
from aiodaft._runtime.serialization.errors import add_note
from aiodaft.actor import Actor
from aiodaft.exceptions import ChannelClosed, DaftError
from aiodaft.methods import method, specs_of
from aiodaft.ref import Ref

# Sends of one process to one channel that are under way: a send waits for its answer, but not for those before it.
_SENDS: Final = 16


@builder
class QueuedItem:
    """An item that needs encoding. A large one stays with its sender until it is received.

    Not a dataclass: the encoder replaces refs in dataclasses by their values.
    """

    __slots__ = ("_source",)

    def __init__(self, source: Ref[Any] | ReceivedValue) -> None:
        self._source = source

    def __reduce__(self) -> tuple[Any, ...]:
        source = self._source
        if isinstance(source, ReceivedValue):
            return _small_item, (source.payload, source.inline, source.refs)
        stored = state_of(source).stored
        if stored is not None and stored.is_inline:
            return _small_item, (stored.payload, stored.inline, stored.refs)
        return QueuedItem, (source,)

    async def open(self, store: Store) -> Any:
        source = self._source
        return await (source if isinstance(source, Ref) else store.decode(source, refs=source.refs))


@builder
def _small_item(payload: bytes, inline: bytes | None, refs: list[Ref[Any]]) -> QueuedItem:
    return QueuedItem(ReceivedValue(payload, inline, [], refs))


class ChannelRef(RefState):
    """The state of the ref that every holder of a channel has; reports holders that come and leave to the keeper."""

    handles = 1
    status = HERE
    value = None

    def __init__(self, channels: Channels, number: CallId) -> None:
        self.objects = channels.objects
        self.process = channels.process
        self.number = number
        self._id = (self.process.id, number)
        self._channels = channels
        self._table = channels.table

    @property
    def label(self) -> str:
        return "Channel"

    def handle_dropped(self) -> None:
        self.objects.drop_soon(self)

    def borrow(self, peer: PeerId) -> None:
        super().borrow(peer)
        self._channels.run(self._id, self._table.holder_came(self._id, peer))

    def drop_handle(self) -> None:
        super().drop_handle()
        if not self.handles:
            self.holder_left(self.process.id, Leaving.DROPPED)

    def give_back(self, peer: PeerId) -> None:
        super().give_back(peer)
        if not self.borrowers or peer not in self.borrowers:
            self.holder_left(peer, Leaving.DROPPED)
        self._look_for_sole_holder()

    def forget(self, peer: PeerId) -> None:
        super().forget(peer)
        self._look_for_sole_holder()

    def free_if_unheld(self) -> None:
        super().free_if_unheld()
        if self.held:
            self._look_for_sole_holder()
        else:
            self._channels.run(self._id, self._table.drop(self._id))

    def holder_left(self, peer: PeerId, how: Leaving) -> None:
        self._channels.run(self._id, self._table.holder_left(self._id, peer, how))

    def _look_for_sole_holder(self) -> None:
        if self.handles or self.borrowers is None or len(self.borrowers) != 1:
            return
        (holder,) = self.borrowers
        # The callee of a call under way with the channel as an argument counts once, as a borrower.
        connection = self._channels.connections.get(holder)
        calls = [] if connection is None else connection.session.calls.values()
        if sum((call.inputs or []).count(self) for call in calls) == self.uses:
            self._channels.run(self._id, [Tell(holder, Message(Kind.ALONE))])


class MessageState(TellState):
    """A message about a channel. It holds its refs while it is under way, and is sent even if a ref has failed."""

    def __init__(self, label: str, body: Any, undelivered: Callable[[], None]) -> None:
        super().__init__(label, own=True)
        self.inputs = []
        self._body = body
        self._undelivered = undelivered

    def on_error(self, error: BaseException) -> None:
        super().on_error(error)
        self._undelivered()


def leaving_of(connection: Connection) -> Leaving:
    return Leaving.ENDED if connection.dismissed else Leaving.DIED


class Channels(Actor):
    def __init__(self, caller: Caller) -> None:
        self.process = caller.process
        self.connections = caller.connections
        self.objects = caller.objects
        self._caller = caller
        self.table = ChannelTable(self.process.id)
        # Threads decode values too, and these may contain channels.
        self._lock = threading.Lock()
        # The refs of the channels that were made here.
        self._refs: weakref.WeakValueDictionary[CallId, ChannelRef] = weakref.WeakValueDictionary()
        self._endpoints: weakref.WeakValueDictionary[ChannelId, Endpoint] = weakref.WeakValueDictionary()
        # Waiting users, by channel and ticket.
        self._waiting: dict[tuple[ChannelId, int], asyncio.Future[Settle]] = {}
        self._spec = specs_of(Channels)["message"]

    def create(self, capacity: int) -> Port:
        number, here = self.process.next_number(), self.process.id
        state = self._refs[number] = ChannelRef(self, number)
        self.table.create((here, number), capacity)
        return self.port((here, number), here, Ref(state))

    def port(self, channel_id: ChannelId, keeper: PeerId, ref: Ref[None]) -> Port:
        """A further user's port of a channel. `keeper` is the process that probably has the queue."""
        with self._lock:
            endpoint = self._endpoints.get(channel_id)
            if endpoint is None:
                end = self.table.ends.setdefault(channel_id, End(keeper))
                endpoint = self._endpoints[channel_id] = Endpoint(self, channel_id, end, ref)
                self.process.call_soon(partial(self._register, channel_id))
            self.process.call_soon(partial(self.users_changed, channel_id, 0))
            # Now: the process that handed the channel on may cease to hold it before the loop's next turn.
            endpoint.end.senders += 1
            return Port(endpoint)

    def users_changed(self, channel_id: ChannelId, more: int) -> None:
        end = self.table.ends.get(channel_id)
        if end is not None:
            with self._lock:
                end.senders += more
            self.run(channel_id, end.say_whether_it_may_send())

    async def wait(self, channel_id: ChannelId, ticket: int, commands: list[Command]) -> Settle:
        """Carry out the commands that begin an operation, and wait for its outcome."""
        waiting: asyncio.Future[Settle] = self.process.loop.create_future()
        self._waiting[channel_id, ticket] = waiting
        try:
            self.run(channel_id, commands)
            return await waiting
        finally:
            del self._waiting[channel_id, ticket]

    def close(self) -> None:
        for (_, ticket), waiting in list(self._waiting.items()):
            if not waiting.done():
                waiting.set_result(Settle(ticket, Outcome.LOST))

    def _register(self, channel_id: ChannelId) -> None:
        """Register as a holder with the keeper if the maker, which counts the holders, is gone."""
        connection = self.connections.get(channel_id[0])
        if connection is not None and connection.lost is not None:
            self.run(channel_id, self.table.register(channel_id))

    def peer_lost(self, remote: PeerId, how: Leaving) -> None:
        for state in list(self._refs.values()):
            if state.borrowers and remote in state.borrowers:
                state.holder_left(remote, how)
        for channel_id in list(self.table.keepers.keys() | self.table.ends.keys()):
            self.run(channel_id, self.table.peer_lost(channel_id, remote, how))

    def forget_if_unheld(self, channel_id: ChannelId) -> None:
        with self._lock:
            commands = [] if channel_id in self._endpoints else self.table.leave(channel_id)
        if commands:
            self.run(channel_id, commands)

    def run(self, channel_id: ChannelId, commands: list[Command]) -> None:
        left = deque(self.table.run(channel_id, commands))
        while left:
            command = left.popleft()
            if isinstance(command, Tell):
                how = self._send(channel_id, command)
                if how is not None:
                    lost = self.table.peer_lost(channel_id, command.to, how)
                    left.extend(self.table.run(channel_id, lost))
            elif (waiting := self._waiting.get((channel_id, command.ticket))) is not None and not waiting.done():
                waiting.set_result(command)
        self.forget_if_unheld(channel_id)

    def _send(self, channel_id: ChannelId, command: Tell) -> Leaving | None:
        """Send a message. If the process is gone, returns how it ended."""
        to, (kind, ticket, body) = command
        if self.process.closed is not None:
            return None
        connection = self.connections.to(to)
        if connection.lost is not None:
            return leaving_of(connection)
        target = Target(self._caller, to, CHANNELS, f"channels of {to}", None)
        arguments = (*channel_id, int(kind), ticket, body)
        state = MessageState(self._spec.label, body, partial(self._undelivered, channel_id, to))
        request = Request(target, self._spec, arguments, {}, self.process.next_number(), WANT_NOTHING, state)
        # The deadline of a sender or receiver does not apply to messages between processes.
        with under(None):
            self._caller.sender.submit(request)
        return None

    def _undelivered(self, channel_id: ChannelId, to: PeerId) -> None:
        """Treat a process as lost for this channel: it could not take a message, such as a long queue."""
        self.run(channel_id, self.table.peer_lost(channel_id, to, Leaving.ENDED))

    @method
    async def message(self, maker: str, number: int, kind: int, ticket: int, body: Any) -> None:
        channel_id = (PeerId(maker), CallId(number))
        self.run(channel_id, self.table.handle(channel_id, serving().caller, Message(Kind(kind), ticket, body)))


class Port:
    """One user's access to its process's end of a channel; every `Channel` object has one.

    A user may send unless it has received and not sent; see `End`.
    """

    __slots__ = ("_has_sent", "_may_send", "endpoint")

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._may_send = True
        self._has_sent = False

    def __del__(self) -> None:
        # Any thread may run this.
        if self._may_send:
            endpoint = self.endpoint
            endpoint.process.call_soon(partial(endpoint.users_changed, -1))

    def hand_on(self) -> PeerId:
        """Note that the channel travels to another process. Returns the process that probably has the queue."""
        end = self.endpoint.end
        end.was_handed_on = True
        return end.keeper

    async def send(self, value: Any) -> None:
        self.endpoint.check()
        self._has_sent = True
        self._is_a_sender(True)
        await self.endpoint.send(value)

    async def receive(self) -> Any:
        self.endpoint.check()
        call = current_call.get()
        # A caller in this process has the same object, and may send.
        is_shared = call is not None and call.caller == self.endpoint.process.id
        if not (self._has_sent or is_shared):
            self._is_a_sender(False)
        return await self.endpoint.receive()

    def _is_a_sender(self, may_send: bool) -> None:
        if self._may_send != may_send:
            self._may_send = may_send
            self.endpoint.users_changed(1 if may_send else -1)


class Endpoint:
    """One process's end of a channel, shared by its users there."""

    def __init__(self, channels: Channels, channel_id: ChannelId, end: End, ref: Ref[None]) -> None:
        self.id = channel_id
        # Makes this process a holder of the channel.
        self.ref = ref
        self._channels = channels
        self.process = channels.process
        self.end = end
        # Some sends and one receive at a time, in the order in which they began.
        self._sending = asyncio.Semaphore(_SENDS)
        self._packing = asyncio.Lock()
        self._receiving = asyncio.Lock()

    def __del__(self) -> None:
        # Any thread may run this.
        self.process.call_soon(partial(self._channels.forget_if_unheld, self.id))

    def __repr__(self) -> str:
        return f"<Channel {self.id[1]} of {self.id[0]}>"

    def users_changed(self, more: int) -> None:
        self._channels.users_changed(self.id, more)

    async def send(self, value: Any) -> None:
        async with self._sending:
            async with self._packing:
                item = value if is_plain(value) else await self._pack(value)
            # At once: the next one has to wait for a turn of the loop.
            ticket = self.process.next_number()
            try:
                settled = await self._channels.wait(self.id, ticket, self.end.send(ticket, item))
            except BaseException:
                self._channels.run(self.id, self.end.stop_sending(ticket))
                raise
        if settled.outcome is not Outcome.DONE:
            raise await self._error(settled, "nothing can be sent: the channel is closed")

    async def _pack(self, value: Any) -> QueuedItem:
        ref: Ref[Any] = Ref(self._channels.objects.refs.put(value, "Channel.send"))
        await ref.ready()
        if ref.exception() is not None:
            await ref
        return QueuedItem(ref)

    async def receive(self) -> Any:
        """Receive the next item. Cancellation: no item is lost."""
        end, channels = self.end, self._channels
        error: Exception | None = None
        async with self._receiving:
            ticket = self.process.next_number()
            try:
                settled = await channels.wait(self.id, ticket, end.receive(ticket))
                item = settled.body
                if settled.outcome is Outcome.DONE:
                    if isinstance(item, QueuedItem):
                        try:
                            item = await item.open(channels.objects.store)
                        except Exception as failed:  # noqa: BLE001 - raised when the item is this process's
                            error = failed
                    settled = await channels.wait(self.id, ticket, end.confirm(ticket))
            except BaseException:
                channels.run(self.id, end.stop_receiving())
                raise
            end.took()
        if settled.outcome is not Outcome.DONE:
            raise await self._error(settled, "the channel is closed, and everything in it has been received")
        if error is not None:
            raise error
        return item

    async def aclose(self) -> None:
        """Close the channel; its items can still be received."""
        self.check()
        ticket = self.process.next_number()
        await self._channels.wait(self.id, ticket, self.end.close(ticket))
        self.process.check_open("the channel cannot be closed")

    def check(self) -> None:
        self.process.check_open("the channel cannot be used")
        if asyncio._get_running_loop() is not self.process.loop:
            raise RuntimeError("a channel is used on another event loop than the one its runtime was opened on")

    async def _error(self, settled: Settle, closed: str) -> DaftError:
        self.process.check_open("the channel cannot be used")
        process = settled.body
        if settled.outcome is Outcome.CLOSED:
            return ChannelClosed(closed, executed=False)
        if process is None:
            return ChannelClosed("the channel is gone: its maker has ended, and no process held it any more")
        connections = self._channels.connections
        error = await connections.why_lost(connections.route_to(process), "cannot be reached from here")
        if settled.outcome is Outcome.ORPHANED:
            add_note(error, f"no item will come through {self}: every process that sent has ended")
        else:
            add_note(error, f"{self} is lost with its items: this process had its queue")
        return error
