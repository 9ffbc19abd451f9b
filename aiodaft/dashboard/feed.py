"""Looks at a runtime for the pages that are open: not more often than once a period, and not at all for none."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final, NamedTuple

from aiodaft._protocol.diagnostics.printing import cut
from aiodaft._runtime.logs.entries import Line
from aiodaft._runtime.logs.log_files import Recent, Said
from aiodaft.dashboard.frames import Plain, frame_of
from aiodaft.exceptions import RuntimeClosed
from aiodaft.overview import Overview
from aiodaft.runtime import Runtime

# Characters of one entry.
_MAX_TEXT: Final = 4 << 10


def line_of(said: Said) -> Plain:
    """A line or a record: its time, actor, urgency ("" if it was printed), and text."""
    source, entry = said
    if isinstance(entry, Line):
        return {
            "at": entry.at,
            "actor": source.shown_name,
            "pid": source.pid,
            "level": "",
            "stream": entry.stream,
            "text": cut(entry.text, _MAX_TEXT),
        }
    text = str(entry["text"])
    if entry.get("exc_text"):
        text = f"{text}\n{entry['exc_text']}"
    return {
        "at": entry["created"],
        "actor": str(entry.get("actor") or source.shown_name),
        "pid": entry["process"],
        "level": str(entry["levelname"]),
        "stream": 2,
        "text": cut(text, _MAX_TEXT),
    }


# Seconds that processes get to answer.
_PATIENCE: Final = 1.0
_MAX_LINES: Final = 300
# Looks that may be missing between two of which the second tells what has happened since the first.
_MISSING: Final = 5


class Look(NamedTuple):
    """The number of a look, and the plain data of it for the pages."""

    number: int
    frame: Plain


class Feed:
    """The looks at one runtime, which all pages share.

    A page that waits for a look takes it, so one that does not read, or is gone, causes none.

    Args:
        period: Seconds between two looks.

    Raises:
        ValueError: The period is not positive.
    """

    def __init__(self, rt: Runtime, period: float) -> None:
        if not 0 < period < float("inf"):
            raise ValueError(f"period={period!r}: a positive number of seconds is needed")
        self._rt = rt
        self._period = period
        self._turn = asyncio.Lock()
        self._closed = asyncio.Event()
        self._seen: Overview | None = None
        self._last = Look(0, {})
        # On the clock of the loop.
        self._taken = float("-inf")

    def close(self) -> None:
        self._closed.set()

    def lines(self, after: int) -> tuple[int, list[Plain]]:
        """The output and log records of actors since a line with this number, and the number of the last one.

        -1 is before all. At most the last 300; none in the runtime of an actor, whose program has them.
        """
        recent = self._rt._controller.process.find(Recent)
        found = [] if recent is None else recent.after(after, _MAX_LINES)
        return (found[-1][0] if found else after), [line_of(said) for _, said in found]

    async def newer(self, number: int) -> Look:
        """A look that is newer than the one with this number, and not older than a period.

        Raises:
            RuntimeClosed: The runtime, or this, is closed.

        Cancellation: the next page that waits takes the look.
        """
        async with self._turn:
            age = asyncio.get_running_loop().time() - self._taken
            if number >= self._last.number or age > self._period:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._period - age):
                        await self._closed.wait()
                if self._closed.is_set():
                    raise RuntimeClosed("the dashboard is closed")
                await self._look()
            return self._last

    async def _look(self) -> None:
        seen, now = self._seen, asyncio.get_running_loop().time()
        self._seen = await self._rt.overview(patience=_PATIENCE)
        earlier = seen if now - self._taken < _MISSING * (self._period + _PATIENCE) else None
        self._last, self._taken = Look(self._last.number + 1, frame_of(self._seen, earlier)), now
