"""Cancels the work for a client that disconnects."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import cache
from types import TracebackType
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

from aiodaft._runtime.platform.tasks import TaskOwner
from aiodaft.exceptions import DaftError

App = Callable[[Any, Any, Any], Awaitable[None]]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

DISCONNECT: Final = "http.disconnect"


async def answer(send: Send, status: int, text: str, *headers: tuple[bytes, bytes]) -> None:
    await answer_with(send, status, text.encode(), b"text/plain; charset=utf-8", *headers)


async def answer_with(send: Send, status: int, body: bytes, kind: bytes, *headers: tuple[bytes, bytes]) -> None:
    described = [
        (b"content-type", kind),
        (b"content-length", str(len(body)).encode()),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": described})
    await send({"type": "http.response.body", "body": body})


# The requests under way on one loop: the clients of those that last are watched.
#
# To watch a client takes a task, which is as much work as a short request. A request that ends within one round costs
# two entries in a set.

# Seconds: a client is watched one or two rounds after its request has begun.
_ROUND: Final = 0.02

_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, LastingRequests] = WeakKeyDictionary()


class Watched(Protocol):
    def watch(self, tasks: TaskOwner) -> bool:
        """Begin to watch the client; False if it is watched by others for now."""
        ...


class LastingRequests:
    """Has the clients of requests watched that are still under way after a round."""

    def __init__(self) -> None:
        self._tasks = TaskOwner("aiodaft web")
        self._new: set[Watched] = set()
        self._old: set[Watched] = set()
        self._goes_round = False

    def add(self, request: Watched) -> None:
        self._new.add(request)
        if not self._goes_round:
            self._goes_round = True
            asyncio.get_running_loop().call_later(_ROUND, self._go_round)

    def discard(self, request: Watched) -> None:
        self._new.discard(request)
        self._old.discard(request)

    def _go_round(self) -> None:
        lasting, self._old, self._new = self._old, self._new, set()
        self._new.update(request for request in lasting if not request.watch(self._tasks))
        self._goes_round = bool(self._old or self._new)
        if self._goes_round:
            asyncio.get_running_loop().call_later(_ROUND, self._go_round)


def lasting_requests() -> LastingRequests:
    loop = asyncio.get_running_loop()
    found = _of_loops.get(loop)
    if found is None:
        found = _of_loops[loop] = LastingRequests()
    return found


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
    """A request with ASGI's `receive`, such as those of Starlette, FastAPI and Litestar."""

    @property
    def receive(self) -> Receive: ...


def cancel_on_disconnect(request: Receiver) -> AbstractAsyncContextManager[None, None]:
    """Cancel the block when the client of a request disconnects; remote calls awaited in it are cancelled as well.

    Use it after the request's body has been read: it consumes the messages that follow. It costs nearly nothing if the
    block ends within 20 ms. `Ingress` does the same for whole apps.

    Args:
        request: A request of Starlette, FastAPI or Litestar.

    Raises:
        ClientDisconnected: The client left. Starlette and FastAPI handle the error: it counts as status 499 and is not
            logged as an error of the application.
    """
    return _Block(request)


class _Block(AbstractAsyncContextManager[None, None]):
    def __init__(self, request: Receiver) -> None:
        self._request = request
        self._gone = False
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._requests = lasting_requests()
        self._requests.add(self)

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._requests.discard(self)
        if self._watcher is not None:
            self._watcher.cancel()
        if self._gone and self._task.uncancel() == 0 and isinstance(error, asyncio.CancelledError):
            raise _client_disconnected() from None

    def watch(self, tasks: TaskOwner) -> bool:
        self._watcher = tasks.start_ahead(self._watch(), name="watch for a disconnect")
        return True

    async def _watch(self) -> None:
        while (await self._request.receive())["type"] != DISCONNECT:
            pass
        self._gone = True
        self._task.cancel()
