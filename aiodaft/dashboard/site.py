"""The page, its files, and its stream of looks."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final, NamedTuple

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aiodaft.dashboard.feed import Feed
from aiodaft.exceptions import RuntimeClosed

_PAGE: Final = Path(__file__).parent / "page"
# Seconds after which a stream ends; the browser opens the next one. A server that ends waits for its streams.
_STREAM: Final = 3.0
# Names and logs come from anywhere: nothing but the files of the page is run or loaded, and no other site is told.
_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def make_site(feed: Feed) -> Starlette:
    async def events(request: Request) -> StreamingResponse:  # noqa: RUF029 - Starlette runs others in threads
        looks = _looks(feed, _Place.read(request.headers.get("last-event-id", "")))
        return StreamingResponse(looks, media_type="text/event-stream")

    return Starlette(
        routes=[
            Route("/events", events),
            Mount("/", StaticFiles(directory=_PAGE, html=True)),
        ],
        middleware=[Middleware(_Guarded)],
    )


class _Place(NamedTuple):
    runtime: str = ""
    look: int = 0
    line: int = -1

    @classmethod
    def read(cls, text: str) -> _Place:
        """The position that a page sends; the beginning if that makes no sense."""
        found = re.fullmatch(r"(\S+) (\d{1,15}) (-?\d{1,15})", text)
        return cls() if found is None else cls(found[1], int(found[2]), int(found[3]))


async def _looks(feed: Feed, place: _Place) -> AsyncGenerator[str]:
    until = asyncio.get_running_loop().time() + _STREAM
    yield "retry: 100\n\n"
    while asyncio.get_running_loop().time() < until:
        try:
            number, frame = await feed.newer(place.look)
        except RuntimeClosed:
            yield "event: closed\ndata: {}\n\n"
            return
        last, lines = feed.lines(place.line if place.runtime == frame["runtime"] else -1)
        place = _Place(frame["runtime"], number, last)
        yield f"id: {' '.join(map(str, place))}\ndata: {_json({**frame, 'lines': lines})}\n\n"


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


class _Guarded:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    *((name.encode(), value.encode()) for name, value in _HEADERS.items()),
                ]
            await send(message)

        await self._app(scope, receive, guarded)
