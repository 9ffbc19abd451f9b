"""The measurements in Ray."""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import socket
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
    _init()
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
        yield lines
    finally:
        ray.shutdown()


@asynccontextmanager
async def open_graphs(count: int) -> AsyncGenerator[Lines]:
    """Compile graphs. Their actors keep a core busy each, so nothing else is measured meanwhile."""
    _init()
    x, y, z = (_remote(Step).remote() for _ in range(3))
    with InputNode() as value:
        chain = z.same.bind(y.same.bind(x.same.bind(value)))
    with InputNode() as value:
        single = _remote(Step).remote().same.bind(value)
    try:
        yield {**_runs(serving.COMPILED, single), **_runs(serving.COMPILED_CHAIN, chain)}
    finally:
        ray.shutdown()


@asynccontextmanager
async def open_web(count: int) -> AsyncGenerator[Lines]:
    """Start Ray Serve with an app that calls another deployment."""
    from fastapi import FastAPI  # noqa: PLC0415 - the other lines need none
    from ray import serve  # noqa: PLC0415 - as above

    app = FastAPI()

    class Model:
        async def answer(self, number: int) -> dict[str, int]:
            return {"answer": number}

    class Router:
        def __init__(self, model: Any) -> None:
            self.model = model

        @app.get("/")
        async def answer(self) -> Any:
            return await self.model.answer.remote(1)

    _init()
    # Its default of 5 would have most clients wait.
    deployment = serve.deployment(max_ongoing_requests=256)
    router = deployment(serve.ingress(app)(Router)).bind(deployment(Model).bind())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        await asyncio.to_thread(serve.run, router)
        yield serving.requests(f"http://127.0.0.1:{port}/")
    finally:
        ray.shutdown()


def _init() -> None:
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")


def _remote(cls: type) -> Any:
    return ray.remote(num_cpus=0)(cls)


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
