"""Meetings of the members of a group: those that have come, those that are late, and the failed ones. Pure.

A meeting has a name; when it is over, the next one may have the same name. Each member comes to every meeting of a name
once, in their order, so no member has to count: it comes to the first one that it has not come to yet. A member that is
ahead opens the next one. A meeting that has failed is kept until all members have come to it: late ones are told then.

A member may come within something that others share, such as one call of a group: then it meets only those that come
within the same, so it does not matter in which order they begin, or that some never come. A member that comes by itself
comes to the first meeting of the name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil
from typing import Final, Generic, NamedTuple, TypeVar

from aiodaft._protocol.ids import PeerId, node_of
from aiodaft.exceptions import ActorDied, DaftError

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


T = TypeVar("T")

KEPT: Final = 1000


@dataclass(frozen=True)
class Coming:
    """A member that comes to a meeting.

    Attributes:
        terms: The terms that all have to agree on; the error names the first difference.
        fault: The meeting fails with this, because of the member.
        number: Tells it from the member's other meetings of this name.
        within: It does not meet those that come within something else; None: it comes by itself.
    """

    name: Hashable
    title: str
    rank: int
    terms: Mapping[str, Hashable]
    fault: Exception | None = None
    number: int = 0
    within: Hashable = None


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """A meeting that all have come to, or that has failed.

    Attributes:
        tickets: Those of the members that wait for it; if it has not failed: all of them, in order.
    """

    tickets: Mapping[int, T]
    error: Exception | None = None


class _Waiting(NamedTuple, Generic[T]):
    coming: Coming
    ticket: T
    order: int
    # When it came.
    since: float


class _Meeting(Gathering, Generic[T]):
    def __init__(self, title: str, size: int, usual: Usual) -> None:
        super().__init__(size, usual)
        self._title = title
        # By rank; the terms of the first one are those of all.
        self.waiting: dict[int, _Waiting[T]] = {}
        # The ranks that have come, or do not come any more because they were lost.
        self.done: set[int] = set()
        self.error: Exception | None = None
        # If one member made it fail: the rank of that, and the number of its coming.
        self.failed_by: tuple[int, int] | None = None
        # The thing that the members here come within; None as long as all have come by themselves.
        self.within: Hashable = None

    @property
    def title(self) -> str:
        return self._title

    def absent(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.waiting]

    def is_for(self, coming: Coming) -> bool:
        return coming.rank not in self.done and (None in (self.within, coming.within) or self.within == coming.within)

    def add(self, one: _Waiting[T]) -> None:
        self.waiting[one.coming.rank] = one
        self.within = self.within or one.coming.within
        self.since = one.since if self.since is None else min(self.since, one.since)

    def clear(self) -> list[_Waiting[T]]:
        taken = list(self.waiting.values())
        self.done.difference_update(self.waiting)
        self.waiting, self.within, self.since = {}, None, None
        return taken

    def disagreement(self, coming: Coming) -> ValueError | None:
        for first, *_ in list(self.waiting.values())[:1]:
            for name in [*first.terms, *coming.terms]:
                one, other = first.terms.get(name), coming.terms.get(name)
                if one != other:
                    return ValueError(
                        f"{self.title}: the members disagree: "
                        f"rank {first.rank} has {name} {one}, rank {coming.rank} has {name} {other}"
                    )
        return None

    def fail(self, error: Exception) -> Outcome[T]:
        self.error = error
        tickets, self.waiting = self.tickets, {}
        return Outcome(tickets, error)

    @property
    def tickets(self) -> dict[int, T]:
        return {rank: one.ticket for rank, one in sorted(self.waiting.items())}

    def holds(self, rank: int, ticket: T) -> bool:
        return rank in self.waiting and self.waiting[rank].ticket is ticket


class Meetings(Generic[T]):
    def __init__(self, size: int) -> None:
        self._size = size
        self._usual = Usual()
        # By name, the oldest first. None is complete.
        self._meetings: dict[Hashable, list[_Meeting[T]]] = {}
        self._lost: dict[int, Exception] = {}
        self._closed: Exception | None = None
        self._orders = count()
        self._failed: deque[tuple[Hashable, _Meeting[T]]] = deque()

    def __len__(self) -> int:
        return sum(map(len, self._meetings.values()))

    def come(self, coming: Coming, ticket: T, now: float = 0.0) -> list[Outcome[T]]:
        """A member comes with a ticket.

        Returns the meetings that this decides; if it decides none, the member waits.
        """
        outcomes = self._come(_Waiting(coming, ticket, next(self._orders), now))
        self._tidy(coming.name)
        return outcomes

    def _come(self, one: _Waiting[T]) -> list[Outcome[T]]:
        coming, ticket, _, now = one
        rank = coming.rank
        error = self._closed or self._lost.get(rank)
        if error is not None:
            return [Outcome({rank: ticket}, error)]
        meetings = self._meetings.setdefault(coming.name, [])
        meeting = next((meeting for meeting in meetings if meeting.is_for(coming)), None)
        if meeting is None:
            meeting = _Meeting[T](coming.title, self._size, self._usual)
            meetings.append(meeting)
        meeting.done.add(rank)
        if meeting.error is not None:
            return [Outcome({rank: ticket}, meeting.error)]
        error = coming.fault or meeting.disagreement(coming)
        meeting.add(one)
        if error is not None:
            meeting.failed_by = None if coming.fault is None else (rank, coming.number)
            return [self._fail(coming.name, meeting, error)]
        if len(meeting.waiting) < self._size:
            return []
        assert meeting.since is not None
        self._usual.note(now - meeting.since)
        return [Outcome(meeting.tickets)]

    def withdraw(self, name: Hashable, rank: int, ticket: T) -> list[Outcome[T]]:
        """A member that waits has not come; nothing if the meeting is over.

        The others that wait by this name are as they would be without the member: its later meetings count one earlier.
        Returns the meetings that this decides.
        """
        meetings = [meeting for meeting in self._meetings.get(name, ()) if meeting.error is None]
        if not any(meeting.holds(rank, ticket) for meeting in meetings):
            return []
        taken = sorted((one for meeting in meetings for one in meeting.clear()), key=lambda one: one.order)
        outcomes = [outcome for one in taken if one.ticket is not ticket for outcome in self._come(one)]
        self._tidy(name)
        return outcomes

    def leave(self, left: Coming, missed: int | None = None) -> list[Outcome[T]]:
        """A member that has come waits no longer: the meeting fails with its fault, unless it is over.

        Nor does it if the member waits no longer because `missed` does not come any more, and that one has come.
        """
        assert left.fault is not None
        for meeting in self._meetings.get(left.name, ()):
            if left.rank in meeting.waiting and meeting.waiting[left.rank].coming.number == left.number:
                if missed in meeting.done:
                    return []
                meeting.failed_by = left.rank, left.number
                return [self._fail(left.name, meeting, left.fault)]
        return []

    def forget(self, left: Coming) -> None:
        """A member that has made a meeting fail has not come: those that are late do not hear of it."""
        by = left.rank, left.number
        self._meetings[left.name] = [one for one in self._meetings.get(left.name, ()) if one.failed_by != by]
        self._tidy(left.name)

    def expire(self, name: Hashable, rank: int, ticket: T, seconds: float) -> list[Outcome[T]]:
        for meeting in self._meetings.get(name, ()):
            if meeting.holds(rank, ticket):
                late, _ = ranks_of(meeting.absent())
                error = TimeoutError(f"{meeting.title}: {late} of {self._size} did not come in {seconds:g} s")
                return [self._fail(name, meeting, error)]
        return []

    def open(self) -> list[Gathering]:
        return [meeting for named in self._meetings.values() for meeting in named if meeting.error is None]

    def missing(self, name: Hashable, rank: int, ticket: T) -> tuple[Hashable, list[int]]:
        """The thing that the member has come within, and the ranks that have not come."""
        for meeting in self._meetings.get(name, ()):
            if meeting.holds(rank, ticket):
                return meeting.within, meeting.absent()
        return None, []

    def lose(self, rank: int, error: Exception) -> list[Outcome[T]]:
        self._lost.setdefault(rank, error)
        outcomes = self._fail_all(error)
        for name in list(self._meetings):
            for meeting in self._meetings[name]:
                meeting.done.add(rank)
            self._tidy(name)
        return outcomes

    def close(self, error: Exception) -> list[Outcome[T]]:
        self._closed = self._closed or error
        outcomes = self._fail_all(error)
        self._meetings.clear()
        return outcomes

    def _fail_all(self, error: Exception) -> list[Outcome[T]]:
        found = [(name, one) for name, meetings in self._meetings.items() for one in meetings if one.error is None]
        return [self._fail(name, one, error) for name, one in found]

    def _fail(self, name: Hashable, meeting: _Meeting[T], error: Exception) -> Outcome[T]:
        if meeting.within is not None:
            self._failed.append((name, meeting))
            if len(self._failed) > KEPT:
                oldest, old = self._failed.popleft()
                old.done.update(range(self._size))
                self._tidy(oldest)
        return meeting.fail(error)

    def _tidy(self, name: Hashable) -> None:
        left = [one for one in self._meetings.get(name, ()) if 0 < len(one.done) < self._size]
        if left:
            self._meetings[name] = left
        else:
            self._meetings.pop(name, None)


class Left(NamedTuple):
    """The way in which a member left a block.

    Attributes:
        error: "" if it did not leave early.
        follows: Whether the error came of another member.
    """

    error: str = ""
    follows: bool = False
    gone: bool = False


class Others:
    def __init__(self, group: str, labels: Sequence[str]) -> None:
        self._group = group
        self._labels = labels
        self.lost: Exception | None = None

    def hear(self, rank: int, left: Left | DaftError) -> bool:
        """Returns whether others may wait for the member in vain."""
        if isinstance(left, Left):
            if not left.error and not left.gone:
                return False
            if left.follows:
                return True
        if self.lost is None:
            self.lost = self._name(rank, left)
        return True

    def leave(self, error: BaseException, *, inside: bool, broken: bool) -> Left:
        """The departure of this member by an error; `broken`: an operation of torch has failed."""
        follows = self.lost is not None and (broken or not inside)
        return Left(f"{type(error).__name__}: {error}", follows)

    def _name(self, rank: int, left: Left | DaftError) -> Exception:
        if isinstance(left, DaftError):
            left.add_note(f"this was {self._labels[rank]}, rank {rank} of {self._group}")
            return left
        who = f"{self._labels[rank]}, rank {rank} of {self._group},"
        return ActorDied(f"{who} was stopped") if left.gone else RuntimeError(f"{who} left by an error: {left.error}")


def torchrun_variables(rank: int, processes: Sequence[PeerId]) -> dict[str, str]:
    beside = [other for other, process in enumerate(processes) if node_of(process) == node_of(processes[rank])]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(processes)),
        "LOCAL_RANK": str(beside.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(beside)),
    }


def address_variables(host: str, port: int, interface: str) -> dict[str, str]:
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
    }
