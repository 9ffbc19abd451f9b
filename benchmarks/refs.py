"""Calls that are composed through refs, each next to the same work without them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeAlias

from aiodaft.runtime import Runtime

from .actors import Echo
from .floors import Copy
from .results import Bench, seconds_of_one

_REPEATS: Final = 50
_KIB: Final = 1 << 10
_MIB: Final = 1 << 20

Method: TypeAlias = Callable[[Any], Any]
Call: TypeAlias = Callable[[], Awaitable[object]]


async def run(bench: Bench) -> None:
    """Measure calls through refs."""
    async with Runtime() as rt:
        actors = [await rt.spawn(Echo) for _ in range(8)]
        first, second, third = actors[:3]
        for kind, methods in (
            ("async def", [actor.on_loop for actor in actors[:3]]),
            ("def", [actor.on_thread for actor in actors[:3]]),
        ):
            chain, in_turn = partial(_chain, *methods), partial(_in_turn, *methods)
            await _compare(bench, f"chain A -> B -> C by refs, {kind}", chain, in_turn, "await each", "<= 0.8")
        one = first.on_loop
        three = partial(_chain, one, one, one)
        await _compare(bench, "three calls of one by refs", three, partial(one, 1), "one", "<= 1.3")

        async def three_plain() -> None:
            calls = [one(1), one(1), one(1)]
            await calls[2]

        await _compare(bench, "three plain calls of one at once", three_plain, partial(one, 1), "one", "")

        async def fan_out() -> None:
            ref = one(1)
            await asyncio.gather(*(actor.drop(ref) for actor in actors))

        async def plain_calls() -> None:
            await asyncio.gather(*(actor.drop(1) for actor in actors))

        await _compare(bench, "one ref to 8", fan_out, plain_calls, "8 plain calls", "<= 1.5")

        def passed(size: int) -> Call:
            return lambda: second.drop(first.make(size))

        async def copied() -> float:
            return 1.3 * await seconds_of_one(passed(0), _REPEATS) + 2 * await Copy(_MIB).seconds()

        await _compare(bench, "1 KiB by ref", passed(_KIB), passed(0), "an int by ref", "<= 1.3")
        large = partial(seconds_of_one, passed(_MIB), _REPEATS)
        await bench.compare("1 MiB by ref", large, copied, "1.3 ints, two memcpy", "<= 1.0")
        known = one(1)
        await known
        with_ref, plain = partial(_cpu, lambda: third.drop(known)), partial(_cpu, lambda: third.drop(1))
        await bench.compare("CPU here of a call with a ref", with_ref, plain, "plain call", "<= 1.5")


async def _chain(a: Method, b: Method, c: Method) -> None:
    await c(b(a(1)))


async def _in_turn(a: Method, b: Method, c: Method) -> None:
    await c(await b(await a(1)))


async def _compare(bench: Bench, name: str, ours: Call, floor: Call, floor_name: str, budget: str) -> None:
    samples = partial(seconds_of_one, ours, _REPEATS), partial(seconds_of_one, floor, _REPEATS)
    await bench.compare(name, *samples, floor_name, budget)


async def _cpu(call: Call) -> float:
    start = time.process_time()
    await seconds_of_one(call, _REPEATS)
    return (time.process_time() - start) / _REPEATS
