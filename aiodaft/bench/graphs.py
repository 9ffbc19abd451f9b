"""Compiled graphs: against the same calls made one by one, and against bare floors.

Calls made one by one go over a runtime of their own, with processes that took part in no graph. `OpByOp`, `Chained`
and `Fused` are those of the Pathways paper (Barham et al. 2022, section 5.1): one small operation on each actor of a
gang, again and again, awaited each time; as one graph; as a loop inside the actors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from aiodaft import graph as graphs
from aiodaft.graph import Graph
from aiodaft.ref import Ref, lazy
from aiodaft.runtime import Runtime

from .actors import Worker, payload
from .pingpong import open_pingpong
from .results import Result, compare_times, rate, timed

_EDGE: Final = 1 << 20
_IN_FLIGHT: Final = 10
Dataflow = Callable[[Any], Any]
Make = Callable[[list[Worker]], Dataflow]


async def run(turns: int) -> list[Result]:
    """Measure graphs."""
    # The one opened last is the one that graphs are captured for.
    async with Runtime() as plain, Runtime() as rt:
        theirs = [await plain.spawn(Worker) for _ in range(4)]
        ours = [await rt.spawn(Worker) for _ in range(4)]
        results = [await _round_trip(ours[0], turns), await _idle(ours[0])]
        results += await _compiling(ours)
        for name, make, repeats, budget in _DATAFLOWS:
            flow = make(theirs)
            async with graphs.compile(make(ours)) as graph:
                name = f"{name}, one by one / compiled"
                results.append(await _gain(name, graph, flow, repeats, turns, budget))
        results += await _pathways(ours, turns)
        results += await _throughput(ours[0], turns)
    return results


def _chain(length: int) -> Make:
    def make(actors: list[Worker]) -> Dataflow:
        def flow(x: Ref[int]) -> Ref[int]:
            for index in range(length):
                x = actors[index % len(actors)].step(x)
            return x

        return flow

    return make


def _gang(actors: list[Worker], length: int) -> Dataflow:
    def flow(x: Ref[int]) -> list[Ref[int]]:
        ends: list[Ref[int]] = []
        for actor in actors:
            end = x
            for _ in range(length):
                end = actor.step(end)
            ends.append(end)
        return ends

    return flow


def _scatter(actors: list[Worker]) -> Dataflow:
    return lambda x: actors[0].gather([lazy(actor.step(x)) for actor in actors])


def _edge(actor: Worker) -> Dataflow:
    return lambda x: actor.size(actor.same(x))


def _fused(actors: list[Worker], length: int) -> Dataflow:
    return lambda x: [actor.loop(x, length) for actor in actors]


_DATAFLOWS: Final[list[tuple[str, Make, int, str]]] = [
    ("gang of 4, chains of 128", lambda actors: _gang(actors, 128), 2, ">= 10.0"),
    ("chain of 128, each hop to another of 4", _chain(128), 2, ""),
    ("chain of 4 over 4", _chain(4), 30, ">= 2.0"),
    ("scatter to 4 and gather", _scatter, 30, ">= 2.0"),
]


async def _all(refs: Any) -> Any:
    return await asyncio.gather(*refs) if isinstance(refs, list) else await refs


async def _repeat(start: Callable[[int], Any], count: int) -> float:
    async def work() -> None:
        for index in range(count):
            await _all(start(index))

    return await timed(work()) / count


async def _gain(name: str, graph: Graph[..., Any], flow: Dataflow, repeats: int, turns: int, budget: str) -> Result:
    await _all(graph(1))
    one_by_one, compiled = partial(_repeat, flow, repeats), partial(_repeat, graph, repeats)
    return await compare_times(name, one_by_one, compiled, "the compiled graph", turns, budget)


async def _round_trip(actor: Worker, turns: int) -> Result:
    repeats = 300
    async with open_pingpong() as bare, graphs.compile(_chain(1)([actor])) as graph:
        await _repeat(graph, repeats)
        await bare.round_trip(repeats)
        # The floor makes no call: a bare program that packs frames, runs a coroutine in a context of its own and sets a
        # future over the same rings takes 1.8 to 2.5 times as long. Quiet machines measured 3.4 to 4.6 for a run.
        ours, floor = partial(_repeat, graph, repeats), partial(bare.round_trip, repeats)
        return await compare_times("one actor, round trip", ours, floor, "shared memory", turns, "<= 5.0")


async def _compiling(actors: list[Worker]) -> list[Result]:
    results: list[Result] = []
    for length in (1, 128):
        start = time.perf_counter()
        graph = graphs.compile(_gang(actors, length))
        await _all(graph(1))
        took = time.perf_counter() - start
        await graph.aclose()
        results.append(Result(f"compile and run once, gang of 4 x {length}", took * 1e3, "ms", budget="<= 50"))
    return results


async def _idle(actor: Worker) -> Result:
    async with graphs.compile(_chain(1)([actor])) as graph:
        await graph(1)
        before = await actor.cpu() + time.process_time()
        start = time.perf_counter()
        await asyncio.sleep(1)
        after = await actor.cpu() + time.process_time()
        took = time.perf_counter() - start
    return Result("processor time of an idle graph, both sides", (after - before) / took * 100, "%", budget="<= 2.0")


async def _pathways(actors: list[Worker], turns: int) -> list[Result]:
    results: list[Result] = []
    for gang in (1, 2, 4):
        members = actors[:gang]
        for length in (1, 4, 16, 128):
            rounds = max(1, 32 // length)

            async def op_by_op(members: list[Worker] = members, length: int = length) -> None:
                for _ in range(length):
                    await asyncio.gather(*(member.step(1) for member in members))

            async with (
                graphs.compile(_gang(members, length)) as chained,
                graphs.compile(_fused(members, length)) as fused,
            ):
                await _all(chained(1))
                await _all(fused(1))
                ways: list[tuple[str, Callable[[int], Awaitable[Any]]]] = [
                    ("OpByOp", lambda _, run=op_by_op: run()),  # type: ignore[misc]  # brief
                    ("Chained", lambda x, graph=chained: _all(graph(x))),  # type: ignore[misc]  # brief
                    ("Fused", lambda x, graph=fused: _all(graph(x))),  # type: ignore[misc]  # brief
                ]
                for name, start in ways:
                    seconds = sorted([await _repeat(start, rounds) for _ in range(turns)])[turns // 2]
                    results.append(Result(f"{name}, {gang} actors, chain of {length}", length / seconds, "ops/s"))
    return results


async def _throughput(actor: Worker, turns: int) -> list[Result]:
    async with graphs.compile(_chain(1)([actor])) as graph:
        rates = sorted([await rate(lambda: graph(1), 3000, _IN_FLIGHT) for _ in range(turns)])
    data = payload(_EDGE)
    async with graphs.compile(_edge(actor)) as edges:
        await edges(data)
        speeds = sorted([_EDGE / await _repeat(lambda _: edges(data), 20) / 1e9 for _ in range(turns)])
    return [
        Result(f"one actor, {_IN_FLIGHT} runs in flight", rates[turns // 2], "1/s"),
        Result("1 MiB in, and on to a second step", speeds[turns // 2], "GB/s"),
    ]
