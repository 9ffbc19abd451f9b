"""The measurements in xoscar. Its actors take no futures: a tensor is fetched by the actor that needs it."""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import xoscar

from . import serving
from .serving import Lines, many, one_by_one, tensors


class Echo(xoscar.StatelessActor):
    """Answers at once, and makes and takes tensors. Without state: one with state runs one call at a time."""

    async def same(self, value: int) -> int:
        """A small value, there and back."""
        return value

    async def prepare(self, size: int) -> None:
        """Make the tensor that is given later."""
        import torch  # noqa: PLC0415 - the other calls need none

        self.tensor = torch.ones(size, dtype=torch.uint8)

    async def give(self) -> Any:
        """A tensor."""
        return self.tensor

    async def fetch(self, source: Any) -> int:
        """Fetch the tensor of another actor."""
        return len(await source.give())


@asynccontextmanager
async def open_lines(count: int) -> AsyncGenerator[Lines]:
    """Start actors, each in a process of its own."""
    pool = await xoscar.create_actor_pool("127.0.0.1", n_process=count)
    async with pool:
        actors = [
            await xoscar.create_actor(
                Echo,
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
