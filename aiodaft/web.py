"""Web servers: cancel the work for a client that disconnects."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, Protocol

from aiodaft._runtime.platform.tasks import TaskOwner, shield_from_anyio
from aiodaft.exceptions import DaftError

__all__ = ["ClientDisconnected", "cancel_on_disconnect"]


class ClientDisconnected(DaftError):
    """The client left before it was answered; the work for it was cancelled."""


@cache
def _answered_by_starlette(http_exception: type[Exception]) -> type[ClientDisconnected]:
    """The error as an HTTPException, which Starlette and FastAPI answer; other errors they log with a traceback."""
    # nginx's status for clients that left. The answer goes nowhere.
    answer = {"status_code": 499, "detail": "the client left", "headers": None, "__init__": Exception.__init__}
    return type("ClientDisconnected", (ClientDisconnected, http_exception), answer)


def _client_disconnected() -> ClientDisconnected:
    starlette = sys.modules.get("starlette.exceptions")
    cls = ClientDisconnected if starlette is None else _answered_by_starlette(starlette.HTTPException)
    return cls("the client left")


class Receiver(Protocol):
    """A request with ASGI's `receive`, such as Starlette's and FastAPI's."""

    @property
    def receive(self) -> Callable[[], Awaitable[Any]]:
        """Gives the next ASGI message."""
        ...


@asynccontextmanager
async def cancel_on_disconnect(request: Receiver) -> AsyncGenerator[None, None]:
    """Cancel the block when the client of a request disconnects; remote calls awaited in it are cancelled as well.

    Use it after the request's body has been read: it consumes the messages that follow.

    Args:
        request: A Starlette or FastAPI request.

    Raises:
        ClientDisconnected: The client left. Starlette and FastAPI handle the error: it counts as status 499 and is not
            logged as an error of the application.
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
                # If the body ended before the cancellation reached it, the cancellation arrives here.
                await asyncio.sleep(0)
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise _client_disconnected() from None
        raise
