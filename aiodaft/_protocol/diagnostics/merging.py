"""Lines that several ranks of a group write at the same time, shown as one. No clock, no I/O.

A line waits until all ranks have written it, or for a short time. Earlier lines of a rank, to the same stream, are
shown first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")

# Lines of one group that wait at most; then they are shown as they are.
_MAX_WAITING: Final = 256
_MEMBER: Final = re.compile(r"(?P<group>[^+]+)\[(?P<rank>\d+)\]")


class Member(NamedTuple):
    """A member of a group, by the names that actors have in errors."""

    group: str
    rank: int


def member_of(name: str) -> Member | None:
    """The member that has a name, such as "Trainer-1[3]"; None if the actor is in no group."""
    found = _MEMBER.fullmatch(name)
    return None if found is None else Member(found["group"], int(found["rank"]))


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks for people: "0-5,7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ",".join("-".join(map(str, run)) for run in runs)


class Merged(NamedTuple, Generic[T]):
    """A line to be shown: that of the first rank that wrote it, with all ranks that did."""

    line: T
    group: str
    ranks: Sequence[int]


class _Waiting(NamedTuple, Generic[T]):
    key: Hashable
    line: T
    due: float
    ranks: list[int]


class Merging(Generic[T]):
    """The lines of groups that wait.

    Args:
        window: Seconds that a line waits for the other ranks.
        show: Called with each line that is to be shown, in order.
    """

    def __init__(self, window: float, show: Callable[[Merged[T]], object]) -> None:
        self._window = window
        self._show = show
        # The ranks of each group that can write.
        self._members: dict[str, set[int]] = {}
        # The lines of each group and stream that wait, oldest first.
        self._waiting: dict[tuple[str, int], list[_Waiting[T]]] = {}

    def join(self, member: Member) -> None:
        self._members.setdefault(member.group, set()).add(member.rank)

    def leave(self, member: Member) -> None:
        ranks = self._members.get(member.group, set())
        ranks.discard(member.rank)
        if not ranks:
            self._members.pop(member.group, None)
            self.flush(member.group)

    def take(self, member: Member, stream: int, key: Hashable, line: T, now: float) -> None:
        """A member has written a line to a stream; those with equal keys are equal."""
        group, rank = member
        waiting = self._waiting.setdefault((group, stream), [])
        same = next((one for one in waiting if one.key == key and rank not in one.ranks), None)
        if same is None:
            same = _Waiting(key, line, now + self._window, [])
            waiting.append(same)
        same.ranks.append(rank)
        if self._members.get(group, set()) <= {*same.ranks}:
            self._show_first((group, stream), waiting.index(same) + 1)
        elif len(waiting) > _MAX_WAITING:
            self._show_first((group, stream), len(waiting))

    def _show_first(self, lane: tuple[str, int], count: int) -> None:
        waiting = self._waiting[lane]
        shown, waiting[:] = waiting[:count], waiting[count:]
        if not waiting:
            del self._waiting[lane]
        for one in shown:
            self._show(Merged(one.line, lane[0], sorted(one.ranks)))

    def flush(self, group: str | None = None) -> None:
        for lane, waiting in list(self._waiting.items()):
            if group in {None, lane[0]}:
                self._show_first(lane, len(waiting))

    def get_timer(self) -> float | None:
        return min((waiting[0].due for waiting in self._waiting.values()), default=None)

    def handle_timer(self, now: float) -> None:
        for lane, waiting in list(self._waiting.items()):
            over = sum(one.due <= now for one in waiting)
            if over:
                self._show_first(lane, over)
