"""The measurements in Dask. Its actors take no futures: a tensor is fetched by the actor that needs it."""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from distributed import Client, LocalCluster

from . import serving
from .serving import Echo, Lines, awaited, many, one_by_one, tensors


@asynccontextmanager
async def open_lines(count: int) -> AsyncGenerator[Lines]:
    """Start actors, each in a process of its own."""
    async with (
        LocalCluster(
            n_workers=count, threads_per_worker=1, processes=True, dashboard_address=None, asynchronous=True
        ) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        workers = list(cluster.scheduler.workers)
        actors = [await client.submit(Echo, actor=True, workers=[worker], pure=False) for worker in workers]
        a, b = actors[0], actors[1 % count]

        yield {
            serving.CALL: one_by_one(lambda: a.same(1), 100),
            serving.IN_FLIGHT: many(lambda: a.same(1), 2000, 1000),
            serving.FAN_OUT: one_by_one(lambda: asyncio.gather(*(awaited(actor.same(1)) for actor in actors)), 20),
            **tensors(a.prepare, lambda: b.fetch(a)),
        }
