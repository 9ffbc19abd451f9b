"""Apps of several frameworks behind an ingress, on a real server of this process: a client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import framework_apps
import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from litestar import Litestar, get
from litestar.response import ServerSentEvent
from starlette.applications import Starlette
from starlette.routing import Route
from web_server import serving
from web_servers import web_server

from aiodaft.web import Ingress, cancel_on_disconnect


class Work:
    """Work that does not end by itself."""

    def __init__(self) -> None:
        self.began, self.cancelled = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def stream(self) -> AsyncIterator[str]:
        yield "first\n"
        await self()
        yield "last\n"


Make = Callable[[Work], Any]


def fastapi(work: Work) -> FastAPI:
    app = FastAPI()

    @app.get("/plain")
    async def plain() -> None:
        await work()

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(work.stream())

    @app.get("/block")
    async def block(request: Request) -> None:
        async with cancel_on_disconnect(request):
            await work()

    @app.get("/asks")
    async def asks(request: Request) -> None:
        work.began.set()
        try:
            while not await request.is_disconnected():
                await asyncio.sleep(0.001)
        finally:
            work.cancelled.set()

    return app


async def pass_on(request: Request, call_next: Callable[[Request], Awaitable[Any]]) -> Any:
    return await call_next(request)


def with_ingress(work: Work) -> Any:
    app = fastapi(work)
    app.add_middleware(Ingress, limit=10)
    return app


def between_middlewares(work: Work) -> Any:
    """Such middlewares run the inner app in a task of their own."""
    app = fastapi(work)
    app.middleware("http")(pass_on)
    app.add_middleware(Ingress, limit=10)
    app.middleware("http")(pass_on)
    return app


def wrapped(work: Work) -> Any:
    return Ingress(fastapi(work), limit=10)


def twice(work: Work) -> Any:
    return Ingress(with_ingress(work), limit=10)


def of_litestar(work: Work) -> Any:
    @get("/plain")
    async def plain() -> None:
        await work()

    @get("/stream")
    async def stream() -> ServerSentEvent:
        return ServerSentEvent(work.stream())

    return Ingress(Litestar([plain, stream], logging_config=None), limit=10)


def of_starlette(work: Work) -> Any:
    async def plain(request: Request) -> None:
        await work()

    async def stream(request: Request) -> StreamingResponse:
        return StreamingResponse(work.stream())

    return Ingress(Starlette(routes=[Route("/plain", plain), Route("/stream", stream)]), limit=10)


def bare(work: Work) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        if scope["path"] == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first\n", "more_body": True})
        await work()

    return Ingress(app, limit=10)


async def leave(client: httpx.AsyncClient, path: str, work: Work) -> None:
    if path == "/stream":
        async with client.stream("GET", path) as answer:
            assert await anext(answer.aiter_bytes())
            await work.began.wait()
    else:
        request = asyncio.get_running_loop().create_task(client.get(path))
        await work.began.wait()
        request.cancel()
        await asyncio.wait([request])
    await work.cancelled.wait()


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (with_ingress, "/plain"),
        (with_ingress, "/stream"),
        (with_ingress, "/block"),
        (with_ingress, "/asks"),
        (between_middlewares, "/plain"),
        (between_middlewares, "/stream"),
        (wrapped, "/plain"),
        (wrapped, "/stream"),
        (twice, "/plain"),
        (twice, "/stream"),
        (twice, "/block"),
        (of_litestar, "/plain"),
        (of_litestar, "/stream"),
        (of_starlette, "/plain"),
        (of_starlette, "/stream"),
        (bare, "/plain"),
        (bare, "/stream"),
        (fastapi, "/block"),
    ],
)
async def test_a_client_that_leaves_cancels_the_work_and_nothing_is_logged(
    make: Make, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    work = Work()
    async with serving(make(work), lifespan="auto") as url, httpx.AsyncClient(base_url=url, timeout=None) as client:
        await leave(client, path, work)
    # The server has waited for its tasks.
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.programs
@pytest.mark.parametrize("framework", framework_apps.MAKERS)
@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_a_server_of_its_own_notices_clients_that_leave_and_stops_at_once(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(framework)
    async with web_server("uvicorn", tmp_path, f"framework_apps:{framework}") as server:
        for path in ("plain", "stream"):
            # Of one place, so that the second begins when the first one has ended.
            async with server.client() as client:
                request = asyncio.get_running_loop().create_task(client.get(path))
                await server.logs(f"{path} began")
                request.cancel()
                await asyncio.wait([request])
        await server.logs("stream ended")
    # In this order; and nothing that is left holds the server up, or is logged.
    work = [line for line in server.lines if line.endswith((" began", " ended"))]
    assert work == ["plain began", "plain ended", "stream began", "stream ended"]
    assert not any(sign in line for line in server.lines for sign in ("Traceback", "ERROR", "Exception")), server.lines
