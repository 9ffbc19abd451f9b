"""An app as users write it, for any ASGI server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

import aiodaft
from aiodaft import web


class Model(aiodaft.Actor):
    """Answers, endlessly if asked to, and tells how its calls ended."""

    def __init__(self) -> None:
        self._events: list[str] = []
        self._changed = asyncio.Event()

    async def _until(self, event: str) -> None:
        while event not in self._events:
            self._changed.clear()
            await self._changed.wait()

    def _note(self, event: str) -> None:
        self._events.append(event)
        self._changed.set()

    async def _run(self, prompt: str) -> None:
        self._note(f"{prompt} began")
        try:
            if prompt.startswith("hold"):
                await self._until(f"{prompt.split()[0]} released")
        finally:
            self._note(f"{prompt} ended")

    @aiodaft.method
    async def generate(self, prompt: str) -> str:
        await self._run(prompt)
        return prompt.upper()

    @aiodaft.method
    async def tokens(self, prompt: str) -> AsyncIterator[str]:
        yield prompt
        await self._run(prompt)
        yield "end"

    @aiodaft.method(concurrency=1)
    async def one_slot(self, prompt: str) -> str:
        await self._run(prompt)
        return prompt.upper()

    @aiodaft.method(concurrency=1, max_queue=1)
    async def narrow(self) -> None:
        await self._run("hold-narrow")

    @aiodaft.method(ordered=False)
    async def release(self, prompt: str) -> None:
        """Let the calls go on that have begun, and will begin, with this word."""
        self._note(f"{prompt} released")

    @aiodaft.method(ordered=False)
    async def until(self, event: str) -> None:
        """Wait until something has happened."""
        await self._until(event)


@asynccontextmanager
async def actors(rt: aiodaft.Runtime) -> AsyncGenerator[dict[str, object], None]:
    """One model."""
    model = await rt.spawn(Model)
    print("the model is up", flush=True)
    try:
        yield {"model": model, "pid": (await rt.info(model)).pid}
    finally:
        print("the model still answers:", await model.generate("last"), flush=True)


@asynccontextmanager
async def own_lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
    """The app's own lifespan."""
    print("the app begins", flush=True)
    try:
        yield
    finally:
        print("the app ends", flush=True)


def model_of(request: Request) -> Model:
    """The model that `actors` made."""
    model: Model = request.state.model
    return model


async def sse(tokens: aiodaft.Stream[str]) -> AsyncIterator[str]:
    """Server-sent events."""
    async for token in tokens:
        yield f"data: {token}\n\n"


app = FastAPI(lifespan=own_lifespan)
limited = FastAPI()


@limited.get("/generate")
@app.get("/generate")
async def generate(request: Request, prompt: str) -> str:
    return await model_of(request).generate(prompt)


@app.get("/block")
async def block(request: Request, prompt: str) -> str:
    async with web.cancel_on_disconnect(request):
        return await model_of(request).generate(prompt)


@app.post("/upload")
async def upload(request: Request) -> str:
    return await model_of(request).generate((await request.body()).decode())


@app.get("/stream")
async def stream(request: Request, prompt: str) -> StreamingResponse:
    return StreamingResponse(sse(model_of(request).tokens(prompt)), media_type="text/event-stream")


@app.get("/slot")
async def slot(request: Request, prompt: str) -> str:
    return await model_of(request).one_slot(prompt)


@app.get("/narrow")
async def narrow(request: Request) -> None:
    await model_of(request).narrow()


@app.get("/release")
async def release(request: Request, prompt: str) -> None:
    await model_of(request).release(prompt)


@app.get("/until")
async def until(request: Request, event: str) -> None:
    await model_of(request).until(event)


@app.get("/pid")
async def pid(request: Request) -> int:
    number: int = request.state.pid
    return number


app.mount("/limited", web.Ingress(limited, limit=2, queue=3))
app.add_middleware(
    web.Ingress,
    actors=actors,
    probes=web.Probes(metrics="/metrics", patience=0.3),
    runtime=lambda: aiodaft.Runtime(unhandled="log", preload=(), stop_grace=1),
)
