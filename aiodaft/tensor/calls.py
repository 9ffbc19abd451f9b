"""The values of calls to all workers, or the error that caused the others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from aiodaft.exceptions import DaftError, OutcomeUnknown
from aiodaft.ref import Ref
from aiodaft.tensor.worker import Refused

__all__ = ["gravity", "values_of"]


async def values_of(refs: Iterable[Ref[Any]]) -> list[Any]:
    """The values of calls.

    Raises:
        Exception: The error that caused the others.
    """
    waits = asyncio.gather(*refs, return_exceptions=True)
    try:
        values = await asyncio.shield(waits)
    except asyncio.CancelledError:
        # As `Refs` does: tasks that are cancelled before they have begun to wait would leave the calls as they are.
        waits.cancel()
        await waits
        raise
    if errors := [one for one in values if isinstance(one, BaseException)]:
        raise min(errors, key=gravity)
    return values


def gravity(error: BaseException) -> int:
    """The error of an operation or a death comes before those that follow from it."""
    if isinstance(error, OutcomeUnknown):
        return 0
    if isinstance(error, Refused):
        return 2
    return 3 if isinstance(error, DaftError) else 1
