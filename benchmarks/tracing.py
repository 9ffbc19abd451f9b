"""The cost of traces: nothing after the block, and little in it."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

from aiodaft.graph import compile as compile_graph
from aiodaft.runtime import Runtime

from .actors import Worker
from .results import Bench, Sample, rate, seconds_of_one


class Lines(NamedTuple):
    """The measured lines of a runtime."""

    step: Callable[[int], Awaitable[int]]
    graph: Callable[[int], Awaitable[int]]


async def run(bench: Bench) -> None:
    """Measure calls and runs of a graph, next to those of a runtime that never records a trace."""
    with tempfile.TemporaryDirectory() as folder:
        async with Runtime() as rt:
            ours = await open_lines(rt)
            # Without room for events: to write them is not measured.
            trace = partial(rt.trace, Path(folder) / "run.json", limit=1)
            async with trace():
                await ours.step(1)
            async with Runtime() as other:
                floor = await open_lines(other)
                await compare_lines(bench, ours, floor, "after a trace", "never traced", cheap=True)
                async with trace():
                    await compare_lines(bench, ours, floor, "in a trace", "never traced")


async def open_lines(rt: Runtime) -> Lines:
    """Make the measured lines."""
    worker = await rt.spawn(Worker)
    return Lines(worker.step, compile_graph(worker.step))


async def compare_lines(
    bench: Bench,
    ours: Lines,
    floor: Lines,
    when: str,
    floor_when: str,
    *,
    cheap: bool = False,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Measure calls and runs of graphs, next to those of another runtime.

    Args:
        bench: Gets the lines.
        ours: The measured lines.
        floor: The lines that they are compared with.
        when: The description of `ours` in the lines.
        floor_when: That of `floor`.
        cheap: Whether there are budgets, because it must cost next to nothing.
        around: The block in which calls are made, on our side.
    """

    async def inside(sample: Sample) -> float:
        with around():
            return await sample()

    for what, one, other in (("call", ours.step, floor.step), ("run of a graph", ours.graph, floor.graph)):
        mine, theirs = partial(seconds_of_one, partial(one, 1), 200), partial(seconds_of_one, partial(other, 1), 200)
        await bench.compare(f"{what} {when}", partial(inside, mine), theirs, floor_when, "<= 1.1" if cheap else "")
    many, others = (
        partial(rate, partial(ours.step, 1), 4_000, 400),
        partial(rate, partial(floor.step, 1), 4_000, 400),
    )
    budget = ">= 0.9" if cheap else ""
    await bench.compare(f"400 calls in flight {when}", partial(inside, many), others, floor_when, budget, unit="1/s")
