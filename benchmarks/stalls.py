"""The time for which an event loop stood still."""

from __future__ import annotations

import asyncio
import time
from typing import Final

_TICK: Final = 0.001


class Watch:
    """Ticks every millisecond, and notes the longest time between two ticks beyond that."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._longest = 0.0
        self._last = time.perf_counter()
        self._timer = loop.call_later(_TICK, self._tick)

    def _tick(self) -> None:
        self._note()
        self._timer = self._loop.call_later(_TICK, self._tick)

    def _note(self) -> None:
        # The loop's own clock may count in milliseconds.
        now = time.perf_counter()
        self._longest = max(self._longest, now - self._last - _TICK)
        self._last = now

    def stop(self) -> float:
        """Seconds of the longest stall."""
        self._timer.cancel()
        self._note()
        return self._longest
