"""Members that are late for a collective, by the time in which all members usually come. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from math import ceil
from typing import Final

# Seconds over the usual time, and those after which a member is late as long as that is not known.
MARGIN: Final = 0.5
AT_FIRST: Final = 5.0
# The last collectives that count.
_COUNTED: Final = 32


class Usual:
    """The time from the first member that comes to the last one, of the last collectives."""

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=_COUNTED)

    def note(self, seconds: float) -> None:
        self._waits.append(seconds)

    @property
    def seconds(self) -> float | None:
        """The second longest of them: a member that was late once is not late usually. None if too few are known."""
        return sorted(self._waits)[-2] if len(self._waits) > 1 else None


class Gathering(ABC):
    """A collective that some members have come to.

    Attributes:
        since: When the first one came; None if none has.
        told: Whether it was reported that members are late.
    """

    __slots__ = ("since", "size", "told", "usual")

    def __init__(self, size: int, usual: Usual) -> None:
        self.size, self.usual = size, usual
        self.since: float | None = None
        self.told = False

    @property
    @abstractmethod
    def title(self) -> str: ...

    @abstractmethod
    def absent(self) -> Sequence[object]:
        """The ranks that have not come."""

    def is_late(self, now: float) -> bool:
        usual = self.usual.seconds
        return self.since is not None and now - self.since > (AT_FIRST if usual is None else usual + MARGIN)

    def describe(self, now: float) -> str:
        ranks, several = ranks_of(self.absent())
        text = f"{self.title}: {ranks} of {self.size} {'have' if several else 'has'} not come"
        if not self.told or self.since is None:
            return text
        usual = self.usual.seconds
        usually = "" if usual is None else f"; usually all come within {ceil(1000 * usual)} ms"
        return f"{text} for {now - self.since:.1f} s{usually}"


def ranks_of(ranks: Sequence[object]) -> tuple[str, bool]:
    """The ranks as text, and whether there are several."""
    several = len(ranks) > 1
    return f"rank{'s' if several else ''} {', '.join(map(str, ranks))}", several
