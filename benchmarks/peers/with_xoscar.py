"""The measurements in xoscar. Its actors take no futures: a tensor is fetched by the actor that needs it."""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import xoscar

from . import serving
from .serving import Echo, Lines, many, one_by_one, tensors


class EchoActor(Echo, xoscar.StatelessActor):
    """Without state: one with state runs one call at a time."""


@asynccontextmanager
async def open_lines(count: int) -> AsyncGenerator[Lines]:
    """Start actors, each in a process of its own."""
    pool = await xoscar.create_actor_pool("127.0.0.1", n_process=count)
    async with pool:
        actors = [
            await xoscar.create_actor(
                EchoActor,
                address=pool.external_address,
                uid=f"echo-{index}",
                allocate_strategy=xoscar.allocate_strategy.ProcessIndex(index + 1),
            )
            for index in range(count)
        ]
        a, b = actors[0], actors[1 % count]

        yield {
            serving.CALL: one_by_one(lambda: a.same(1), 100),
            serving.IN_FLIGHT: many(lambda: a.same(1), 4000, 1000),
            serving.FAN_OUT: one_by_one(lambda: asyncio.gather(*(actor.same(1) for actor in actors)), 20),
            **tensors(a.prepare, lambda: b.fetch(a)),
        }
