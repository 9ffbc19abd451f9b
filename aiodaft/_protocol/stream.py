"""The life of a stream at its consumer, and the credit that it gives to the producer. Pure.

OPEN --END--> ENDED       the producer ended: the items that are left, then its error, can still be taken
  |             |
LEAVE         LEAVE
  v             v
CLOSING --END-> CLOSED    the consumer left: items are dropped, and a producer that runs is cancelled
"""

from __future__ import annotations

from enum import Enum
from typing import Final

# How many items the producer may be ahead of the consumer.
CREDIT_WINDOW: Final = 16


class Phase(Enum):
    """How far a stream is."""

    OPEN = "items arrive and are taken"
    ENDED = "no more items arrive"
    CLOSING = "no more items are taken; the producer was told"
    CLOSED = "both"

    # In C, unlike that of Enum: it is looked up for each value.
    __hash__ = object.__hash__


class Event(Enum):
    """What changes the phase."""

    END = "the producer ended"
    LEAVE = "the consumer left"

    # In C, unlike that of Enum: it is looked up for each value.
    __hash__ = object.__hash__


# A second END or LEAVE changes nothing.
_NEXT: Final = {
    (Phase.OPEN, Event.END): Phase.ENDED,
    (Phase.OPEN, Event.LEAVE): Phase.CLOSING,
    (Phase.ENDED, Event.LEAVE): Phase.CLOSED,
    (Phase.CLOSING, Event.END): Phase.CLOSED,
}

# The producer ended.
OVER: Final = (Phase.ENDED, Phase.CLOSED)
# The consumer left.
LEFT: Final = (Phase.CLOSING, Phase.CLOSED)


class Consumption:
    """One stream, as its consumer sees it.

    Attributes:
        phase: How far the stream is.
    """

    def __init__(self) -> None:
        self.phase = Phase.OPEN
        # Items taken and not credited yet.
        self._taken = 0

    @property
    def is_over(self) -> bool:
        """Whether the producer ended."""
        return self.phase in OVER

    @property
    def is_left(self) -> bool:
        """Whether the consumer left."""
        return self.phase in LEFT

    def handle(self, event: Event) -> bool:
        """Change the phase; False if the event came before."""
        phase = _NEXT.get((self.phase, event))
        self.phase = phase or self.phase
        return phase is not None

    def take(self) -> int:
        """The consumer took an item. Returns the credit to give: half a window at a time, so in few messages."""
        self._taken += 1
        if self._taken < CREDIT_WINDOW // 2 or self.phase in OVER:
            return 0
        credit, self._taken = self._taken, 0
        return credit
