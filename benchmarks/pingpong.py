"""The floor of graphs: two asyncio processes pass a few bytes to and fro through shared memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from aiodaft._runtime.connections.ring_poller import RingPair, RingPoller, offer_rings, take_rings

from .floors import serving
from .results import seconds_of_one


class _Side:
    """One end of a pair of rings."""

    def __init__(self, ring: RingPair, on_data: Callable[[bytes], object]) -> None:
        self._ring = ring
        self._poller = RingPoller(asyncio.get_running_loop())
        self.on_data = on_data
        self._poller.add(ring, self)

    def ring_readable(self) -> None:
        self.on_data(self._ring.reader.read(4096))

    def ring_writable(self) -> None:
        """It never is full."""

    def send(self, data: bytes) -> None:
        self._poller.look()
        self._ring.writer.write(data)

    def close(self) -> None:
        self._poller.remove(self._ring)
        self._ring.close()


async def serve(*fds: str) -> None:
    """Send back all data; a message that ends with a full stop is the last."""
    memory, ours, theirs = map(int, fds)
    over = asyncio.Event()

    def answer(data: bytes) -> None:
        if data.endswith(b"."):
            over.set()
        side.send(data)

    side = _Side(take_rings(memory, ours, theirs), answer)
    os.close(memory)
    await over.wait()


class PingPong(_Side):
    """The side that begins."""

    async def call(self, data: bytes = b"ping") -> None:
        """One round trip."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.on_data = answer.set_result
        self.send(data)
        await answer

    async def round_trip(self, count: int) -> float:
        """Seconds that a round trip takes."""
        return await seconds_of_one(self.call, count)


@asynccontextmanager
async def open_pingpong() -> AsyncGenerator[PingPong, None]:
    """Another process at the end of a pair of rings."""
    ring, fds = offer_rings()
    async with serving("pingpong", *fds):
        os.close(fds[0])
        side = PingPong(ring, bytes)
        try:
            yield side
        finally:
            await side.call(b".")
            side.close()
