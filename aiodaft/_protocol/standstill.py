"""Whether a process gets on with what it has to do, judged by what changes from look to look. No clock, no I/O.

A process that is stopped, or that waits for something that never comes, does not change; one that is slow does.
Looks are counted and not seconds: a watcher that was held up itself must not blame the process for that.
"""

from __future__ import annotations

import enum
from typing import Final

# Looks in a row that see no change.
_SUSPECT: Final = 5
_LOST: Final = 30
# Looks in all, for a process that is busy and comes to no end.
_SLOW: Final = 60
_ENDLESS: Final = 600


class Verdict(enum.Enum):
    """What the looks have come to."""

    WAIT = enum.auto()
    REPORT = enum.auto()
    GIVE_UP = enum.auto()


class Standstill:
    """The looks at one process since it was last heard of."""

    def __init__(self) -> None:
        self.looks = 0
        self._unchanged = 0
        self._last: object = None

    def look(self, signs: object) -> Verdict:
        """Take what can be seen of the process: equal to what was seen last if it has done nothing since."""
        self.looks += 1
        self._unchanged = self._unchanged + 1 if signs == self._last else 0
        self._last = signs
        if self._unchanged >= _LOST or self.looks >= _ENDLESS:
            return Verdict.GIVE_UP
        return Verdict.REPORT if self._unchanged == _SUSPECT or self.looks == _SLOW else Verdict.WAIT
