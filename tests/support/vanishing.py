"""An actor with values that cannot be fetched after it has granted one; it may be dead by then, or live on."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from typing import Any

from here import current_peer

from aiodaft import Actor, method

SIZE = 1_000_000
# A port that needs privileges.
_NO_LISTENER = 1


class Vanishing(Actor):
    """Its payload goes over tcp."""

    @method
    async def vanish(self, dies: bool) -> None:
        """From now on grants lead to a port without a listener; it may be killed when a message with one is sent."""
        peer = current_peer()
        transport = peer.store.transport
        grant = transport.grant

        def last_grant(block: Any, control: Any) -> Any:
            if dies:
                peer.process.loop.call_soon(os.kill, os.getpid(), signal.SIGKILL)
            interface, _, *rest = grant(block, control)
            return (interface, _NO_LISTENER, *rest)

        transport.grant = last_grant  # type: ignore[method-assign]  # the seam of this test

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
