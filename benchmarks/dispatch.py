"""The cost of dispatch, and the length of operations that hide it, after Pathways (Barham et al. 2022, figures 5, 6).

Operations run on each actor of a gang, again and again: `OpByOp` awaits each call, `Chained` passes refs from call to
call and awaits the last, `Fused` is a compiled graph, one message per process and chain. (The paper's Chained is one
program of many operations, as our graph is; its Fused is a loop in the actor, here the local loop to compare with.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final

from aiodaft import graph as graphs
from aiodaft.runtime import Runtime

from .actors import Device
from .floors import open_echo
from .results import Bench, in_turns, timed

# Of the local loop: dispatch is hidden.
_SHARE: Final = 0.95
# Operations of a chain in which dispatch is to be hidden, and how much longer the next operation is.
_LENGTH: Final = 32
_LONGER: Final = 1.6

# For each way, pairs of the duration of an operation and the share of the local loop.
Curves = Mapping[str, Sequence[tuple[float, float]]]
Start = Callable[[], Awaitable[object]]


async def run(bench: Bench, counts: Sequence[int] = (1, 2, 4), length: int = 128, longest: float = 0.05) -> None:
    """Measure dispatch with so many actors, in chains of so many operations of at most so many seconds."""
    # The runtime opened last is the one that graphs are captured for; processes of the other took part in no graph.
    async with AsyncExitStack() as stack, Runtime() as plain, Runtime() as rt:
        echoes = [await stack.enter_async_context(open_echo()) for _ in range(max(counts))]
        called = [await plain.spawn(Device) for _ in range(max(counts))]
        captured = [await rt.spawn(Device) for _ in range(max(counts))]
        for count in counts:

            async def bare(count: int = count) -> float:
                return await _per_op(partial(_awaited, [echo.call for echo in echoes[:count]], length), length)

            async with _Ways(called[:count], captured[:count], length, lambda actor: actor.step) as ways:
                for name, start in ways:
                    budget = "<= 2.0" if (name, count) == ("OpByOp", 1) else ""
                    ours = partial(_per_op, start, length)
                    await bench.compare(f"{name}, {_actors(count)}", ours, bare, "bare echo, awaited", budget)
        for count in counts:
            await _hide(bench, called[:count], captured[:count], longest)


class _Ways:
    """The ways to dispatch a chain of operations to each of some actors."""

    def __init__(
        self, called: list[Device], captured: list[Device], length: int, op: Callable[[Device], Callable[[Any], Any]]
    ) -> None:
        self._called = [op(actor) for actor in called]
        self._length = length
        ops = [op(actor) for actor in captured]
        self._graph = graphs.compile(lambda x: [_chain(op, length, x) for op in ops])

    async def __aenter__(self) -> _Ways:
        await self._graph.__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._graph.aclose()

    def __iter__(self) -> Iterator[tuple[str, Start]]:
        ops, length = self._called, self._length
        yield "OpByOp", partial(_awaited, ops, length)
        yield "Chained", lambda: asyncio.gather(*[_chain(op, length, 1) for op in ops])
        yield "Fused", lambda: asyncio.gather(*self._graph(1))


def _chain(op: Callable[[Any], Any], length: int, x: Any) -> Any:
    for _ in range(length):
        x = op(x)
    return x


async def _awaited(ops: Sequence[Callable[[Any], Awaitable[object]]], length: int) -> None:
    for _ in range(length):
        await asyncio.gather(*[op(1) for op in ops])


async def _per_op(start: Start, length: int) -> float:
    async def work() -> None:
        await start()

    return await timed(work()) / length


async def _hide(bench: Bench, called: list[Device], captured: list[Device], longest: float) -> None:
    """For each way, make the operation longer until the chain takes little more than a loop in the actors."""
    for way in ("OpByOp", "Chained", "Fused"):
        name = f"{way}, {_actors(len(called))}"
        curve = bench.curves[name] = []
        seconds = 20e-6
        while seconds <= longest and not (curve and curve[-1][1] >= _SHARE):
            curve.append(await _share_of_local(bench, way, called, captured, seconds))
            seconds *= _LONGER
        op, share = curve[-1]
        bench.add(f"{name}: op that hides dispatch{'' if share >= _SHARE else ' is over'}", op * 1e6, "us")


async def _share_of_local(
    bench: Bench, way: str, called: list[Device], captured: list[Device], seconds: float
) -> tuple[float, float]:
    """The time of an operation in a loop in the actors, and this loop's time by that of the dispatched chain."""

    async def local() -> float:
        return max(await asyncio.gather(*(actor.run_ops(seconds, _LENGTH) for actor in called)))

    async with _Ways(called, captured, _LENGTH, lambda actor: lambda x: actor.run_op(x, seconds)) as ways:
        start = dict(ways)[way]
        await start()
        _, op, ratio = await in_turns(partial(_per_op, start, _LENGTH), local, bench.turns)
    return op, 1 / ratio


def _actors(count: int) -> str:
    return f"{count} actor" if count == 1 else f"{count} actors"


def plot(curves: Curves, file: str) -> None:
    """Draw the share of the local loop by the duration of an operation.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    styles = {"OpByOp": ":", "Chained": "--", "Fused": "-"}
    colours = {
        actors: f"C{place}" for place, actors in enumerate(dict.fromkeys(name.split(", ")[1] for name in curves))
    }
    for name, curve in curves.items():
        way, actors = name.split(", ")
        xs, ys = zip(*[(op * 1e6, share) for op, share in sorted(curve)], strict=True)
        axes.plot(xs, ys, styles[way], color=colours[actors], marker=".", label=name)
    axes.axhline(_SHARE, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("duration of an operation (us)")
    axes.set_ylabel("share of the speed of a loop in the actor")
    axes.legend()
    figure.savefig(file)
