"""Channels: message passing between actors, without the controller."""

from __future__ import annotations

from typing import Any, Generic, Self, TypeVar

from aiodaft._runtime.current import current_peer
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.pickling import home
from aiodaft.exceptions import ChannelClosed

__all__ = ["Channel"]

T = TypeVar("T")


class Channel(Generic[T]):
    """A bounded queue between actors: pass it to those who send and to those who receive.

    Any number may send and receive; each item is received once. Small items travel with the message, tensors and
    other large ones from sender to receiver directly. What one sender sends is received in its order.

    Args:
        capacity: Items that may wait in the channel.

    Raises:
        RuntimeClosed: No runtime surrounds the caller.
    """

    __slots__ = ("_endpoint",)

    def __init__(self, capacity: int = 16) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ValueError(f"a channel has room for a positive number of items, not {capacity!r}")
        self._endpoint = current_peer().channels.create(capacity)

    async def send(self, item: T) -> None:
        """Send an item; waits while the channel is full.

        Raises:
            ChannelClosed: The channel is closed.
            SerializationError: The item cannot travel.

        Cancellation: the item may or may not have been sent.
        """
        await self._endpoint.send(item)

    async def recv(self) -> T:
        """Receive the next item; waits until there is one.

        Raises:
            ChannelClosed: The channel is closed, and everything in it has been received.

        Cancellation: no item is lost.
        """
        item: T = await self._endpoint.receive()
        return item

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        try:
            return await self.recv()
        except ChannelClosed:
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        """Close the channel for everybody: nothing more can be sent, what is in it can be received. Idempotent."""
        await self._endpoint.aclose()

    def __repr__(self) -> str:
        return f"<Channel {self._endpoint.id[1]} of {self._endpoint.id[0]}>"

    def __reduce__(self) -> tuple[Any, ...]:
        endpoint = self._endpoint
        return _rebuild, (endpoint.id, endpoint.capacity, endpoint.host)


def _rebuild(channel_id: Any, capacity: int, host: Any) -> Channel[Any]:
    peer: Peer = home()
    channel: Channel[Any] = Channel.__new__(Channel)
    channel._endpoint = peer.channels.endpoint(channel_id, capacity, host)
    return channel
