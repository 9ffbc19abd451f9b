"""The life of a stream at its consumer: the items that came, the code that takes them, and the producer's credit. Pure.

OPEN --END--> ENDED       the producer ended: the items that are left, then its error, can still be taken
  |             |
LEAVE         LEAVE
  v             v
CLOSING --END-> CLOSED    the consumer left: items are dropped, and a producer that runs is cancelled
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Final, Generic, TypeVar

ItemT = TypeVar("ItemT")

# Items that the producer may be ahead of the consumer.
CREDIT_WINDOW: Final = 16


class Phase(Enum):
    OPEN = "items arrive and are taken"
    ENDED = "no more items arrive"
    CLOSING = "no more items are taken; the producer was told"
    CLOSED = "both"

    # In C, unlike that of Enum: it is looked up for each value.
    __hash__ = object.__hash__


class Event(Enum):
    END = "the producer ended"
    LEAVE = "the consumer left"

    __hash__ = object.__hash__


_NEXT: Final = {
    (Phase.OPEN, Event.END): Phase.ENDED,
    (Phase.OPEN, Event.LEAVE): Phase.CLOSING,
    (Phase.ENDED, Event.LEAVE): Phase.CLOSED,
    (Phase.CLOSING, Event.END): Phase.CLOSED,
}

OVER: Final = (Phase.ENDED, Phase.CLOSED)
LEFT: Final = (Phase.CLOSING, Phase.CLOSED)


class Consumption(Generic[ItemT]):
    """One stream, as its consumer sees it.

    Attributes:
        taking: Tasks that wait for an item or open one.
        opening: A task opens the first item. It stays the first until then: a cancelled consumer leaves it to the next
            one, in its place.
        left: Why the last loop was over before the producer was.
    """

    def __init__(self) -> None:
        self.phase = Phase.OPEN
        self.taking = 0
        self.opening = False
        self.left: str | None = None
        self._items: deque[ItemT] = deque()
        self._error: BaseException | None = None
        self._loops: set[object] = set()
        self._taken = 0

    @property
    def error(self) -> BaseException | None:
        return self._error

    @property
    def is_over(self) -> bool:
        return self.phase in OVER

    def add(self, item: ItemT) -> bool:
        """Returns whether code can take the item."""
        if self.phase in LEFT:
            return False
        self._items.append(item)
        return True

    def end(self, error: BaseException | None) -> bool:
        if not self._handle(Event.END):
            return False
        self._error = error
        return True

    def first(self) -> ItemT | None:
        """None if there is no item, or another task opens it. The caller then sets `opening`."""
        return self._items[0] if self._items and not self.opening else None

    @property
    def is_used_up(self) -> bool:
        return not self._items and self.phase is not Phase.OPEN

    def why_no_more(self) -> BaseException:
        """The exception that the consumer gets instead of an item; the producer's error once."""
        error, self._error = self._error, None
        return StopAsyncIteration() if error is None or self.phase in LEFT else error

    def take(self, item: ItemT) -> int:
        """Returns the credit to give: half a window at a time, so in few messages."""
        if self._items and self._items[0] is item:
            self._items.popleft()
        self._taken += 1
        if self._taken < CREDIT_WINDOW // 2 or self.phase in OVER:
            return 0
        credit, self._taken = self._taken, 0
        return credit

    def leave(self) -> bool:
        """Returns whether a producer runs that is to be told."""
        if not self._handle(Event.LEAVE):
            return False
        self._items.clear()
        return self.phase is Phase.CLOSING

    def begin_loop(self, loop: object) -> None:
        self._loops.add(loop)

    def end_loop(self, loop: object, why: str) -> bool:
        """An `async for` is over; False if that is known. If no other code takes items, the stream is over with it."""
        if loop not in self._loops:
            return False
        self._loops.remove(loop)
        if not (self._loops or self.taking or self.phase in LEFT or (self.is_over and not self._items)):
            # At once, before the loop's next turn: code that takes another item must not get one by chance.
            self.left = why
        return True

    def _handle(self, event: Event) -> bool:
        phase = _NEXT.get((self.phase, event))
        self.phase = phase or self.phase
        return phase is not None
