"""The requests under way and those that wait, within limits."""

from __future__ import annotations

import asyncio
import gc
import math
from bisect import bisect_left
from collections import Counter
from typing import ClassVar, Final, Literal, Protocol, TypeAlias

from aiodaft._protocol.numbers import is_count
from aiodaft.exceptions import Overloaded

# The end of a request: its app answered; was refused for want of room; was answered 504 or 503 for its call; its client
# left; its app raised.
Outcome: TypeAlias = Literal["answered", "refused", "late", "lost", "left", "failed"]
OUTCOMES: Final[tuple[Outcome, ...]] = ("answered", "refused", "late", "lost", "left", "failed")
# Seconds; the last one is open.
BOUNDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, float("inf"))


class Counts:
    """Of the requests of one ingress.

    Attributes:
        durations: The number that took up to each of the bounds, without those refused or left by their clients.
        seconds: The time that these took together, their waits included.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.ended: Counter[Outcome] = Counter()
        self.waiting = 0
        self.durations = [0] * len(BOUNDS)
        self.seconds = 0.0

    def end(self, outcome: Outcome, seconds: float) -> None:
        self.ended[outcome] += 1
        if outcome not in {"refused", "left"}:
            self.durations[bisect_left(BOUNDS, seconds)] += 1
            self.seconds += seconds

    @property
    def under_way(self) -> int:
        return self.begun - self.ended.total() - self.waiting


# Python looks at 700 new containers together (2,000 from 3.12 on): with 64 requests under way, nearly all are still in
# use then, count as old, and soon have it look at everything there is.
_YOUNG: Final = 10_000


class Heap:
    """Has the garbage collector leave alone the objects that were there when a server began to answer requests.

    There is one collector in a process: it is as before when the last of several apps ends.

    Source: `gc.freeze`, which Instagram contributed to CPython for servers.
    """

    _settled: ClassVar[set[Heap]] = set()
    _before: ClassVar[tuple[int, int, int]]
    # Others have frozen nothing, which would have to stay so.
    _is_first: ClassVar[bool]

    def settle(self) -> None:
        if not Heap._settled:
            Heap._before, Heap._is_first = gc.get_threshold(), not gc.get_freeze_count()
            if young := Heap._before[0]:
                # A program that has set it to 0 wants no collections.
                gc.set_threshold(max(_YOUNG, young), *Heap._before[1:])
        Heap._settled.add(self)
        gc.collect()
        gc.freeze()

    def unsettle(self) -> None:
        if self in Heap._settled:
            Heap._settled.remove(self)
            if not Heap._settled:
                gc.set_threshold(*Heap._before)
                if Heap._is_first:
                    gc.unfreeze()


_WEIGHT: Final = 1 / 16
_LONGEST_WAIT: Final = 60
# Seconds in which some of a body must come if others wait for the place.
PATIENCE: Final = 1.0


def admission_of(limit: int | None, queue: int) -> Admission | None:
    """The admission with these limits; None if there is to be none.

    Raises:
        ValueError: They are not valid.
    """
    for name, value, least in (("limit", 1 if limit is None else limit, 1), ("queue", queue, 0)):
        if not is_count(value, least):
            raise ValueError(f"{name}={value!r}: a whole number that is at least {least} is needed")
    if limit is None and queue:
        raise ValueError(f"queue={queue} without a limit: requests wait only where `limit` bounds those under way")
    return None if limit is None else Admission(limit, queue)


class Holder(Protocol):
    def stalled_for(self, now: float) -> float:
        """Seconds for which the app has waited for its client to send more of the body."""
        ...

    def give_up(self) -> None: ...


class Admission:
    """Admits so many requests at a time, and lets so many others wait for their turn, in order.

    While others wait, a request whose client sends nothing of its body for `PATIENCE` loses its place.
    """

    def __init__(self, limit: int, queue: int) -> None:
        self._limit = limit
        self._queue = queue
        self._free = limit
        # As a dict: a request that is cancelled leaves from the middle.
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._mean_duration = 0.0
        self._holders: dict[Holder, float] = {}
        self._looks = False

    async def enter(self, holder: Holder) -> None:
        """Take a place, perhaps after a wait.

        Raises:
            Overloaded: The queue is full.

        Cancellation: nothing is taken.
        """
        loop = asyncio.get_running_loop()
        if self._free:
            self._free -= 1
            self._holders[holder] = loop.time()
            return
        if len(self._waiting) >= self._queue:
            raise Overloaded(f"{self._limit} requests are under way, and {self._queue} wait")
        turn = loop.create_future()
        self._waiting[turn] = None
        if not self._looks:
            self._looks = True
            loop.call_later(PATIENCE, self._look)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.pop(turn, None)
            else:
                self._pass_on()
            raise
        self._holders[holder] = loop.time()

    def leave(self, holder: Holder) -> None:
        duration = asyncio.get_running_loop().time() - self._holders.pop(holder)
        self._mean_duration += (duration - self._mean_duration) * _WEIGHT
        self._pass_on()

    def _look(self) -> None:
        self._looks = bool(self._waiting)
        if self._looks:
            loop = asyncio.get_running_loop()
            for holder in [one for one in self._holders if one.stalled_for(loop.time()) >= PATIENCE]:
                holder.give_up()
            loop.call_later(PATIENCE / 4, self._look)

    def _pass_on(self) -> None:
        while self._waiting:
            turn = next(iter(self._waiting))
            del self._waiting[turn]
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    @property
    def retry_after(self) -> int:
        """Whole seconds until the requests that wait will have begun, at the present rate; at least 1."""
        wait = self._mean_duration * len(self._waiting) / self._limit
        return max(1, min(_LONGEST_WAIT, math.ceil(wait)))
