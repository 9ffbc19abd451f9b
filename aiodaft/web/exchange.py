"""One HTTP request and its response."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from aiodaft._runtime.platform.tasks import TaskOwner
from aiodaft.web.disconnect import DISCONNECT, Receive, Send, lasting_requests


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
        # The number of the app's tasks that wait for the server.
        self._receiving = 0
        # The tasks of the app, other than its first, that wait for a message.
        self._listeners: set[asyncio.Task[Any]] = set()
        # Since when the app waits for more of the body.
        self._asked: float | None = None
        # The future of the app's first task when another one was told that the client has left.
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

    # Calls of the app.

    def send(self, message: Any) -> Awaitable[None]:
        """As the server's."""
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

    # While others wait for its place.

    def stalled_for(self, now: float) -> float:
        return 0.0 if self._asked is None else now - self._asked

    def give_up(self) -> None:
        """End it as if the client had left, which has not sent its body."""
        self.given_up = True
        listeners = list(self._listeners)
        self._client_left({"type": DISCONNECT})
        for task in listeners:
            task.cancel()

    # While the app does something else.

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
            # To be looked at after a whole round.
            self._requests.discard(self)
            self._requests.add(self)
        else:
            self._cancel()

    def _cancel(self) -> None:
        # Servers tell of a disconnect also after the response.
        if not (self._complete or self._cancelled):
            self._cancelled = True
            self._task.cancel()
