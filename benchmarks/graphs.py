"""Compiled graphs: against the same calls made one by one, and against bare floors.

Calls made one by one go over a runtime of their own, with processes that took part in no graph.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from aiodaft import graph as graphs
from aiodaft.ref import lazy
from aiodaft.runtime import Runtime

from .actors import Worker, payload
from .pingpong import open_pingpong
from .results import Bench, rate, seconds_of_one

_EDGE: Final = 1 << 20
# The number of runs that are under way; a graph has at most 16.
_IN_FLIGHT: Final = {"": 1, ", 10 in flight": 10, ", 16 in flight": 16}
Dataflow = Callable[[Any], Any]


async def run(bench: Bench) -> None:
    """Measure graphs."""
    # The one opened last is the one that graphs are captured for.
    async with Runtime() as plain, Runtime() as rt:
        theirs = [await plain.spawn(Worker) for _ in range(4)]
        ours = [await rt.spawn(Worker) for _ in range(4)]
        await _round_trip(bench, ours[0])
        await _idle(bench, ours[0])
        for length in (1, 128):
            await _compiling(bench, ours, length)
        for name, make, repeats, budget in _DATAFLOWS:
            async with graphs.compile(make(ours)) as graph:
                for suffix, in_flight in _IN_FLIGHT.items():
                    one_by_one, compiled = (partial(_repeat, way, repeats, in_flight) for way in (make(theirs), graph))
                    line = f"{name}, one by one / compiled{suffix}"
                    await bench.compare(line, one_by_one, compiled, "the compiled graph", budget)
        async with graphs.compile(lambda x: ours[0].take(ours[0].on_loop(x))) as edges:
            once = partial(edges, payload(_EDGE))
            await once()
            seconds = await bench.median_of(partial(seconds_of_one, once, 20))
            bench.add("1 MiB in, and on to a second step", _EDGE / seconds / 1e9, "GB/s")


def _chain(actors: list[Worker], length: int) -> Dataflow:
    def flow(x: Any) -> Any:
        for index in range(length):
            x = actors[index % len(actors)].step(x)
        return x

    return flow


def _gang(actors: list[Worker], length: int) -> Dataflow:
    chains = [_chain([actor], length) for actor in actors]
    return lambda x: [chain(x) for chain in chains]


def _scatter(actors: list[Worker]) -> Dataflow:
    return lambda x: actors[0].gather([lazy(actor.step(x)) for actor in actors])


_DATAFLOWS: Final[list[tuple[str, Callable[[list[Worker]], Dataflow], int, str]]] = [
    ("gang of 4, chains of 128", lambda actors: _gang(actors, 128), 2, ">= 25.0"),
    ("chain of 128, each hop to another of 3", lambda actors: _chain(actors[:3], 128), 2, ">= 8.0"),
    ("chain of 4 over 4", lambda actors: _chain(actors, 4), 30, ">= 2.0"),
    ("scatter to 4 and gather", _scatter, 30, ">= 2.0"),
]


async def _all(refs: Any) -> Any:
    return await asyncio.gather(*refs) if isinstance(refs, list) else await refs


async def _repeat(start: Callable[[int], Any], repeats: int, in_flight: int) -> float:
    """Seconds that a run takes, with so many under way."""
    return 1 / await rate(lambda: _all(start(1)), repeats * in_flight, in_flight)


async def _round_trip(bench: Bench, actor: Worker) -> None:
    async with open_pingpong() as bare, graphs.compile(actor.step) as graph:
        # The floor makes no call: a bare program that packs frames, runs a coroutine in a context of its own and sets a
        # future over the same rings takes 1.8 to 2.5 times as long.
        for suffix, in_flight in _IN_FLIGHT.items():
            ours, floor = partial(_repeat, graph, 300, in_flight), partial(bare.round_trip, 300)
            await bench.compare(f"one actor, round trip{suffix}", ours, floor, "shared memory", "<= 3.5")


async def _compiling(bench: Bench, actors: list[Worker], length: int) -> None:
    start = time.perf_counter()
    graph = graphs.compile(_gang(actors, length))
    await _all(graph(1))
    took = time.perf_counter() - start
    await graph.aclose()
    bench.add(f"compile and run once, gang of 4 x {length}", took * 1e3, "ms", "<= 50")


async def _idle(bench: Bench, actor: Worker) -> None:
    async with graphs.compile(actor.step) as graph:
        await graph(1)
        before = await actor.cpu() + time.process_time()
        start = time.perf_counter()
        await asyncio.sleep(1)
        after = await actor.cpu() + time.process_time()
        took = time.perf_counter() - start
    bench.add("processor time of an idle graph, both sides", (after - before) / took * 100, "%", "<= 2.0")
