"""An inference router as users write it: FastAPI owns the loop, the runtime lives in its lifespan."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from fastapi.responses import StreamingResponse
from llm import LLM

import aiodaft
from aiodaft import Group, Stream


def models(request: Request) -> Group[LLM]:
    """The models that the lifespan made."""
    group: Group[LLM] = request.app.state.models
    return group


Models = Annotated[Group[LLM], Depends(models)]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
    """A runtime with two models for as long as the app is up: one bad request or dead model does not end it."""
    async with aiodaft.Runtime(gpus=8, preload=(), unhandled="log") as rt:
        app.state.rt = rt
        app.state.models = await rt.on(gpus=1).group(2, LLM)
        yield


async def sse(tokens: Stream[str]) -> AsyncIterator[str]:
    """Server-sent events."""
    async for token in tokens:
        yield f"data: {token}\n\n"


def make_app() -> FastAPI:
    """A router that is not started."""
    app = FastAPI(lifespan=lifespan)

    @app.get("/generate")
    async def generate(prompt: str, request: Request, llm: Models) -> str:
        async with aiodaft.web.cancel_on_disconnect(request):
            return await llm.any(LLM.generate, prompt)

    @app.get("/warm")
    async def warm(prompt: str, llm: Models) -> str:
        # Nothing awaits the answer: if it is an error, that is logged.
        llm.any(LLM.generate, prompt)
        return "begun"

    @app.get("/stream")
    async def stream(prompt: str, llm: Models) -> StreamingResponse:
        return StreamingResponse(sse(llm.any(LLM.tokens, prompt)), media_type="text/event-stream")

    return app
