"""OpenAI's completions in front of the router of `serve_disagg.py`, and the state of its engines."""

import asyncio
import codecs
import json
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

from fastapi import APIRouter, Body, HTTPException, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from serve_engine import Counts
from serve_model import CONTEXT
from serve_policies import Prompt
from serve_router import Router

api = APIRouter()


class Completion(BaseModel):
    """The part of OpenAI's request that is served. The user is the tenant."""

    model_config = ConfigDict(extra="forbid")

    prompt: str = Field(min_length=1)
    max_tokens: int = Field(16, ge=1)
    stream: bool = False
    user: str = ""
    model: str = ""
    temperature: Literal[0] = 0


class Events(StreamingResponse):
    """Server-sent events. The tokens end with the response, also if the client leaves."""

    def __init__(self, tokens: AsyncGenerator[int], events: AsyncGenerator[str]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.tokens, self.events = tokens, events

    async def __call__(self, *asgi: Any) -> None:
        async with aclosing(self.tokens), aclosing(self.events):
            await super().__call__(*asgi)


@api.post("/v1/completions", response_model=None)
async def complete(request: Request, asked: Completion) -> dict[str, Any] | Events:
    prompt, router = asked.prompt.encode(), router_of(request)
    if len(prompt) + asked.max_tokens > CONTEXT:
        raise HTTPException(400, f"{len(prompt)} bytes and max_tokens={asked.max_tokens} are more than {CONTEXT}")
    tokens = router.complete(Prompt(prompt, asked.max_tokens, asked.user))
    about = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": asked.model}
    if asked.stream:
        # An error before the first token has a status: 503 if too many prompts wait.
        first = await anext(tokens)
        return Events(tokens, events(about, first, tokens))
    async with aclosing(tokens):
        completed = bytes([token async for token in tokens])
    counts = {"prompt_tokens": len(prompt), "completion_tokens": len(completed)}
    usage = {**counts, "total_tokens": sum(counts.values())}
    return {**answer(about, completed.decode(errors="replace"), "length"), "usage": usage}


async def events(about: dict[str, Any], first: int, tokens: AsyncGenerator[int]) -> AsyncGenerator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    yield event(answer(about, decoder.decode(bytes([first]))))
    async for token in tokens:
        yield event(answer(about, decoder.decode(bytes([token]))))
    yield event(answer(about, decoder.decode(b"", final=True), "length"))
    yield "data: [DONE]\n\n"


def answer(about: dict[str, Any], text: str, finish_reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
    return {**about, "object": "text_completion", "choices": [choice]}


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def router_of(request: Request) -> Router:
    router: Router = request.state.router
    return router


@api.get("/state")
async def state(request: Request) -> dict[str, Any]:
    """The state and work of the router and of each engine."""
    router = router_of(request)
    counts = await asyncio.gather(*(member.engine.counts() for member in router.members), return_exceptions=True)
    engines = [
        {"role": member.role, "loads_told": member.told}
        | (found._asdict() if isinstance(found, Counts) else {"error": str(found)})
        for member, found in zip(router.members, counts, strict=True)
    ]
    waiting = len(router.turns.waiting)
    return {"waiting": waiting, "under_way": router.under_way, "resumed": router.resumed, "engines": engines}


@api.put("/engines/{number}")
async def assign(request: Request, number: int, role: Literal["prefill", "decode"] = Body(embed=True)) -> None:
    """Give an engine a role. It completes its sequences."""
    try:
        router_of(request).assign(number, role)
    except (IndexError, ValueError) as error:
        raise HTTPException(409, str(error)) from error
