"""An engine without a model: each letter depends on the text before it, and on the seed if there is a temperature."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiodaft
from aiodaft import serve

STOP = ord("u")


def letter_after(tokens: Sequence[int], sampling: serve.Sampling) -> int:
    seed = sampling.seed if sampling.temperature else 0
    return ord("a") + (sum(tokens) * 31 + len(tokens) * 7 + seed) % 26


def text_after(prompt: str, count: int, sampling: serve.Sampling = serve.Sampling()) -> str:  # noqa: B008 - a constant
    tokens = [*prompt.encode()]
    for _ in range(count):
        tokens.append(letter_after(tokens, sampling))
    return bytes(tokens[len(prompt.encode()) :]).decode()


class Letters(serve.Engine):
    """A prompt that begins with "hold" is answered by one letter, and then nothing."""

    places = 4

    def __init__(self) -> None:
        self.held = 0

    @aiodaft.method(ordered=False)
    async def decode(
        self, request: serve.Request, given: serve.Given | None = None, layers: list[Any] | None = None
    ) -> AsyncGenerator[serve.Piece]:
        tokens, sampling = [*request.tokens], request.sampling
        hold = bytes(tokens).startswith(b"hold")
        for number in range(request.count):
            if hold and number:
                self.held += 1
                try:
                    await asyncio.Event().wait()
                finally:
                    self.held -= 1
            tokens.append(letter_after(tokens, sampling))
            top = [(tokens[-1] + other, math.log(0.25 / 2**other)) for other in range(sampling.logprobs or 0)]
            logprob = None if sampling.logprobs is None else math.log(0.5)
            yield serve.Piece((tokens[-1],), 1, logprob, tuple(top))
            if tokens[-1] in request.stops:
                return

    @aiodaft.method
    async def loads(self) -> AsyncGenerator[serve.Load]:
        yield serve.Load(self.places, context=200, asked=70, hits=32, usage=0.25)
        await asyncio.Event().wait()

    @aiodaft.method
    async def count_held(self) -> int:
        return self.held

    @aiodaft.method
    async def pid(self) -> int:
        return os.getpid()


class Opened:
    """A router of such engines, for an app; `router` is there when it runs."""

    router: serve.Router

    def __init__(self, engines: int = 1, queue: int = 4) -> None:
        self.engines, self.queue = engines, queue

    @asynccontextmanager
    async def __call__(self, rt: aiodaft.Runtime) -> AsyncGenerator[serve.Router]:
        async with rt.group(self.engines, Letters) as engines:
            turns = serve.Turns(most=self.queue)
            async with serve.Router([], engines, turns=turns).running() as self.router:
                yield self.router


class StoppingBytes(serve.Bytes):
    """Bytes, of which a "u" ends a text, and is not shown."""

    stops = frozenset({STOP})

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode([token for token in ids if token != STOP])
