"""Deadlines that travel with calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Final

from aiodaft._protocol.numbers import is_number
from aiodaft._runtime.platform.tasks import current_terms, deadline_of, exceeded, terms_of, trace_of, under
from aiodaft.exceptions import DeadlineExceeded

__all__ = ["deadline"]

# Ten years: timers and the wire have room for it.
_FOR_EVER: Final = 10 * 365 * 86400.0


class deadline:  # noqa: N801 - reads as a word of the language: `async with deadline(5)`
    """Give a block so many seconds, and every call made inside, at any depth, the time that is left.

    Of nested deadlines the earliest counts. Unlike with `asyncio.timeout`, which ends only the waiting task, the actors
    know the deadline: a call that is queued when it passes never starts, a running call is cancelled. The error comes
    when the call's cleanup has run, or the grace time is over.

    In a thread that runs no event loop, such as that of a `def` method, `with aiodaft.deadline(5):` does the same for
    calls and for `ref.result()`. It interrupts nothing else.

    Raises:
        DeadlineExceeded: The time is over; also a TimeoutError. If the block awaited a call, the message names it, and
            `.executed` is that of the call.
        ValueError: `seconds` is negative, or no number. Infinity is one: the block gets the rest of an outer deadline.
        RuntimeError: It is used by `with` where an event loop runs.
    """

    __slots__ = ("_block", "_seconds", "_under")

    def __init__(self, seconds: float) -> None:
        if not is_number(seconds, most=float("inf")):
            raise ValueError(f"a deadline is a number of seconds that is not negative, not {seconds!r}")
        self._seconds = min(seconds, _FOR_EVER)

    async def __aenter__(self) -> None:
        self._block = _block(self._seconds)
        await self._block.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> bool | None:
        return await self._block.__aexit__(kind, error, frames)

    def __enter__(self) -> None:
        if asyncio._get_running_loop() is not None:
            raise RuntimeError(f"this thread runs an event loop: use `async with aiodaft.deadline({self._seconds:g})`")
        # Not the clock of the loop, which in another thread may show when the loop woke last.
        self._under = _until(time.monotonic() + self._seconds)
        self._under.__enter__()

    def __exit__(self, *error: object) -> None:
        self._under.__exit__()


def _until(when: float) -> under:
    """A block with this deadline, or an earlier one around it."""
    terms = current_terms.get()
    outer = deadline_of(terms)
    return under(terms_of(when if outer is None else min(outer, when), trace_of(terms)))


@asynccontextmanager
async def _block(seconds: float) -> AsyncGenerator[None, None]:
    scope = asyncio.timeout(seconds)
    try:
        with _until(asyncio.get_running_loop().time() + seconds):
            async with scope:
                yield
    except TimeoutError as error:
        if not scope.expired() or isinstance(error, DeadlineExceeded):
            raise
        raise exceeded(f"not done within {seconds:g} s", error) from error
