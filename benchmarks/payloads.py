"""Large values, from actor to actor and from the controller to an actor, and their effect on the event loops."""

from __future__ import annotations

import asyncio
from functools import partial
from statistics import median
from typing import Final

from aiodaft.runtime import Runtime

from .actors import Holder, payload
from .floors import Copy, open_echo
from .results import Bench, seconds_of_one
from .stalls import Watch

_KIB: Final = 1 << 10
_MIB: Final = 1 << 20
_SMALL_REPEATS: Final = 50


async def run(bench: Bench) -> None:
    """Measure payloads."""
    async with Runtime() as rt, open_echo() as bare:
        for size in (_KIB, _MIB, 64 * _MIB, 256 * _MIB):
            a, b = await rt.spawn(Holder), await rt.spawn(Holder)
            await a.prepare(size)
            moves = {
                "actor to actor": partial(_pass, a, b, size),
                "controller to actor": partial(a.take, payload(size)),
            }
            for name, move in moves.items():
                if size < _MIB:
                    ours = partial(seconds_of_one, move, _SMALL_REPEATS)
                    floor = partial(bare.round_trip, _SMALL_REPEATS, b"\x01" * size)
                    await bench.compare(f"{size // _KIB} KiB, {name}", ours, floor, "bare echo of as much")
                else:
                    ours, copy = partial(seconds_of_one, move, 1), Copy(size).seconds
                    name = f"{size // _MIB} MiB, {name}"
                    budget = ">= 0.7" if name == "64 MiB, actor to actor" else ""
                    await bench.compare(name, ours, copy, "one memcpy", budget, size=size)
            await rt.stop(a)
            await rt.stop(b)
        here, there = await _stalls(await rt.spawn(Holder), max(3, bench.turns // 2))
        bench.add("loop stall, 256 MiB out and in, controller", here * 1e3, "ms", "<= 5.0")
        bench.add("loop stall, 256 MiB out and in, actor", there * 1e3, "ms", "<= 5.0")


async def _pass(a: Holder, b: Holder, size: int) -> None:
    await b.take(a.give(size))


async def _stalls(actor: Holder, turns: int) -> tuple[float, float]:
    """Seconds of the longest stalls of this loop and of an actor's while 256 MiB go there and back."""
    size = 256 * _MIB
    await actor.prepare(size)
    value = payload(size)
    stalls: list[tuple[float, float]] = []
    for _ in range(turns):
        await actor.watch()
        watch = Watch(asyncio.get_running_loop())
        await actor.take(value)
        await actor.give(size)
        stalls.append((watch.stop(), await actor.longest_stall()))
    here, there = zip(*stalls, strict=True)
    return median(here), median(there)
