"""The number of requests that an ingress holds, has answered and refused, and their times."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import Final, Literal, TypeAlias

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
