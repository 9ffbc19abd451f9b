"""The measurements in Monarch. Its actors take no futures: a tensor is fetched by the actor that needs it."""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from monarch.actor import Actor, endpoint, shutdown_context, this_host

from . import serving
from .serving import Echo, Lines, awaited, many, one_by_one, tensors


class EchoActor(Actor):
    """The same methods as endpoints."""

    same = endpoint(Echo.same)
    prepare = endpoint(Echo.prepare)
    give = endpoint(Echo.give)

    @endpoint
    async def fetch(self, source: Any) -> int:
        """Fetch the tensor of another actor."""
        return len(await source.give.call_one())


@asynccontextmanager
async def open_lines(count: int) -> AsyncGenerator[Lines]:
    """Start actors, each in a process of its own."""
    processes = [this_host().spawn_procs(per_host={"cpus": 1}) for _ in range(count)]
    actors = [process.spawn(f"echo_{index}", EchoActor) for index, process in enumerate(processes)]
    a, b = actors[0], actors[1 % count]

    try:
        await asyncio.gather(*(awaited(actor.same.call_one(1)) for actor in actors))
        yield {
            serving.CALL: one_by_one(lambda: a.same.call_one(1), 100),
            serving.IN_FLIGHT: many(lambda: a.same.call_one(1), 4000, 1000),
            serving.FAN_OUT: one_by_one(lambda: asyncio.gather(*(awaited(x.same.call_one(1)) for x in actors)), 20),
            **tensors(a.prepare.call_one, lambda: b.fetch.call_one(a)),
        }
    finally:
        await shutdown_context()
