"""Calls: round trips, many under way, fan-out, and a chain through three actors."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial

from aiodaft.group import Group
from aiodaft.runtime import Runtime

from .actors import Echo
from .floors import Echo as BareEcho
from .floors import apart, open_echo
from .results import Bench, rate, seconds_of_one


async def run(bench: Bench) -> None:
    """Measure calls."""
    async with Runtime() as rt, AsyncExitStack() as stack:
        bare = [await stack.enter_async_context(open_echo()) for _ in range(8)]
        a, b, c = [await rt.spawn(Echo) for _ in range(3)]
        with apart(await a.pid(), bare[0].pid):
            for kind, method, budget in (("async def", a.on_loop, "<= 2.0"), ("def", a.on_thread, "<= 4.0")):
                ours, floor = partial(seconds_of_one, method, 200), partial(bare[0].round_trip, 200)
                await bench.compare(f"{kind} method, round trip", ours, floor, "bare echo", budget)
            # The bare echo answers without an order, a window, a task or a deadline. Quiet machines: 0.31 to 0.46.
            ours, floor = partial(rate, partial(a.on_loop, 1), 20_000, 1000), partial(bare[0].pipelined, 20_000, 1000)
            await bench.compare("1,000 calls in flight", ours, floor, "bare echo", ">= 0.3", unit="1/s")
        for width in (1, 2, 4, 8):
            await _fan_out(bench, await rt.group(width, Echo), bare[:width])

        async def three() -> float:
            return 3 * await bare[0].round_trip(50)

        chain = partial(seconds_of_one, lambda: c.on_loop(b.on_loop(a.on_loop(1))), 50)
        await bench.compare("chain A -> B -> C", chain, three, "three bare echoes")


async def _fan_out(bench: Bench, group: Group[Echo], bare: list[BareEcho]) -> None:
    ours = partial(seconds_of_one, partial(group.all, Echo.on_loop), 50)
    floor = partial(seconds_of_one, lambda: asyncio.gather(*(echo.call() for echo in bare)), 50)
    await bench.compare(f"one call to each of {len(bare)}", ours, floor, "bare echoes")
