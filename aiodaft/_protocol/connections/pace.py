"""Whether one process polls for messages or sleeps until it is woken. Time comes as an argument; no clock, no I/O.

Polling finds an answer within microseconds; a wake-up takes tens of microseconds. Polling pays only while answers come
soon on average, there is a second processor, and no actor's thread of this process runs, because polling takes the GIL.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

# Seconds of polling after the last message, and the longest average gap between messages at which polling pays: the
# time of a step with a megabyte.
POLL: Final = 300e-6
# Seconds of polling before this process yields the processor between looks.
ALONE: Final = 10e-6
# If yielding takes more seconds than this, another process ran.
SWITCH: Final = 3e-6
# If it takes more than this, others use up their time slices: a wake-up would have come sooner.
SLICE: Final = 100e-6
# Longer gaps count as this many seconds.
_LONG: Final = 1e-3
_NEVER: Final = float("-inf")
# Weight of a new gap in the average.
_WEIGHT: Final = 1 / 8


class Idle(Enum):
    """The next action of a process that found no message."""

    LOOK = "look again in the next turn of the loop"
    YIELD = "let other processes run before that"
    SLEEP = "wait until it is woken"


class Pace:
    """The times of one process's messages.

    Attributes:
        may_poll: There is a second processor.
        since: The time of the last message, sent or received.
        threads: Jobs that run on actors' threads.
        crowded: Another process wants the processor.
    """

    def __init__(self, *, may_poll: bool) -> None:
        self.may_poll = may_poll
        self.since = 0.0
        self.threads = 0
        # The average gap from one message to the next one received.
        self._gap = 0.0
        self.crowded = False

    def came(self, now: float) -> None:
        gap = now - self.since
        self.since = now
        self._gap += ((gap if gap < _LONG else _LONG) - self._gap) * _WEIGHT

    def idle(self, now: float) -> Idle:
        """The next action after a turn in which nothing came."""
        if not self.may_poll or self.threads or self._gap >= POLL or now - self.since >= POLL:
            return Idle.SLEEP
        return Idle.YIELD if self.crowded or now - self.since > ALONE else Idle.LOOK

    def yielded(self, seconds: float) -> None:
        """Other processes could run for so long; one that ran may be about to answer."""
        self.crowded = seconds > SWITCH
        if seconds > SLICE:
            # Sleep at the next look, and let it count as a long gap.
            self.since = _NEVER
