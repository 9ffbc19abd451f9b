"""Members of a group come together: which have come to which meeting, and which meetings fail. Pure.

A meeting has a name; when it is over, the next one may have the same name. Each member comes to every meeting of a name
once, in their order, so no member has to count: it comes to the first one that it has not come to yet. A member that is
ahead opens the next one. A meeting that has failed is kept until all members have come to it: late ones are told then.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Coming:
    """A member that comes to a meeting.

    Attributes:
        name: The name of the meeting.
        title: What errors call it.
        rank: The member.
        terms: What all have to agree on; the first difference is named by the error.
        fault: The meeting fails with this, because of the member.
        number: Tells it from what the member comes to besides by this name.
    """

    name: Hashable
    title: str
    rank: int
    terms: Mapping[str, Hashable]
    fault: Exception | None = None
    number: int = 0


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """A meeting that all have come to, or that has failed.

    Attributes:
        tickets: What the members came with that wait for it, by rank. If it has not failed: all of them, in order.
        error: Why it failed.
    """

    tickets: Mapping[int, T]
    error: Exception | None = None


@dataclass(slots=True)
class _Meeting(Generic[T]):
    # What errors call it.
    title: str
    # By rank; the terms of the first one are those of all.
    waiting: dict[int, tuple[Coming, T]] = field(default_factory=dict[int, tuple[Coming, T]])
    # The ranks that have come, or do not come any more because they were lost.
    done: set[int] = field(default_factory=set[int])
    error: Exception | None = None
    # If it has failed because of what one member came with: the rank and the number of that.
    failed_by: tuple[int, int] | None = None

    def disagreement(self, coming: Coming) -> ValueError | None:
        for first, _ in list(self.waiting.values())[:1]:
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
        """By rank, in order."""
        return {rank: ticket for rank, (_, ticket) in sorted(self.waiting.items())}


class Meetings(Generic[T]):
    """The meetings of a group at one epoch.

    Args:
        size: The number of members.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        # By name, the oldest first. None is complete.
        self._meetings: dict[Hashable, list[_Meeting[T]]] = {}
        # Why ranks do not come any more.
        self._lost: dict[int, Exception] = {}
        # Why there are no more meetings.
        self._closed: Exception | None = None

    def __len__(self) -> int:
        """The number of meetings that some members have not come to."""
        return sum(map(len, self._meetings.values()))

    def come(self, coming: Coming, ticket: T) -> list[Outcome[T]]:
        """A member comes with a ticket. Returns what is decided by that; if nothing is, it waits."""
        name, rank = coming.name, coming.rank
        error = self._closed or self._lost.get(rank)
        if error is not None:
            return [Outcome({rank: ticket}, error)]
        meeting = next((one for one in self._meetings.get(name, ()) if rank not in one.done), None)
        if meeting is None:
            meeting = _Meeting[T](coming.title)
            self._meetings.setdefault(name, []).append(meeting)
        meeting.done.add(rank)
        outcomes: list[Outcome[T]] = []
        if meeting.error is not None:
            outcomes.append(Outcome({rank: ticket}, meeting.error))
        else:
            error = coming.fault or meeting.disagreement(coming)
            meeting.waiting[rank] = coming, ticket
            if error is not None:
                meeting.failed_by = None if coming.fault is None else (rank, coming.number)
                outcomes.append(meeting.fail(error))
            elif len(meeting.waiting) == self._size:
                outcomes.append(Outcome(meeting.tickets))
        self._tidy(name)
        return outcomes

    def withdraw(self, name: Hashable, rank: int, ticket: T) -> list[Outcome[T]]:
        """A member that waits has not come; nothing if the meeting is over.

        What it has come to since by this name counts one earlier. Returns what is decided by that.
        """
        waits = [meeting for meeting in self._meetings.get(name, ()) if rank in meeting.waiting]
        while waits and waits[0].waiting[rank][1] is not ticket:
            del waits[0]
        taken = [meeting.waiting.pop(rank) for meeting in waits]
        for meeting in waits:
            meeting.done.remove(rank)
        self._tidy(name)
        return [outcome for later in taken[1:] for outcome in self.come(*later)]

    def leave(self, left: Coming) -> list[Outcome[T]]:
        """A member that has come waits no longer: the meeting fails with its fault. Nothing if the meeting is over."""
        assert left.fault is not None
        for meeting in self._meetings.get(left.name, ()):
            if left.rank in meeting.waiting and meeting.waiting[left.rank][0].number == left.number:
                meeting.failed_by = left.rank, left.number
                return [meeting.fail(left.fault)]
        return []

    def forget(self, left: Coming) -> None:
        """A member that has made a meeting fail has not come at all: those that are late do not hear of it."""
        by = left.rank, left.number
        self._meetings[left.name] = [one for one in self._meetings.get(left.name, ()) if one.failed_by != by]
        self._tidy(left.name)

    def expire(self, name: Hashable, rank: int, ticket: T, seconds: float) -> list[Outcome[T]]:
        """A member has waited for so many seconds, and waits no longer."""
        for meeting in self._meetings.get(name, ()):
            if rank in meeting.waiting and meeting.waiting[rank][1] is ticket:
                late = [str(other) for other in range(self._size) if other not in meeting.waiting]
                ranks = f"rank{'s' if len(late) > 1 else ''} {', '.join(late)}"
                return [
                    meeting.fail(
                        TimeoutError(f"{meeting.title}: {ranks} of {self._size} did not come in {seconds:g} s")
                    )
                ]
        return []

    def lose(self, rank: int, error: Exception) -> list[Outcome[T]]:
        """A member is lost: the meetings that are open fail. Those that others open now have to be closed."""
        self._lost.setdefault(rank, error)
        outcomes = self._fail_all(error)
        for name in list(self._meetings):
            for meeting in self._meetings[name]:
                meeting.done.add(rank)
            self._tidy(name)
        return outcomes

    def close(self, error: Exception) -> list[Outcome[T]]:
        """There are no more meetings: all that are open fail, and so does what comes later."""
        self._closed = self._closed or error
        outcomes = self._fail_all(error)
        self._meetings.clear()
        return outcomes

    def _fail_all(self, error: Exception) -> list[Outcome[T]]:
        """Fail the meetings that are open."""
        return [one.fail(error) for meetings in self._meetings.values() for one in meetings if one.error is None]

    def _tidy(self, name: Hashable) -> None:
        """Forget the meetings that every member has come to, or none."""
        left = [one for one in self._meetings.get(name, ()) if 0 < len(one.done) < self._size]
        if left:
            self._meetings[name] = left
        else:
            self._meetings.pop(name, None)
