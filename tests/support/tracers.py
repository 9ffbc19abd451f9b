"""Actors that say which trace their calls are part of."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any

import aiodaft
from aiodaft import Actor, method


def trace_here() -> str | None:
    """The id of the trace of the running code, with its baggage."""
    trace = aiodaft.telemetry.current_trace_context()
    return None if trace is None else trace.trace_id + trace.baggage


class Tracer(Actor):
    def __init__(self) -> None:
        self.told: list[str | None] = []

    @method
    async def trace(self, *needed: Any) -> str | None:
        return trace_here()

    @method
    def trace_on_thread(self) -> str | None:
        return trace_here()

    @method
    async def traces(self, count: int) -> AsyncGenerator[str | None]:
        for _ in range(count):
            yield trace_here()

    @method
    async def note(self) -> None:
        self.told.append(trace_here())

    @method
    async def notes(self) -> list[str | None]:
        return self.told

    @method
    async def ask(self, other: Tracer) -> list[str | None]:
        """The traces of calls that an `async def` method makes."""
        return [trace_here(), await other.trace(), await other.trace_on_thread(), await other.ask_on_thread(None)]

    @method
    def ask_on_thread(self, other: Tracer | None) -> str | None:
        """The trace of a call that a `def` method makes."""
        return trace_here() if other is None else other.trace().result()

    @method
    async def log(self) -> None:
        logging.getLogger("users.module").warning("logged in a trace")
