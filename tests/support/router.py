"""An inference router as users write it: FastAPI owns the loop, the runtime lives in its lifespan."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from fastapi.responses import StreamingResponse

import aiodaft
from aiodaft import Actor, Group, Stream, method


class LLM(Actor, gpus=1):
    """Answers, endlessly if asked to, and tells how its calls ended."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @method
    async def generate(self, prompt: str) -> str:
        self.events.append(f"{prompt} began")
        try:
            if prompt == "forever":
                await asyncio.Event().wait()
            if prompt == "too long":
                raise ValueError(f"{prompt!r} is too long")
            return prompt.upper()
        finally:
            self.events.append(f"{prompt} ended")

    @method
    async def tokens(self, prompt: str) -> AsyncIterator[str]:
        self.events.append(f"{prompt} began")
        try:
            for word in prompt.split():
                yield word
            while prompt == "forever":
                await asyncio.sleep(0)
                yield "and on" * 1000
        finally:
            self.events.append(f"{prompt} ended")

    @method
    async def history(self) -> list[str]:
        return self.events


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
