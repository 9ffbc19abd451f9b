"""The actors of an app live around the lifespan of the app itself."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from aiodaft.web.asgi import App, Receive, Send

_STARTED: Final = "lifespan.startup.complete"


class Lifespan:
    """The lifespan of a server, between the server and an app, which may have a lifespan of its own.

    The app's begins when `around` has been entered, and ends before `around` is left. Only then is the server told.
    When the app is up, `on_started` is called.
    """

    def __init__(self, receive: Receive, send: Send, on_started: Callable[[], object]) -> None:
        self._receive = receive
        self._send = send
        self._on_started = on_started
        self._received = 0
        self._started = False
        # The app's last message, about its end.
        self._last: Any = None

    async def run(self, app: App, scope: Any, around: AbstractAsyncContextManager[object]) -> None:
        """Run it to its end. Errors are told to the server, which logs them."""
        try:
            async with around:
                await self._run_app(app, scope)
        except Exception:
            if self._started and self._received < 2:
                # It was to go on.
                raise
            if not self._received:
                await self._receive()
            if self._last is None or not self._last["type"].endswith("failed"):
                phase = "shutdown" if self._started else "startup"
                self._last = {"type": f"lifespan.{phase}.failed", "message": traceback.format_exc()}
        await self._send(self._last)

    async def _run_app(self, app: App, scope: Any) -> None:
        try:
            await app(scope, self._give, self._take)
        except Exception:
            if self._received:
                raise
        if not self._received:
            # The app has no lifespan.
            await self._give()
            await self._take({"type": _STARTED})
            await self._give()
            await self._take({"type": "lifespan.shutdown.complete"})

    async def _give(self) -> Any:
        message = await self._receive()
        self._received += 1
        return message

    async def _take(self, message: Any) -> None:
        if message["type"] == _STARTED:
            self._started = True
            self._on_started()
            await self._send(message)
        else:
            self._last = message
