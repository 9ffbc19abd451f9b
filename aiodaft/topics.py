"""Topics: each message goes to all that subscribe. (Of the receivers of a `Channel`, one gets each item.)"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from aiodaft._protocol.numbers import is_count
from aiodaft.actor import Actor
from aiodaft.methods import method

__all__ = ["Topic"]


class Topic(Actor):
    """An actor that hands messages on: `topic = await rt.get_or_create("news", Topic)`.

    All subscribers get the messages in the same order, from the time on at which they subscribe.

    Args:
        room: The messages that may wait for a subscriber; while one has no room, publishers wait.

    Raises:
        ValueError: `room` is no positive whole number.
    """

    def __init__(self, room: int = 64) -> None:
        if not is_count(room):
            raise ValueError(f"a topic has room for a positive number of messages, not {room!r:.80}")
        self._room = room
        self._waiting: set[asyncio.Queue[Any]] = set()

    @method(concurrency=1)
    async def publish(self, message: Any, /) -> int:
        """Hand a message to all subscribers. Returns their number.

        Cancellation: some subscribers may have it.
        """
        waiting = list(self._waiting)
        for queue in waiting:
            await queue.put(message)
        return len(waiting)

    @method
    async def subscribe(self) -> AsyncGenerator[Any, None]:
        """The messages, until the stream is left, or its process ends."""
        queue = asyncio.Queue[Any](self._room)
        self._waiting.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._waiting.discard(queue)
            # A publisher may wait for room.
            while not queue.empty():
                queue.get_nowait()
