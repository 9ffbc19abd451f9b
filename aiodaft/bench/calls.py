"""Calls: round trips, many under way, fan-out, and a chain through three actors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Final

from aiodaft.runtime import Runtime

from .actors import Echo
from .floors import Echo as BareEcho
from .floors import apart, open_echo
from .results import Result, compare_times, in_turns, rate, seconds_of_one

_IN_FLIGHT: Final = 1000


async def run(turns: int) -> list[Result]:
    """Measure calls."""
    results: list[Result] = []
    async with Runtime() as rt, open_echo() as bare:
        actor = await rt.spawn(Echo)
        with apart(await actor.pid(), bare.pid):
            results.append(await _round_trip("async def method, round trip", actor.on_loop, bare, turns, "<= 2.0"))
            results.append(await _round_trip("def method, round trip", actor.on_thread, bare, turns, "<= 4.0"))
            results.append(await _pipelined(actor, bare, turns))
    results += [await _fan_out(width, turns) for width in (1, 2, 4, 8)]
    return [*results, await _chain(turns)]


async def _round_trip(
    name: str, method: Callable[[], Awaitable[object]], bare: BareEcho, turns: int, budget: str
) -> Result:
    repeats = 200

    async def ours() -> float:
        return await seconds_of_one(method, repeats)

    await ours()
    return await compare_times(name, ours, lambda: bare.round_trip(repeats), "bare echo", turns, budget)


async def _pipelined(actor: Echo, bare: BareEcho, turns: int) -> Result:
    count = 20_000

    async def ours() -> float:
        return await rate(lambda: actor.on_loop(1), count, _IN_FLIGHT)

    await ours()
    mine, floor, ratio = await in_turns(ours, lambda: bare.pipelined(count, _IN_FLIGHT), turns)
    # The bare echo answers without an order, a window, a task or a deadline. Quiet machines measured 0.31 to 0.46.
    return Result("1,000 calls in flight", mine, "1/s", floor, "bare echo", ratio, ">= 0.3")


async def _fan_out(width: int, turns: int) -> Result:
    repeats = 50
    async with Runtime() as rt, AsyncExitStack() as stack:
        group = await rt.group(width, Echo)
        bare = [await stack.enter_async_context(open_echo()) for _ in range(width)]

        async def ours() -> float:
            return await seconds_of_one(lambda: group.all(Echo.on_loop), repeats)

        async def floor() -> float:
            return await seconds_of_one(lambda: asyncio.gather(*(echo.call() for echo in bare)), repeats)

        await ours()
        return await compare_times(f"one call to each of {width}", ours, floor, "bare echoes", turns)


async def _chain(turns: int) -> Result:
    repeats = 50
    async with Runtime() as rt, open_echo() as bare:
        a, b, c = [await rt.spawn(Echo) for _ in range(3)]

        async def ours() -> float:
            return await seconds_of_one(lambda: c.on_loop(b.on_loop(a.on_loop(1))), repeats)

        async def floor() -> float:
            return 3 * await bare.round_trip(repeats)

        await ours()
        return await compare_times("chain A -> B -> C", ours, floor, "three bare echoes", turns)
