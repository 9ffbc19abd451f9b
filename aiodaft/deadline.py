"""Deadlines that travel with calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

from aiodaft._protocol.numbers import is_number
from aiodaft._runtime.platform.context import current_terms, deadline_of, terms_of, trace_of, under
from aiodaft.exceptions import DaftError, DeadlineExceeded

__all__ = ["deadline"]

# Ten years: timers and the wire have room for it.
_FOR_EVER: Final = 10 * 365 * 86400.0


@asynccontextmanager
async def deadline(seconds: float) -> AsyncGenerator[None, None]:
    """Give the block so many seconds, and every call made inside, at any depth, the time that is left.

    Of nested deadlines the earliest counts. Unlike with `asyncio.timeout`, which ends only the waiting task, the actors
    know the deadline: a call that is queued when it passes never starts, a running call is cancelled. The error comes
    when the call's cleanup has run, or the grace time is over.

    Raises:
        DeadlineExceeded: The time is over; also a TimeoutError. If the block awaited a call, the message names it, and
            `.executed` is that of the call.
        ValueError: `seconds` is negative, or no number. Infinity is one: the block gets what an outer deadline leaves.
    """
    loop = asyncio.get_running_loop()
    terms = current_terms.get()
    outer = deadline_of(terms)
    if not is_number(seconds, most=float("inf")):
        raise ValueError(f"a deadline is a number of seconds that is not negative, not {seconds!r}")
    seconds = min(seconds, _FOR_EVER)
    when = loop.time() + seconds
    scope = asyncio.timeout(seconds)
    try:
        with under(terms_of(when if outer is None else min(outer, when), trace_of(terms))):
            async with scope:
                yield
    except TimeoutError as error:
        if not scope.expired() or isinstance(error, DeadlineExceeded):
            raise
        late = f"not done within {seconds:g} s"
        # The cancellation of an awaited call says how the call ended.
        call = None if error.__context__ is None else error.__context__.__cause__
        if isinstance(call, DaftError):
            raise DeadlineExceeded(f"{late}: {call}", executed=call.executed) from error
        raise DeadlineExceeded(late) from error
