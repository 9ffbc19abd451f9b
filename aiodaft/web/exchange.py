"""One HTTP request and its response."""

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

_ROUND: Final = 0.02

_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, LastingRequests] = WeakKeyDictionary()


class Watched(Protocol):
    def watch(self, tasks: TaskOwner) -> bool:
        """False if the client is watched by others for now."""
        ...


class LastingRequests:
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
    """A request of Starlette, FastAPI or Litestar, say, with ASGI's `receive`."""

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


class Exchange:
    """Stands between a server and an app for one request: cancels the app's task when the client leaves.

    The app calls `receive` and `send` in place of the server's. A message that comes while the client is watched is
    kept until the app asks for it. An app that listens for the disconnect in another task, as Quart and Django do, ends
    its work by itself, which a cancellation of its first task would leave running: this is cancelled only if it still
    waits for the same thing a round later.

    Attributes:
        started: Whether the app has begun to answer.
        given_up: Whether it was given up because its client has not sent its body.
    """

    __slots__ = (
        "_asked", "_body_came", "_cancelled", "_complete", "_disconnect", "_kept", "_listeners", "_news", "_receive",
        "_receiving", "_requests", "_send", "_task", "_waited_for", "_watcher", "given_up", "started",
    )  # fmt: skip
    _news: asyncio.Event

    def __init__(self, receive: Receive, send: Send, task: asyncio.Task[Any]) -> None:
        self._receive = receive
        self._send = send
        self._task = task
        self.started = self._complete = self._cancelled = self._body_came = self.given_up = False
        self._receiving = 0
        self._listeners: set[asyncio.Task[Any]] = set()
        self._asked: float | None = None
        # Of the app's first task, when another one was told that the client has left.
        self._waited_for: asyncio.Future[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._kept: Any = None
        # Some servers give it only once.
        self._disconnect: Any = None
        self._requests = lasting_requests()
        self._requests.add(self)

    def end(self) -> bool:
        """The app has ended; whether it was cancelled for its client, and for nothing else."""
        self._requests.discard(self)
        if self._watcher is not None:
            self._watcher.cancel()
        return self._cancelled and self._task.uncancel() == 0

    def send(self, message: Any) -> Awaitable[None]:
        match message["type"]:
            case "http.response.body":
                self._complete = not message.get("more_body", False)
            case "http.response.start":
                self.started = True
            case "http.response.pathsend":
                self._complete = True
        return self._send(message)

    async def receive(self) -> Any:
        """As the server's. May be called again after a cancellation."""
        task = asyncio.current_task()
        if task is not None and task is not self._task:
            self._listeners.add(task)
        if not self._body_came:
            self._asked = asyncio.get_running_loop().time()
        try:
            while self._watcher is not None and self._kept is None:
                self._news.clear()
                await self._news.wait()
            if self._kept is not None:
                message, self._kept = self._kept, None
                self._body_came = not message.get("more_body", False)
                return message
            if self._disconnect is not None:
                return self._disconnect
            self._receiving += 1
            try:
                message = await self._receive()
            finally:
                self._receiving -= 1
            if message["type"] == DISCONNECT:
                self._client_left(message)
                # A cancellation of this task arrives here. For the message, frameworks raise an error, and log it.
                await asyncio.sleep(0)
            self._body_came = not message.get("more_body", False)
            return message
        finally:
            self._asked = None
            self._listeners.discard(task)

    def stalled_for(self, now: float) -> float:
        return 0.0 if self._asked is None else now - self._asked

    def give_up(self) -> None:
        """End it as if the client had left, which has not sent its body."""
        self.given_up = True
        listeners = list(self._listeners)
        self._client_left({"type": DISCONNECT})
        for task in listeners:
            task.cancel()

    def watch(self, tasks: TaskOwner) -> bool:
        if self._waited_for is not None and self._task._fut_waiter is self._waited_for:  # type: ignore[attr-defined]  # of every task
            self._cancel()
        if self._complete or self._disconnect is not None:
            return True
        if self._receiving or self._kept is not None:
            return False
        self._news = asyncio.Event()
        self._watcher = tasks.start_ahead(self._watch(), name="watch for a disconnect")
        return True

    async def _watch(self) -> None:
        try:
            while (message := await self._receive())["type"] != DISCONNECT:
                self._kept = message
                self._news.set()
                if message.get("more_body", False):
                    # Of a body, one piece is kept, so that the server holds back its client.
                    self._requests.add(self)
                    return
            self._client_left(message)
        finally:
            self._watcher = None
            self._news.set()

    def _client_left(self, message: Any) -> None:
        self._disconnect = message
        if self._listeners:
            self._waited_for = self._task._fut_waiter  # type: ignore[attr-defined]  # of every task
            self._requests.discard(self)
            self._requests.add(self)
        else:
            self._cancel()

    def _cancel(self) -> None:
        # Servers tell of a disconnect also after the response.
        if not (self._complete or self._cancelled):
            self._cancelled = True
            self._task.cancel()
