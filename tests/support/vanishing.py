"""An actor with values that cannot be fetched after it has granted one; it may be dead by then, or live on."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import AsyncIterator
from typing import Any

from here import current_peer

from aiodaft import Actor, method

SIZE = 1_000_000


class Vanishing(Actor):
    """Its payload goes over tcp."""

    @method
    async def vanish(self, dies: bool) -> None:
        """From now on no stream leads here; it may be killed when a message with a grant is sent."""
        peer = current_peer()
        transport = peer.store.transport
        grant = transport.grant

        def last_grant(block: Any, control: Any) -> Any:
            if dies:
                peer.process.loop.call_soon(os.kill, os.getpid(), signal.SIGKILL)
            return grant(block, control)

        def refuse(remote: str, stream: socket.socket) -> None:
            stream.close()

        # The seams of this test.
        transport.grant = last_grant  # type: ignore[method-assign]
        transport.stream_came = refuse  # type: ignore[method-assign]

    @method
    async def make(self) -> bytes:
        return bytes(SIZE)

    @method
    async def items(self) -> AsyncIterator[bytes]:
        for _ in range(3):
            yield bytes(SIZE)

    @method
    async def take(self, value: bytes) -> int:
        return len(value)
