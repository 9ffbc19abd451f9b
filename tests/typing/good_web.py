"""Valid web apps: every line type-checks in mypy --strict, pyright (strict), pyrefly and ty."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi import Request as FastAPIRequest
from litestar import Litestar, get
from litestar import Request as LitestarRequest
from litestar.middleware import DefineMiddleware
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as StarletteRequest
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

import aiodaft
from aiodaft import Ref, Runtime, web


class Model(aiodaft.Actor):
    @aiodaft.method
    async def generate(self, prompt: str) -> str:
        return prompt.upper()


@asynccontextmanager
async def actors(rt: Runtime) -> AsyncGenerator[dict[str, object], None]:
    yield {"model": await rt.spawn(Model)}


def answer(model: Model, prompt: str) -> Ref[str]:
    return model.generate(prompt)


# A function that returns in the block returns: the block swallows no error.


async def in_fastapi(request: FastAPIRequest, prompt: str) -> str:
    async with aiodaft.web.cancel_on_disconnect(request):
        return await answer(request.state.model, prompt)


async def in_starlette(request: StarletteRequest) -> PlainTextResponse:
    async with web.cancel_on_disconnect(request):
        return PlainTextResponse(await answer(request.state.model, request.query_params["prompt"]))


@get("/generate")
async def in_litestar(request: LitestarRequest[Any, Any, Any], prompt: str) -> str:
    async with web.cancel_on_disconnect(request):
        return await answer(request.state.model, prompt)


fastapi_app = FastAPI()
fastapi_app.add_middleware(web.Ingress, actors=actors, limit=64, queue=256)
fastapi_app.mount("/limited", web.Ingress(FastAPI(), limit=2))

starlette_app = Starlette(
    routes=[Route("/generate", in_starlette), Mount("/limited", web.Ingress(Starlette(), limit=2))],
    middleware=[Middleware(web.Ingress, actors=actors, runtime=lambda: Runtime(unhandled="log", gpus=2))],
)

litestar_app = web.Ingress(Litestar([in_litestar]), actors=actors, probes=web.Probes(health=None, patience=0.5))
Litestar([in_litestar], middleware=[DefineMiddleware(web.Ingress, limit=2)])


def serve() -> None:
    uvicorn.run(fastapi_app)
    uvicorn.run(litestar_app)
