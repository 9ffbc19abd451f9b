"""Workflows of five hops over four actors: handed on from actor to actor, next to the same driven by the controller."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from aiodaft.runtime import Runtime

from .actors import Stage
from .results import Bench, timed

_HOPS: Final = 5


async def run(bench: Bench, count: int = 2_000) -> None:
    """Measure workflows, so many of them under way at the same time."""
    async with Runtime() as rt:
        stages = [await rt.spawn(Stage) for _ in range(4)]
        await asyncio.gather(*(stage.meet(stages) for stage in stages))
        ours, driven = partial(_handed_on, stages, count), partial(_driven, stages, count)
        name = f"{count:,} workflows of {_HOPS} hops"
        await bench.compare(name, ours, driven, "driven by the controller", ">= 2.0", unit="1/s")
        before = rt.traffic()
        await _handed_on(stages, count)
        after = rt.traffic()
        messages = after.messages_sent + after.messages_received - before.messages_sent - before.messages_received
        bench.add("  messages to and from the controller", messages, "of one run", "<= 50")


async def _handed_on(stages: list[Stage], count: int) -> float:
    shares = [list(range(place, count, len(stages))) for place in range(len(stages))]
    work = asyncio.gather(*(stage.run(share, _HOPS) for stage, share in zip(stages, shares, strict=True)))
    return count / await timed(work)


async def _driven(stages: list[Stage], count: int) -> float:
    async def one(name: int) -> None:
        for hop in range(_HOPS):
            await stages[(name + hop) % len(stages)].hop(name)

    return count / await timed(asyncio.gather(*map(one, range(count))))
