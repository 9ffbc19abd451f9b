"""For web servers: work for a client ends when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from aiodaft._runtime.tasks import TaskOwner, shield_from_anyio
from aiodaft.exceptions import DaftError

__all__ = ["ClientDisconnected", "cancel_on_disconnect"]


class ClientDisconnected(DaftError):
    """The client left before it was answered; what was done for it was cancelled."""


class Receiver(Protocol):
    """What is needed of a request: ASGI's `receive`, as Starlette's and FastAPI's requests have it."""

    @property
    def receive(self) -> Callable[[], Awaitable[Any]]:
        """Gives the next ASGI message."""
        ...


@asynccontextmanager
async def cancel_on_disconnect(request: Receiver) -> AsyncGenerator[None, None]:
    """Cancel the block when the client of a request disconnects; remote calls awaited in it are cancelled as well.

    Use it where the request's body has been read already: it takes the messages that follow.

    Args:
        request: A Starlette or FastAPI request.

    Raises:
        ClientDisconnected: The client left. Nobody will read an answer, so there is nothing to handle.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                gone = True
                task.cancel()
                return

    watchers = TaskOwner("aiodaft web")
    watchers.create_task(watch(), name="watch for a disconnect")
    try:
        try:
            yield
        finally:
            with shield_from_anyio():
                await watchers.aclose()
            if gone:
                # Where the body ended before the cancellation reached it, it arrives here.
                await asyncio.sleep(0)
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise ClientDisconnected("the client left") from None
        raise
