"""Many of each kind on one machine: the cost of one of many, against that of one of few."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from aiodaft.runtime import Runtime

from .actors import Echo, Worker
from .results import Bench, Result, in_turns, timed

_FLAT: Final = "<= 1.5"
_HOSTS: Final = 4
_ITEMS: Final = 10

Work = Callable[[int], Awaitable[None]]


async def run(bench: Bench, share: float = 1.0) -> None:
    """Measure scale; `share` makes all counts smaller."""
    turns = max(1, bench.turns // 3)

    async def flat(name: str, work: Work, few: int, many: int, turns: int = turns) -> None:
        few, many = _part(few, share), _part(many, share)
        await work(few)

        async def each(count: int) -> float:
            return await timed(work(count)) / count * 1e6

        mine, theirs, ratio = await in_turns(partial(each, many), partial(each, few), turns)
        bench.results.append(Result(f"{many:,} {name}, each", mine, "us", theirs, f"{few:,}", ratio, _FLAT))

    await flat("actors that share 4 processes", _guests, 100, 1_000)
    await flat("processes", _processes, 20, 200, turns=1)
    async with Runtime() as rt:
        one, other = await rt.spawn(Echo), await rt.spawn(Worker)
        await flat("calls in flight", partial(_calls, one), 1_000, 100_000)
        bench.results.append(await _memory(one, _part(10_000, share), _part(100_000, share), turns))
        await flat("refs in one argument", partial(_refs, one, other), 100, 10_000)
        await flat("streams of 10 items", partial(_streams, other), 10, 1_000)


def _part(count: int, share: float) -> int:
    return max(2, int(count * share))


async def _guests(count: int) -> None:
    """Actors that come, are called, and go."""
    async with Runtime() as rt:
        hosts = [await rt.spawn(Echo) for _ in range(_HOSTS)]
        guests = await asyncio.gather(*(rt.on(with_=hosts[n % _HOSTS]).spawn(Echo) for n in range(count)))
        await asyncio.gather(*(guest.on_loop() for guest in guests))


async def _processes(count: int) -> None:
    async with Runtime() as rt, rt.group(count, Echo) as group:
        await group.all(Echo.on_loop)


async def _calls(actor: Echo, count: int) -> None:
    for ref in [actor.on_loop(number) for number in range(count)]:
        await ref


async def _refs(one: Echo, other: Worker, count: int) -> None:
    """Values of one actor that another one takes."""
    refs: list[Any] = [one.on_loop(number) for number in range(count)]
    await other.gather(refs)


async def _streams(actor: Worker, count: int) -> None:
    async def consume() -> None:
        async for _ in actor.items(_ITEMS):
            pass

    await asyncio.gather(*(consume() for _ in range(count)))


async def _memory(actor: Echo, few: int, many: int, turns: int) -> Result:
    """The memory of a call in flight, in the controller."""

    async def each(count: int) -> float:
        tracemalloc.start()
        refs = [actor.on_loop(number) for number in range(count)]
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        await asyncio.gather(*refs)
        return taken / count

    await each(few)
    mine, floor, ratio = await in_turns(partial(each, many), partial(each, few), turns)
    return Result(f"{many:,} calls in flight, memory of each", mine, "B", floor, f"{few:,}", ratio, _FLAT)
