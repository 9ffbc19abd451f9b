"""The part of ASGI that is used here. Each framework has types of its own for it: `Any` fits all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

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
