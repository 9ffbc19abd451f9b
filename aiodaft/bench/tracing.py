"""What traces cost: nothing after the block, and little in it."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from aiodaft.graph import compile as compile_graph
from aiodaft.runtime import Runtime

from .actors import Worker
from .results import Bench, rate, seconds_of_one


class _Lines(NamedTuple):
    """What is measured, in a runtime with traces and in one without."""

    step: Callable[[int], Awaitable[int]]
    graph: Callable[[int], Awaitable[int]]


async def run(bench: Bench) -> None:
    """Measure calls and runs of a graph, next to those of a runtime that never records a trace."""
    with tempfile.TemporaryDirectory() as folder:
        async with Runtime() as rt:
            ours = await _open(rt)
            # Without room for events: to write them is not measured.
            trace = partial(rt.trace, Path(folder) / "run.json", limit=1)
            async with trace():
                await ours.step(1)
            async with Runtime() as other:
                floor = await _open(other)
                await _compare(bench, "after a trace", ours, floor, ("<= 1.1", ">= 0.9"))
                async with trace():
                    await _compare(bench, "in a trace", ours, floor, ("", ""))


async def _open(rt: Runtime) -> _Lines:
    worker = await rt.spawn(Worker)
    return _Lines(worker.step, compile_graph(worker.step))


async def _compare(bench: Bench, when: str, ours: _Lines, floor: _Lines, budgets: tuple[str, str]) -> None:
    for what, one, other in (("call", ours.step, floor.step), ("run of a graph", ours.graph, floor.graph)):
        mine, theirs = partial(seconds_of_one, partial(one, 1), 200), partial(seconds_of_one, partial(other, 1), 200)
        await bench.compare(f"{what} {when}", mine, theirs, "never traced", budgets[0])
    many, others = (
        partial(rate, partial(ours.step, 1), 4_000, 400),
        partial(rate, partial(floor.step, 1), 4_000, 400),
    )
    await bench.compare(f"400 calls in flight {when}", many, others, "never traced", budgets[1], unit="1/s")
