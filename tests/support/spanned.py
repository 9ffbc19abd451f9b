"""Actors whose calls are spans."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Generator

import aiodaft
from aiodaft import Actor, method


class Unprintable(Exception):
    """An error that no log can print."""

    def __str__(self) -> str:
        raise RuntimeError("it has no text")


class Worker(Actor):
    @method
    def double(self, x: bytes) -> bytes:
        return x + x

    @method
    async def ask(self, other: Worker, x: bytes) -> int:
        return len(await other.double(x))

    @method
    async def fail(self) -> None:
        raise ValueError("it must fail")

    @method
    async def fail_unprintably(self) -> None:
        raise Unprintable

    @method
    async def hold(self) -> None:
        await asyncio.get_running_loop().create_future()

    @method
    async def count(self, to: int) -> AsyncGenerator[int]:
        for number in range(to):
            yield number

    @method
    def steps(self, to: int) -> Generator[int]:
        yield from range(to)

    @method
    async def ids(self) -> tuple[str, str, str]:
        """The trace as code of the actor, and a library in it, know it."""
        from opentelemetry import baggage, trace

        here, known = aiodaft.telemetry.current_trace_context(), trace.get_current_span().get_span_context()
        assert here is not None
        assert (here.trace_id, here.span_id) == (f"{known.trace_id:032x}", f"{known.span_id:016x}")
        return here.trace_id, here.span_id, str(baggage.get_baggage("user"))

    @method
    async def user(self) -> str:
        from opentelemetry import baggage

        return str(baggage.get_baggage("user"))

    @method
    async def rank(self) -> int:
        return aiodaft.current_group().rank

    @method
    async def loaded(self) -> bool:
        return any(name.startswith("opentelemetry") for name in sys.modules)
