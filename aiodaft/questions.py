"""The answers of a running program to commands in other terminals: `aiodaft stack`, `aiodaft trace` and others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.diagnostics.attach import Answers
from aiodaft._runtime.logs.log_files import Recent, Said
from aiodaft._runtime.owning import Owner
from aiodaft.survey import look_over
from aiodaft.tracing import Trace

__all__ = ["answers", "overviews"]

# Seconds that a process gets to answer the program.
_PATIENCE: Final = 1.0
# The same, for recorded events.
_TRACE_PATIENCE: Final = 5.0


def answers(owner: Owner) -> Answers:
    """The answers of one runtime, by the names of the questions."""
    return {
        "overview": partial(overviews, owner),
        "logs": partial(_logs, owner),
        "stack": partial(_stack, owner),
        "trace": partial(_trace, owner),
        "kill": partial(_kill, owner),
    }


async def overviews(owner: Owner, *, interval: float | None = None) -> AsyncGenerator[dict[str, Any], None]:
    """Overviews as plain data, `interval` seconds apart, with `rates` from the second one on; without it, just one."""
    earlier = None
    while True:
        now = await look_over(owner, _PATIENCE)
        yield {**now.as_dict(), **({} if earlier is None else {"rates": now.rates(earlier).as_dict()})}
        if interval is None:
            return
        earlier = now
        await asyncio.sleep(interval)


async def _logs(owner: Owner, *, actor: str | None, last: int, follow: bool) -> AsyncGenerator[Any, None]:
    """The last lines and records of one actor or all, then new ones.

    Each is a JSON object as text. A number says how many are left out.
    """
    process, news, recent = owner.process, asyncio.Event(), owner.process.part(Recent)

    def of_actor(said: Iterable[Said]) -> list[Said]:
        return [one for one in said if actor is None or one.is_of(actor)]

    kept, follower = recent.follow(lambda: process.call_soon(news.set))
    try:
        wanted = of_actor(kept)
        for one in wanted[max(0, len(wanted) - last) :]:
            yield one.as_json()
        while follow:
            await news.wait()
            news.clear()
            said, dropped = follower.take()
            for one in of_actor(said):
                yield one.as_json()
            if dropped:
                yield dropped
    finally:
        recent.leave(follower)


async def _stack(owner: Owner, *, as_json: bool) -> AsyncGenerator[Any, None]:
    stack = await owner.stack(_PATIENCE)
    yield asdict(stack) if as_json else str(stack)


async def _trace(owner: Owner, path: str, seconds: float, limit: int) -> AsyncGenerator[Any, None]:
    async with Trace(owner, path, limit, _TRACE_PATIENCE) as trace:
        # It records.
        yield None  # noqa: ASYNC119 - the asker closes this
        await asyncio.sleep(seconds)
    yield {"path": trace.path, "left_out": trace.left_out, "dropped": trace.dropped}


async def _kill(owner: Owner, process: str) -> AsyncGenerator[Any, None]:
    await owner.nodes.kill(PeerId(process), "killed by `aiodaft kill`")
    yield None
