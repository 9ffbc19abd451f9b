"""An actor in a process with its helper thread, or its loop, held up: its work is caught in the middle."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from typing import Any

from here import current_peer

from aiodaft import Actor, method
from aiodaft._runtime.peer import Peer

# More than is copied without the helper thread; and more than travels inside a message.
LARGE = 2 << 20
MEDIUM = 100_000


class Helper:
    """The helper thread of a process, held up for a while."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._gate = threading.Event()
        self._held = peer.process.helper_thread.begin(self._gate.wait)

    @property
    def waiting(self) -> int:
        """Jobs that wait for it, once it has taken up the one that holds it."""
        return self._peer.process.helper_thread.backlog

    async def let_go(self) -> None:
        """Returns once all that waited is done."""
        self._gate.set()
        await self._held
        await self._peer.process.helper_thread.run(lambda: None)


def in_use(peer: Peer) -> int:
    """Blocks of a process that are in use."""
    return sum(transport.arena.live_blocks() for transport in peer.store.transports.values())  # type: ignore[attr-defined]


class Warden(Actor):
    """Holds up the process of another actor, in which it is, and looks at it."""

    @method
    async def hold_helper(self) -> None:
        self._helper = Helper(current_peer())

    @method
    async def wait_packing(self) -> None:
        """Wait until something waits to be packed."""
        while self._helper.waiting != 1:
            await asyncio.sleep(0)

    @method
    async def let_helper_go(self) -> None:
        await self._helper.let_go()

    @method
    async def hold_loop(self, fifo: str) -> None:
        """After the answer to this, the loop turns no more until the test writes to a fifo."""
        current_peer().process.loop.call_soon(lambda: os.close(os.open(fifo, os.O_RDONLY)))

    @method
    async def in_use(self) -> int:
        return in_use(current_peer())


class Packer(Actor):
    """Makes and takes large values."""

    def __init__(self) -> None:
        self._gate = asyncio.Event()
        self._thread_gate = threading.Event()

    @method
    async def make(self) -> bytes:
        return bytes(LARGE)

    @method
    async def items(self) -> AsyncIterator[bytes]:
        for _ in range(3):
            yield bytes(LARGE)

    @method
    async def take(self, value: Any) -> int:
        return len(value)

    @method(ordered=False)
    async def take_at_last(self, value: Any) -> int:
        await self._gate.wait()
        return len(value)

    @method(ordered=False)
    async def open_gate(self) -> None:
        self._gate.set()
        self._thread_gate.set()

    @method
    def make_at_last(self, value: Any) -> bytes:
        self._thread_gate.wait(20)
        return bytes(LARGE)
