"""The measurements in Ray."""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
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
    return {**_runs(serving.COMPILED, single), **_runs(serving.COMPILED_CHAIN, chain)}


def _runs(name: str, dataflow: Any) -> Lines:
    graph = dataflow.experimental_compile(_max_inflight_executions=16)

    # The fastest way to wait for a run blocks the loop.
    async def run() -> None:  # noqa: RUF029 - see above
        ray.get(graph.execute(1))

    async def several(count: int) -> float:
        under_way: deque[Any] = deque()

        async def next_run() -> None:  # noqa: RUF029 - see above
            under_way.append(graph.execute(1))
            if len(under_way) == count:
                ray.get(under_way.popleft())

        sample = await many(next_run, 4000, 1)()
        for left in under_way:
            ray.get(left)
        return sample

    return serving.runs(name, run, lambda count: partial(several, count))
