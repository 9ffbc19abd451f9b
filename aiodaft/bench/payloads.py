"""Large values, from actor to actor and from the controller to an actor, and what they do to the event loops."""

from __future__ import annotations

import asyncio
from functools import partial
from statistics import median
from typing import Final

from aiodaft.runtime import Runtime

from .actors import Holder, payload
from .floors import Copy, open_echo
from .results import Result, Sample, compare_speeds, compare_times, seconds_of_one, timed
from .stalls import Watch

_KIB: Final = 1 << 10
_MIB: Final = 1 << 20
_STALL_BUDGET_MS: Final = "<= 5.0"


async def run(turns: int) -> list[Result]:
    """Measure payloads."""
    async with Runtime() as rt:
        results = await _small(rt, turns)
        for size in (_MIB, 64 * _MIB, 256 * _MIB):
            a, b = await rt.spawn(Holder), await rt.spawn(Holder)
            results.append(await _between_actors(a, b, size, turns))
            results.append(await _from_here(a, size, turns))
            await rt.stop(a)
            await rt.stop(b)
        return results + await _stalls(rt, turns)


async def _small(rt: Runtime, turns: int) -> list[Result]:
    repeats = 50
    a, b = await rt.spawn(Holder), await rt.spawn(Holder)
    await a.prepare(_KIB)

    value = payload(_KIB)
    content = b"\x01" * _KIB

    async def between() -> float:
        return await seconds_of_one(lambda: b.take(a.give(_KIB)), repeats)

    async def from_here() -> float:
        return await seconds_of_one(lambda: a.take(value), repeats)

    results: list[Result] = []
    async with open_echo() as bare:
        for name, ours in (("1 KiB, actor to actor", between), ("1 KiB, controller to actor", from_here)):
            await ours()
            floor = partial(bare.round_trip, repeats, content)
            results.append(await compare_times(name, ours, floor, "bare echo of as much", turns))
    return results


async def _between_actors(a: Holder, b: Holder, size: int, turns: int) -> Result:
    await a.prepare(size)

    async def ours() -> float:
        return await timed(b.take(a.give(size)))

    return await _against_a_copy(f"{size // _MIB} MiB, actor to actor", ours, size, turns)


async def _from_here(a: Holder, size: int, turns: int) -> Result:
    value = payload(size)

    async def ours() -> float:
        return await timed(a.take(value))

    return await _against_a_copy(f"{size // _MIB} MiB, controller to actor", ours, size, turns)


async def _against_a_copy(name: str, ours: Sample, size: int, turns: int) -> Result:
    copy = Copy(size)
    for _ in range(3):
        # The first ones fill the pools.
        await ours()
        await copy.seconds()
    budget = ">= 0.7" if size == 64 * _MIB and "actor to actor" in name else ""
    return await compare_speeds(name, size, ours, copy.seconds, "one memcpy", turns, budget)


async def _stalls(rt: Runtime, turns: int) -> list[Result]:
    """The longest stalls of this loop and of an actor's while 256 MiB go there and back."""
    size = 256 * _MIB
    actor = await rt.spawn(Holder)
    await actor.prepare(size)
    value = payload(size)
    here: list[float] = []
    there: list[float] = []
    for _ in range(max(3, turns // 2)):
        await actor.watch()
        watch = Watch(asyncio.get_running_loop())
        await actor.take(value)
        await actor.give(size)
        here.append(watch.stop())
        there.append(await actor.longest_stall())
    return [
        Result("loop stall, 256 MiB out and in, controller", median(here) * 1e3, "ms", budget=_STALL_BUDGET_MS),
        Result("loop stall, 256 MiB out and in, actor", median(there) * 1e3, "ms", budget=_STALL_BUDGET_MS),
    ]
