"""The measurements in Monarch. Its actors take no futures: a tensor is fetched by the actor that needs it."""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from monarch.actor import Actor, endpoint, shutdown_context, this_host

from . import serving
from .serving import Lines, many, one_by_one, tensors


class Echo(Actor):
    """Answers at once, and makes and takes tensors."""

    @endpoint
    async def same(self, value: int) -> int:
        """A small value, there and back."""
        return value

    @endpoint
    async def prepare(self, size: int) -> None:
        """Make the tensor that is given later."""
        import torch  # noqa: PLC0415 - the other calls need none

        self.tensor = torch.ones(size, dtype=torch.uint8)

    @endpoint
    async def give(self) -> Any:
        """A tensor."""
        return self.tensor

    @endpoint
    async def fetch(self, source: Any) -> int:
        """Fetch the tensor of another actor."""
        return len(await source.give.call_one())


@asynccontextmanager
async def open_lines(count: int) -> AsyncGenerator[Lines]:
    """Start actors, each in a process of its own."""
    processes = [this_host().spawn_procs(per_host={"cpus": 1}) for _ in range(count)]
    actors = [process.spawn(f"echo_{index}", Echo) for index, process in enumerate(processes)]
    a, b = actors[0], actors[1 % count]

    try:
        await asyncio.gather(*(_value(actor.same.call_one(1)) for actor in actors))
        yield {
            serving.CALL: one_by_one(lambda: a.same.call_one(1), 100),
            serving.IN_FLIGHT: many(lambda: a.same.call_one(1), 4000, 1000),
            serving.FAN_OUT: one_by_one(lambda: asyncio.gather(*(_value(x.same.call_one(1)) for x in actors)), 20),
            **tensors(a.prepare.call_one, lambda: b.fetch.call_one(a)),
        }
    finally:
        await shutdown_context()


async def _value(future: Any) -> Any:
    return await future
