"""Requests to the application, with actors in this process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx
import uvicorn
from aiodaft.testing import in_process
from fastapi import FastAPI

from app import make_app


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncGenerator[httpx.AsyncClient, None]:
    """A client of the application, which a server runs."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        async with asyncio.TaskGroup() as tasks, httpx.AsyncClient(base_url=url) as client:
            tasks.create_task(server.serve(sockets=[listening]))
            try:
                yield client
            finally:
                server.should_exit = True


async def test_texts_are_counted() -> None:
    async with serving(make_app(lambda: in_process(unhandled="log"))) as client:
        assert (await client.post("/texts", json={"text": "a b a"})).json() == {"words": 2}
        assert (await client.post("/texts", json={"text": "c"})).json() == {"words": 3}
        assert (await client.get("/words", params={"number": 1})).json() == {"a": 2}
        assert (await client.post("/texts", json={})).status_code == 422
