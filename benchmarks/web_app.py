"""`python -m benchmarks.web_app NAME FD`: serve one of the apps that `web` compares on a socket that listens."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Final

import uvicorn
from fastapi import FastAPI, Request

from aiodaft.actor import Actor
from aiodaft.methods import method
from aiodaft.runtime import Runtime
from aiodaft.web import Ingress


class Model(Actor):
    """Answers at once."""

    @method
    async def answer(self, number: int) -> dict[str, int]:
        """The answer to a request."""
        return {"answer": number}


@asynccontextmanager
async def actors(rt: Runtime) -> AsyncGenerator[dict[str, Model]]:
    """The state of the apps with actors."""
    yield {"model": await rt.spawn(Model)}


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[dict[str, Model]]:
    """Opens a runtime, without the other services of `Ingress`."""
    async with Runtime() as rt, actors(rt) as state:
        yield state


class LocalModel:
    """Answers in the next turn of the server's loop."""

    async def answer(self, number: int) -> dict[str, int]:
        await asyncio.sleep(0)
        return {"answer": number}


@asynccontextmanager
async def without_actors(app: FastAPI) -> AsyncGenerator[dict[str, LocalModel]]:
    """The state of the app whose own coroutine answers."""
    yield {"model": LocalModel()}


def _calling(app: FastAPI) -> FastAPI:
    @app.get("/")
    async def answer(request: Request) -> dict[str, int]:
        model: Model | LocalModel = request.state.model
        return await model.answer(1)

    return app


def local() -> FastAPI:
    """A coroutine of the server answers."""
    return _calling(FastAPI(lifespan=without_actors))


def routed() -> FastAPI:
    """An actor answers."""
    return _calling(FastAPI(lifespan=lifespan))


def ingress() -> FastAPI:
    """An actor answers, behind `aiodaft.web.Ingress`: clients that leave are noticed, and there is admission."""
    app = _calling(FastAPI())
    app.add_middleware(Ingress, actors=actors, limit=256, queue=256)
    return app


APPS: Final[dict[str, Callable[[], FastAPI]]] = {"local": local, "routed": routed, "ingress": ingress}


def main(name: str, descriptor: str) -> None:
    """Serve until SIGTERM."""
    server = uvicorn.Server(uvicorn.Config(APPS[name](), loop="uvloop", log_level="warning"))
    server.run(sockets=[socket.socket(fileno=int(descriptor))])


if __name__ == "__main__":
    main(*sys.argv[1:])
