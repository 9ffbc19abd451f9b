"""A server that counts words: `uvicorn app:app`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import aiodaft
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel

from actors import Reader, Totals


class Text(BaseModel):
    """What a client sends."""

    text: str


def open_runtime() -> aiodaft.Runtime:
    """The runtime of the server. An error that no code sees is logged, and does not end the server."""
    return aiodaft.Runtime(unhandled="log")


def make_app(runtime: Callable[[], aiodaft.Runtime] = open_runtime) -> FastAPI:
    """The application; tests give it another runtime."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        async with runtime() as rt:
            # An actor that dies is made again; its calls wait for that.
            placed = rt.on(restart=aiodaft.Restart(follow=True))
            app.state.readers = await placed.group(2, Reader)
            app.state.totals = await placed.spawn(Totals)
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/texts")
    async def add(request: Request, body: Text) -> dict[str, int]:
        readers, totals = request.app.state.readers, request.app.state.totals
        try:
            # The calls are cancelled if the client leaves.
            async with aiodaft.cancel_on_disconnect(request):
                return {"words": await totals.add(readers.any(Reader.count, body.text))}
        except aiodaft.Overloaded as error:
            raise HTTPException(503, "too many requests") from error

    @app.get("/words")
    async def words(request: Request, number: int = 10) -> dict[str, int]:
        return dict(await request.app.state.totals.most_common(number))

    return app


app = make_app()
