"""A server that counts words: `uvicorn app:app`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import aiodaft
from fastapi import FastAPI, Request
from pydantic import BaseModel

from actors import Reader, Totals


class Text(BaseModel):
    """The body of a request."""

    text: str


def open_runtime() -> aiodaft.Runtime:
    """The runtime of the server. An error that no code sees is logged, and does not end the server."""
    return aiodaft.Runtime(unhandled="log")


@asynccontextmanager
async def make_actors(rt: aiodaft.Runtime) -> AsyncGenerator[dict[str, object], None]:
    """The `state` of requests."""
    # An actor that dies is made again, however often; its calls wait for that.
    placed = rt.on(restart=aiodaft.Restart(intensity=None))
    yield {"readers": await placed.group(2, Reader), "totals": await placed.spawn(Totals)}


def make_app(runtime: Callable[[], aiodaft.Runtime] = open_runtime) -> FastAPI:
    """The application; tests give it another runtime."""
    app = FastAPI()
    # Cancels the calls for clients that leave; beyond 64 requests under way and 256 that wait, answers 503.
    app.add_middleware(aiodaft.web.Ingress, actors=make_actors, runtime=runtime, limit=64, queue=256)

    @app.post("/texts")
    async def add(request: Request, body: Text) -> dict[str, int]:
        counted = request.state.readers.any(Reader.count, body.text)
        return {"words": await request.state.totals.add(counted)}

    @app.get("/words")
    async def words(request: Request, number: int = 10) -> dict[str, int]:
        return dict(await request.state.totals.most_common(number))

    return app


app = make_app()
