"""The server's side of ASGI, by hand."""

from __future__ import annotations

import asyncio
from typing import Any


class FakeServer:
    """Gives an app the messages that a test puts, and keeps those of the app."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._changed = asyncio.Event()
        self.sent: list[dict[str, Any]] = []

    def put(self, kind: str, **fields: Any) -> None:
        self._messages.put_nowait({"type": kind, **fields})

    @property
    def unread(self) -> int:
        return self._messages.qsize()

    async def receive(self) -> dict[str, Any]:
        return await self._messages.get()

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        self._changed.set()

    async def has_sent(self, kind: str) -> None:
        while kind not in self.kinds:
            self._changed.clear()
            await self._changed.wait()

    @property
    def kinds(self) -> list[str]:
        return [message["type"] for message in self.sent]
