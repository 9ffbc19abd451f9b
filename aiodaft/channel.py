"""Channels: message passing between actors, without the controller."""

from __future__ import annotations

from typing import Any, Generic, Self, TypeVar

from aiodaft._protocol.numbers import is_count
from aiodaft._runtime.channels import Channels
from aiodaft._runtime.process import current_process
from aiodaft._runtime.serialization.containers import builder
from aiodaft._runtime.serialization.pickling import home
from aiodaft.exceptions import ChannelClosed
from aiodaft.ref import Ref

__all__ = ["Channel"]

T = TypeVar("T")


class Channel(Generic[T]):
    """A bounded queue between actors: pass it to the senders and to the receivers.

    Any number may send and receive; each item is received once. Small items travel with the message, tensors and
    other large ones from sender to receiver directly. Items of one sender are received in its order. The channel is
    freed, with its items, when no process holds it any more. For deaths of actors see docs/promises.md.

    Args:
        capacity: Items that may wait in the channel.

    Raises:
        RuntimeClosed: No runtime surrounds the caller.
        ValueError: The capacity is not a positive number.
    """

    __slots__ = ("_port",)

    def __init__(self, capacity: int = 16) -> None:
        if not is_count(capacity):
            raise ValueError(f"a channel has room for a positive number of items, not {capacity!r}")
        self._port = current_process().part(Channels).create(capacity)

    async def send(self, item: T) -> None:
        """Send an item; waits while the channel is full.

        Raises:
            ChannelClosed: The channel is closed.
            SerializationError: The item cannot travel.
            ActorDied, PeerLost: The process that had the channel's queue is gone.

        Cancellation: the item may or may not have been sent.
        """
        await self._port.send(item)

    async def recv(self) -> T:
        """Receive the next item; waits until there is one.

        Raises:
            ChannelClosed: The channel is closed, and everything in it has been received; or it ended because every
                other process has dropped it, and all `Channel` objects of this one have only received.
            ActorDied, PeerLost: The process that had the channel's queue is gone, or that of a large item which is
                lost with it; or a process that may have sent has died, no other that may send holds the channel, and
                the channel is empty.

        Cancellation: no item is lost; the next receiver gets it.
        """
        item: T = await self._port.receive()
        return item

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        try:
            return await self.recv()
        except ChannelClosed:
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        """Close the channel for all processes: no more items can be sent, those in it can be received. Idempotent.

        Returns when that is so. It is no error that the channel is lost.

        Cancellation: the channel may or may not be closed.
        """
        await self._port.endpoint.aclose()

    def __repr__(self) -> str:
        return repr(self._port.endpoint)

    def __reduce__(self) -> tuple[Any, ...]:
        endpoint = self._port.endpoint
        return _rebuild, (endpoint.id, self._port.hand_on(), endpoint.ref)


@builder
def _rebuild(channel_id: Any, keeper: Any, ref: Ref[None]) -> Channel[Any]:
    channel: Channel[Any] = Channel.__new__(Channel)
    channel._port = home().part(Channels).port(channel_id, keeper, ref)
    return channel
