"""Channels: bounded queues between processes. Small items travel with the message, large ones producer to consumer.

A channel's queue starts in the process that made the channel. The first other process that receives takes it over,
so that items go straight from sender to receiver; senders that still come to the old place are told where to go.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from aiodaft._protocol.ids import CallId, PeerId
from aiodaft.actor import Actor
from aiodaft.exceptions import ChannelClosed, RuntimeClosed
from aiodaft.methods import method
from aiodaft.ref import Ref

from .callers import is_plain
from .incoming import current_call

if TYPE_CHECKING:
    from .peer import Peer

ChannelId: TypeAlias = tuple[PeerId, CallId]


class Parcel:  # noqa: B903 - mutable, and made often
    """An item that is queued as its ref: a large one, or one that its sender could change after sending it.

    No dataclass, because refs in those are replaced by their values.
    """

    __slots__ = ("ref",)

    def __init__(self, ref: Ref[Any]) -> None:
        self.ref = ref


@dataclass(frozen=True, slots=True)
class Moved:
    """The queue is in another process."""

    to: PeerId


@dataclass(frozen=True, slots=True)
class Handover:
    """The queue is yours now, with what is in it."""

    items: tuple[Any, ...]
    closed: bool


class Queue:
    """The items of one channel, in the process that has it."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.items: deque[Any] = deque()
        self.closed = False
        self.moved_to: PeerId | None = None
        # Once somebody has received here, the queue stays.
        self.received = False
        self._changed = asyncio.Event()

    async def put(self, item: Any) -> Moved | None:
        """Add an item once there is room.

        Raises:
            ChannelClosed: The channel is closed.
        """
        while self.moved_to is None and not self.closed and len(self.items) >= self._capacity:
            await self._wait()
        if self.moved_to is not None:
            return Moved(self.moved_to)
        if self.closed:
            raise ChannelClosed("nothing can be sent: the channel is closed")
        self.items.append(item)
        self._notify()
        return None

    async def take(self) -> Any:
        """Take the next item once there is one.

        Raises:
            ChannelClosed: The channel is closed and empty.
        """
        self.received = True
        while self.moved_to is None and not self.items and not self.closed:
            await self._wait()
        if self.moved_to is not None:
            return Moved(self.moved_to)
        if not self.items:
            raise ChannelClosed("the channel is closed, and everything in it has been received")
        item = self.items.popleft()
        self._notify()
        return item

    def close(self) -> None:
        """Take no more items."""
        self.closed = True
        self._notify()

    def hand_over(self, to: PeerId) -> Handover:
        """Give everything away."""
        handover = Handover(tuple(self.items), self.closed)
        self.items.clear()
        self.moved_to = to
        self._notify()
        return handover

    def _notify(self) -> None:
        # Whoever waits looks again; a new event for those who find they have to go on waiting.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _wait(self) -> None:
        await self._changed.wait()


class Channels(Actor):
    """The channels of one process; every process has this actor, and they call each other."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._queues: dict[ChannelId, Queue] = {}
        # Queues that may be on their way here: senders can be sent here before the queue has arrived.
        self.coming: dict[ChannelId, asyncio.Event] = {}
        self._endpoints: weakref.WeakValueDictionary[ChannelId, Endpoint] = weakref.WeakValueDictionary()

    def create(self, capacity: int) -> Endpoint:
        """A new channel, whose queue is here."""
        channel_id = (self._peer.id, self._peer.next_number())
        self._queues[channel_id] = Queue(capacity)
        return self.endpoint(channel_id, capacity, self._peer.id)

    def endpoint(self, channel_id: ChannelId, capacity: int, host: PeerId) -> Endpoint:
        """This process's end of a channel."""
        endpoint = self._endpoints.get(channel_id)
        if endpoint is None:
            endpoint = self._endpoints[channel_id] = Endpoint(self._peer, self, channel_id, capacity, host)
        return endpoint

    def queue(self, channel_id: ChannelId) -> Queue:
        """A queue that is here.

        Raises:
            ChannelClosed: It is not here any more, because it was closed and emptied.
        """
        try:
            return self._queues[channel_id]
        except KeyError:
            raise ChannelClosed("the channel is closed") from None

    def take_over(self, channel_id: ChannelId, capacity: int, handover: Handover) -> None:
        """The queue is here from now on."""
        queue = self._queues[channel_id] = Queue(capacity)
        queue.items.extend(handover.items)
        queue.closed = handover.closed

    def forget_if_over(self, channel_id: ChannelId) -> None:
        """Free a queue that is closed and empty."""
        queue = self._queues.get(channel_id)
        if queue is not None and queue.closed and not queue.items:
            del self._queues[channel_id]
            if channel_id[0] != self._peer.id:
                # Where it was made, senders are still told where it went.
                self._peer.channels_of(channel_id[0]).forget.tell(channel_id)

    async def _wait_coming(self, channel_id: tuple[str, int]) -> None:
        coming = self.coming.get(_as_id(channel_id))
        if coming is not None:
            await coming.wait()

    @method
    async def put(self, channel_id: tuple[str, int], item: Any) -> Moved | None:
        """Add an item to a queue of this process."""
        await self._wait_coming(channel_id)
        return await self.queue(_as_id(channel_id)).put(item)

    @method
    async def take(self, channel_id: tuple[str, int]) -> Any:
        """The next item of a queue of this process; the queue itself, for the first who comes."""
        call = current_call.get()
        assert call is not None
        await self._wait_coming(channel_id)
        queue = self.queue(_as_id(channel_id))
        if not queue.received and queue.moved_to is None and call.caller != self._peer.id:
            return queue.hand_over(call.caller)
        item = await queue.take()
        self.forget_if_over(_as_id(channel_id))
        return item

    @method
    async def forget(self, channel_id: tuple[str, int]) -> None:
        """A queue that went away from here is closed and empty."""
        self._queues.pop(_as_id(channel_id), None)

    @method
    async def close(self, channel_id: tuple[str, int]) -> Moved | None:
        """Close a queue of this process."""
        await self._wait_coming(channel_id)
        queue = self._queues.get(_as_id(channel_id))
        if queue is not None and queue.moved_to is not None:
            return Moved(queue.moved_to)
        if queue is not None:
            queue.close()
            self.forget_if_over(_as_id(channel_id))
        return None


class Endpoint:
    """One process's end of a channel."""

    def __init__(self, peer: Peer, local: Channels, channel_id: ChannelId, capacity: int, host: PeerId) -> None:
        self._peer = peer
        self._local = local
        self.id = channel_id
        self.capacity = capacity
        self.host = host
        self._receiving = asyncio.Lock()
        # A receive that was cancelled goes on until the item is here, where that waits for the next one.
        self._taking: asyncio.Task[Any] | None = None

    async def send(self, value: Any) -> None:
        """Send an item; waits while the channel is full."""
        self._peer.check_open("the channel cannot be used")
        state = self._peer.refs.put(value, "Channel.send")
        ref: Ref[Any] = Ref(state)
        await ref.ready()
        if state.error is not None:
            await ref
        small = state.kept is not None and state.kept.is_inline
        while True:
            if self.host == self._peer.id:
                # A receiver elsewhere is to see what was sent, whatever becomes of the object here.
                moved = await self._local.queue(self.id).put(value if is_plain(value) else Parcel(ref))
            else:
                moved = await self._remote().put(self.id, ref if small else Parcel(ref))
            if moved is None:
                return
            self.host = moved.to

    async def receive(self) -> Any:
        """The next item; cancelling this loses none."""
        async with self._receiving:
            self._peer.check_open("the channel cannot be used")
            if self._taking is None:
                self._taking = self._peer.tasks.start_ahead(self._receive(), name="receive")
            await asyncio.wait([self._taking])
            taken, self._taking = self._taking, None
        if taken.cancelled():
            # Its owner, this process's peer, was closed.
            raise RuntimeClosed(f"nothing can be received: {self._peer.closed}")
        return taken.result()

    async def _receive(self) -> Any:
        item = await self._take()
        return await item.ref if isinstance(item, Parcel) else item

    async def _take(self) -> Any:
        while True:
            if self.host == self._peer.id:
                item = await self._local.queue(self.id).take()
                self._local.forget_if_over(self.id)
            else:
                coming = self._local.coming[self.id] = asyncio.Event()
                try:
                    item = await self._remote().take(self.id)
                    if isinstance(item, Handover):
                        self._local.take_over(self.id, self.capacity, item)
                        self.host = self._peer.id
                        continue
                finally:
                    del self._local.coming[self.id]
                    coming.set()
            if not isinstance(item, Moved):
                return item
            self.host = item.to

    async def aclose(self) -> None:
        """Close the channel: what is in it can still be received."""
        self._peer.check_open("the channel cannot be used")
        while True:
            if self.host == self._peer.id:
                moved = await self._local_close()
            else:
                moved = await self._remote().close(self.id)
            if moved is None:
                return
            self.host = moved.to

    async def _local_close(self) -> Moved | None:
        handle: Channels = self._peer.channels_of(self._peer.id)
        return await handle.close(self.id)

    def _remote(self) -> Channels:
        return self._peer.channels_of(self.host)


def _as_id(channel_id: tuple[str, int]) -> ChannelId:
    peer, number = channel_id
    return PeerId(peer), CallId(number)
