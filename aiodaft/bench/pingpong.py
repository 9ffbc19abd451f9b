"""The floor of graphs: two asyncio processes pass a few bytes to and fro through shared memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

from aiodaft._runtime.connections.ring_poller import RingPoller
from aiodaft._runtime.connections.shm_ring import RingPair, offer_rings, take_rings

from .floors import serving
from .results import seconds_of_one

_MESSAGE: Final = b"ping"


class _Server:
    """Sends back what comes; what ends with a full stop is the last."""

    def __init__(self, ring: RingPair, waiter: RingPoller) -> None:
        self._ring = ring
        self._waiter = waiter
        self.over = asyncio.Event()

    def ring_readable(self) -> None:
        data = self._ring.reader.read(4096)
        if data.endswith(b"."):
            self.over.set()
        self._waiter.look()
        self._ring.writer.write(data)

    def ring_writable(self) -> None:
        """It never is full."""


async def serve(memory: int, ours: int, theirs: int) -> None:
    """Be the other side."""
    ring, waiter = take_rings(memory, ours, theirs), RingPoller(asyncio.get_running_loop())
    os.close(memory)
    server = _Server(ring, waiter)
    waiter.add(ring, server)
    await server.over.wait()


class PingPong:
    """This side."""

    def __init__(self, ring: RingPair) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self.waiter = RingPoller(self._loop)
        self._answer: asyncio.Future[bytes] = self._loop.create_future()
        self.waiter.add(ring, self)

    def ring_readable(self) -> None:
        """An answer came."""
        self._answer.set_result(self._ring.reader.read(4096))

    def ring_writable(self) -> None:
        """It never is full."""

    async def call(self, data: bytes = _MESSAGE) -> None:
        """One round trip."""
        answer = self._answer = self._loop.create_future()
        self.waiter.look()
        self._ring.writer.write(data)
        await answer

    async def round_trip(self, count: int) -> float:
        """Seconds that a round trip takes."""
        return await seconds_of_one(self.call, count)


@asynccontextmanager
async def open_pingpong() -> AsyncGenerator[PingPong, None]:
    """Another process at the end of a pair of rings."""
    ring, fds = offer_rings()
    process = subprocess.Popen(serving("pingpong", *fds), pass_fds=fds)  # noqa: ASYNC220 - a bench
    os.close(fds[0])
    side = PingPong(ring)
    try:
        yield side
    finally:
        await side.call(b".")
        side.waiter.remove(ring)
        ring.close()
        process.wait()
