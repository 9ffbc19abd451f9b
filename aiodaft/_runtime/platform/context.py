"""The deadline of the code that runs, and how it travels."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Final

# Per second.
_MICROSECONDS: Final = 1e6
# The deadline of the surrounding call or `aiodaft.deadline()` block, on the loop's clock.
current_deadline: ContextVar[float | None] = ContextVar("aiodaft_current_deadline", default=None)


def time_left(deadline: float | None, clock: Callable[[], float]) -> int | None:
    """The microseconds left, for the wire; rounded up, so that a deadline passes first where it was set."""
    return None if deadline is None else max(0, math.ceil((deadline - clock()) * _MICROSECONDS))


def deadline_of(left: int, clock: Callable[[], float]) -> float:
    """The deadline on this clock, from the microseconds left that a message carried."""
    return clock() + left / _MICROSECONDS
