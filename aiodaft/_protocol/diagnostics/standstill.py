"""Whether a process makes progress, judged by changes between looks at it. No clock, no I/O.

A process that is stopped, or waits for ever, does not change; a slow process does.
Looks are counted, not seconds, so that a blocked watcher does not blame the process.
"""

from __future__ import annotations

import enum
from typing import Final

# Looks in a row without a change.
_SUSPECT: Final = 5
_LOST: Final = 30
# Looks in all, at a process that is busy and does not end.
_SLOW: Final = 60
_ENDLESS: Final = 600


class Verdict(enum.Enum):
    """The result of the looks."""

    WAIT = enum.auto()
    REPORT = enum.auto()
    GIVE_UP = enum.auto()


class Standstill:
    """The looks at one process since its last answer."""

    def __init__(self) -> None:
        self.looks = 0
        self._unchanged = 0
        self._last: object = None

    def look(self, signs: object) -> Verdict:
        """Take the signs of life of the process, which are equal to the last ones if it has done nothing since."""
        self.looks += 1
        self._unchanged = self._unchanged + 1 if signs == self._last else 0
        self._last = signs
        if self._unchanged >= _LOST or self.looks >= _ENDLESS:
            return Verdict.GIVE_UP
        return Verdict.REPORT if self._unchanged == _SUSPECT or self.looks == _SLOW else Verdict.WAIT
