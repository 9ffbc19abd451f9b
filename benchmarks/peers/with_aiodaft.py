"""The measurements in aiodaft."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiodaft

from .. import web
from . import serving
from .serving import Lines, many, one_by_one, runs, tensors


class Echo(aiodaft.Actor):
    """Answers at once, and makes and takes tensors."""

    @aiodaft.method
    async def same(self, value: int) -> int:
        """A small value, there and back."""
        return value

    @aiodaft.method
    async def prepare(self, size: int) -> None:
        """Make the tensor that is given later."""
        import torch  # noqa: PLC0415 - the other calls need none

        self.tensor = torch.ones(size, dtype=torch.uint8)

    @aiodaft.method
    async def give(self) -> Any:
        """A tensor."""
        return self.tensor

    @aiodaft.method
    async def take(self, tensor: Any) -> int:
        """Receive a tensor."""
        return len(tensor)


@asynccontextmanager
async def open_lines(count: int) -> AsyncGenerator[Lines]:
    """Start actors."""
    async with aiodaft.Runtime(preload=("torch",) if count > 1 else ()) as rt, rt.group(count, Echo) as actors:
        a, b, c = (actors[index % count] for index in range(3))
        yield {
            serving.CALL: one_by_one(lambda: a.same(1), 100),
            serving.IN_FLIGHT: many(lambda: a.same(1), 4000, 1000),
            serving.FAN_OUT: one_by_one(lambda: actors.all(Echo.same, 1), 20),
            serving.CHAIN: one_by_one(lambda: c.same(b.same(a.same(1))), 50),
            **tensors(a.prepare, lambda: b.take(a.give())),
        }


@asynccontextmanager
async def open_graphs(count: int) -> AsyncGenerator[Lines]:
    """Start actors, and compile graphs of them."""

    def chain(value: int | aiodaft.Ref[int]) -> aiodaft.Ref[int]:
        return c.same(b.same(a.same(value)))

    async with (
        aiodaft.Runtime(preload=()) as rt,
        rt.group(3, Echo) as (a, b, c),
        aiodaft.compile(a.same) as one,
        aiodaft.compile(chain) as three,
    ):
        yield {
            **runs(serving.COMPILED, lambda: one(1), partial(many, lambda: one(1), 4000)),
            **runs(serving.COMPILED_CHAIN, lambda: three(1), partial(many, lambda: three(1), 4000)),
        }


@asynccontextmanager
async def open_web(count: int) -> AsyncGenerator[Lines]:
    """Start a server with an actor behind it."""
    async with web.serving("ingress") as url:
        yield serving.requests(url)
