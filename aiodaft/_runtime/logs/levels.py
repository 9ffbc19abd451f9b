"""The levels of loggers, which the actors of a program share with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeAlias

# By the names of the loggers; "" is the root logger.
Levels: TypeAlias = Mapping[str, int]


def levels_here() -> dict[str, int]:
    # A copy: any thread may make loggers.
    loggers = list(logging.root.manager.loggerDict.items())
    levels = {name: one.level for name, one in loggers if isinstance(one, logging.Logger) and one.level}
    return {"": logging.root.level, **levels}


def changes(before: Levels, now: Levels) -> dict[str, int]:
    """The changed levels; NOTSET for a logger that has no level of its own any more."""
    removed = dict.fromkeys(before.keys() - now.keys(), logging.NOTSET)
    return {**removed, **{name: level for name, level in now.items() if before.get(name) != level}}


def set_levels(levels: Levels) -> None:
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


class LevelWatch:
    """Notices that the program has changed levels, which `logging` tells nobody.

    Args:
        on_change: Called with the changes.
    """

    def __init__(self, on_change: Callable[[dict[str, int]], object]) -> None:
        self._on_change = on_change
        self._known = levels_here()

    def look(self) -> None:
        now = levels_here()
        if now != self._known:
            changed, self._known = changes(self._known, now), now
            self._on_change(changed)
