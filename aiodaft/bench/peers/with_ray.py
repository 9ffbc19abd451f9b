"""The measurements in Ray."""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import ray
from ray.dag import InputNode

from . import serving
from .serving import Echo, Lines, many, one_by_one, tensors


class Step:
    """Takes part in graphs, which have no async methods."""

    def same(self, value: int) -> int:
        """A small value, passed on."""
        return value


@asynccontextmanager
async def open_lines(count: int) -> AsyncGenerator[Lines]:
    """Start actors."""
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    actors = [_remote(Echo).remote() for _ in range(count)]
    a, b, c = (actors[index % count] for index in range(3))
    lines: Lines = {
        serving.CALL: one_by_one(lambda: a.same.remote(1), 100),
        serving.IN_FLIGHT: many(lambda: a.same.remote(1), 4000, 1000),
        serving.FAN_OUT: one_by_one(lambda: asyncio.gather(*(actor.same.remote(1) for actor in actors)), 20),
        serving.CHAIN: one_by_one(lambda: c.same.remote(b.same.remote(a.same.remote(1))), 50),
        **tensors(a.prepare.remote, lambda: b.take.remote(a.give.remote())),
    }

    try:
        if count > 1:
            await asyncio.gather(*(actor.same.remote(1) for actor in actors))
            lines |= _compiled()
        yield lines
    finally:
        ray.shutdown()


def _remote(cls: type) -> Any:
    return ray.remote(num_cpus=0)(cls)


def _compiled() -> Lines:
    x, y, z = (_remote(Step).remote() for _ in range(3))
    with InputNode() as value:
        chain = z.same.bind(y.same.bind(x.same.bind(value)))
    with InputNode() as value:
        single = _remote(Step).remote().same.bind(value)
    one, three = single.experimental_compile(), chain.experimental_compile()

    # The fastest way to wait for a run blocks the loop.
    async def run(graph: Any) -> None:  # noqa: RUF029 - see above
        ray.get(graph.execute(1))

    async def ten_in_flight() -> float:
        runs: deque[Any] = deque()

        async def next_run() -> None:  # noqa: RUF029 - see above
            runs.append(one.execute(1))
            if len(runs) == 10:
                ray.get(runs.popleft())

        sample = await many(next_run, 4000, 1)()
        for left in runs:
            ray.get(left)
        return sample

    return {
        serving.COMPILED: one_by_one(lambda: run(one), 100),
        serving.COMPILED_CHAIN: one_by_one(lambda: run(three), 100),
        serving.COMPILED_TEN: ten_in_flight,
    }
