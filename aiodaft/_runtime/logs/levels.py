"""The levels of loggers, which the actors of a program share with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

# Seconds between two looks: `logging` tells nobody of changes.
_PERIOD: Final = 1.0

# By the names of the loggers; "" is the root logger.
Levels: TypeAlias = Mapping[str, int]


def levels_here() -> dict[str, int]:
    """The levels that loggers of this process were given."""
    # A copy: any thread may make loggers.
    loggers = list(logging.root.manager.loggerDict.items())
    levels = {name: one.level for name, one in loggers if isinstance(one, logging.Logger) and one.level}
    return {"": logging.root.level, **levels}


def changes(before: Levels, now: Levels) -> dict[str, int]:
    """What has changed; NOTSET for a logger that has no level of its own any more."""
    removed = dict.fromkeys(before.keys() - now.keys(), logging.NOTSET)
    return {**removed, **{name: level for name, level in now.items() if before.get(name) != level}}


def set_levels(levels: Levels) -> None:
    """Give loggers of this process these levels."""
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


class LevelWatch:
    """Notices that the program has changed levels.

    Args:
        loop: The loop of this process.
        on_change: Called with what has changed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_change: Callable[[dict[str, int]], object]) -> None:
        self._loop = loop
        self._on_change = on_change
        self._known = levels_here()
        self._timer = loop.call_later(_PERIOD, self._look)

    def _look(self) -> None:
        now = levels_here()
        if now != self._known:
            changed, self._known = changes(self._known, now), now
            self._on_change(changed)
        self._timer = self._loop.call_later(_PERIOD, self._look)

    def close(self) -> None:
        """End; needs no running loop."""
        self._timer.cancel()
