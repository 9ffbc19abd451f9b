"""Failures of actors, and those that led to others; and deadlocks. Pure."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from operator import attrgetter
from typing import Final, Literal, NamedTuple, TypeAlias

from aiodaft._protocol.calls.mailbox import FETCHING, WAITING, Stage
from aiodaft._protocol.ids import ActorId, CallId, PeerId, serial_of
from aiodaft._protocol.numbers import Latest
from aiodaft.causes import chain_of, message_of
from aiodaft.exceptions import LocalProtocolError, WaitingCall

_REMEMBERED: Final = 64
_MAX_MESSAGE: Final = 1 << 10
_MAX_PATH: Final = 16
_RAISED_BY: Final = "raised by "
# The user looks for no line of the runtime's own code.
_OWN_CODE: Final = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep

Kind: TypeAlias = Literal["call", "death", "start", "node", "limit"]


@dataclass(frozen=True, slots=True)
class Cause:
    """An exception that led to a failure.

    Attributes:
        type: Its class, such as "ValueError".
        message: Its text, at most 1,024 characters.
        path: The calls that raised it or passed it on, such as "Model.step in Model-1 (pid 7, host)"; the first one
            raised it. Empty if no call did.
    """

    type: str
    message: str
    path: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


@dataclass(frozen=True, slots=True)
class Failure:
    """Something that failed, once or several times in the same way.

    Attributes:
        what: "call": a method raised. "death": a process ended by accident. "start": an actor could not be made.
            "node": a node was lost. "limit": an actor died more often than its restart policy allows.
        actor: The actor; of a death all actors of the process; of a node its name.
        method: The method, such as "Model.step"; "" if it was no call.
        process: The id of the process that failed.
        pid: Its pid; None if it had not started.
        line: The line that raised the first cause, such as "model.py:12 in step"; "" if that is not known.
        causes: The chain of exceptions: the root cause first, the callers' error last.
        times: The number of failures of this kind.
        first: The time of the first failure, in seconds since the epoch.
        last: The time of the last one.
        followed: The failures that came of this one, oldest first.
    """

    what: Kind
    actor: str
    method: str
    process: str
    pid: int | None
    line: str
    causes: tuple[Cause, ...]
    times: int
    first: float
    last: float
    followed: tuple[Failure, ...] = ()

    @property
    def error(self) -> str:
        return str(self.causes[0])


class Subject(NamedTuple):
    what: Kind
    actor: str
    method: str
    process: str
    pid: int | None


class FailureLog:
    """The last different failures of one process. It keeps texts, no exceptions: these would keep frames.

    Attributes:
        deaths: The number of processes that ended by accident, by the class of their first actor.
    """

    def __init__(self) -> None:
        self.deaths: Counter[str] = Counter()
        self._kept = Latest[tuple[Subject, tuple[Cause, ...]], Failure](_REMEMBERED)

    def note(self, subject: Subject, error: BaseException, now: float) -> None:
        if subject.what == "death":
            self.deaths[subject.actor.partition("-")[0]] += 1
        key = subject, causes_of(error)
        known = self._kept.pop(key, None)
        if known is None:
            self._kept[key] = Failure(*subject, line_of(error), key[1], 1, now, now)
        else:
            self._kept[key] = replace(known, times=known.times + 1, last=now)

    def __iter__(self) -> Iterator[Failure]:
        return iter(self._kept.values())


def raised_by(where: str) -> str:
    return _RAISED_BY + where


def causes_of(error: BaseException) -> tuple[Cause, ...]:
    return tuple(
        Cause(type(one).__name__, message_of(one, _MAX_MESSAGE), _path_of(one)) for one in reversed(chain_of(error))
    )


def line_of(error: BaseException) -> str:
    line, frames = "", chain_of(error)[-1].__traceback__
    while frames is not None:
        code = frames.tb_frame.f_code
        if not code.co_filename.startswith(_OWN_CODE):
            line = f"{os.path.basename(code.co_filename)}:{frames.tb_lineno} in {code.co_name}"
        frames = frames.tb_next
    return line


def _path_of(error: BaseException) -> tuple[str, ...]:
    notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, str)]
    return tuple(note.removeprefix(_RAISED_BY) for note in notes if note.startswith(_RAISED_BY))[:_MAX_PATH]


def by_cause(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """The failures of several processes as trees: those that no other one led to, the newest first.

    A failure led to another one if its exception is in the chain of that, after the same calls and before others. Of
    several such failures, the one whose exception has come furthest did.
    """
    # Each comes behind all that may have led to it.
    alike: dict[tuple[str, str], list[Failure]] = {}
    for failure in sorted(failures, key=lambda failure: (_depth(failure), failure.first)):
        alike.setdefault((failure.causes[0].type, failure.causes[0].message), []).append(failure)
    trees = [tree for group in alike.values() for tree in _trees(group)]
    return tuple(sorted(trees, key=lambda failure: failure.last, reverse=True))


def _trees(alike: Sequence[Failure]) -> list[Failure]:
    roots: list[int] = []
    followed: list[list[int]] = [[] for _ in alike]
    for index, failure in enumerate(alike):
        cause = next((step for step in reversed(range(index)) if _led_to(alike[step], failure)), None)
        (roots if cause is None else followed[cause]).append(index)

    def tree(index: int) -> Failure:
        return replace(alike[index], followed=tuple(map(tree, followed[index])))

    return list(map(tree, roots))


def _depth(failure: Failure) -> tuple[int, int]:
    return len(failure.causes), len(failure.causes[-1].path)


def _led_to(first: Failure, second: Failure) -> bool:
    *earlier, last = first.causes
    same = second.causes[len(earlier)]
    return (
        _depth(first) < _depth(second)
        and tuple(earlier) == second.causes[: len(earlier)]
        and (last.type, last.message) == (same.type, same.message)
        and last.path == same.path[: len(last.path)]
    )


# Each error takes some 10 kB, and a server meets any number of them.
LIMIT: Final = 100


class Unhandled:
    def __init__(self) -> None:
        self._kept: list[BaseException] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, error: BaseException) -> bool:
        if any(error is known for known in self._kept):
            return False
        self._count += 1
        if len(self._kept) >= LIMIT:
            return False
        self._kept.append(error)
        return True

    def group(self, body: BaseException | None) -> BaseExceptionGroup[BaseException] | None:
        """None if the block raises its body's error, or none at all."""
        others = [error for error in self._kept if error is not body]
        if not others:
            return None
        left_out = self._count - len(self._kept)
        what = "errors in a scope" + (f" ({left_out} more were only counted)" if left_out else "")
        return BaseExceptionGroup(what, others if body is None else [body, *others])


# Deadlocks: calls that wait only for each other.
#
# The rule is that of the communication model of Chandy, Misra and Haas ("Distributed deadlock detection", 1983): a call
# goes on as soon as *one* of those it waits for does, so it is deadlocked only if everything it waits for, directly or
# not, waits too. For a call that needs all of several others that is too strict by a little, never too lax.
#
# A search asks each call for the calls that it waits for, and then asks again. A call that gives the same answer twice
# (the stamp says that it did not wake in between) waited at the moment between the two rounds, and so did all the
# others: the deadlock was real at one moment, and a deadlock stays one.

_WAY_OUT: Final = (
    "; calls of a group by several callers begin in different orders at its members: let one of them make all calls "
    "whose methods meet in collectives, or let these be `async def` without `concurrency`"
)
# A search gives up beyond this number of calls: no one could read such a deadlock.
_MOST_CALLS: Final = 1_000


class CallAt(NamedTuple):
    """A call: the process that runs it, the process that made it, and its number there.

    With `member`, this actor's part of a call of its group, or of a run of a graph. With `within` alone, a strand of a
    graph in a run.
    """

    host: PeerId
    owner: PeerId
    number: CallId
    member: ActorId = ActorId(0)
    within: tuple[int, ...] = ()


class Reason(Enum):
    AWAITS = "awaits"
    NEEDS = "needs the result of"
    QUEUED = "is queued behind"
    MEETS = "waits in a collective for"


class Place(Enum):
    TASK = "in its task"
    THREAD = "on the actor's thread"
    ARGUMENTS = "for arguments that are fetched"
    INPUTS = "for values of its graph"
    MAILBOX = "for its turn"
    BACKLOG = "for the actor's thread"

    @property
    def reason(self) -> Reason:
        if self in (Place.TASK, Place.THREAD):
            return Reason.AWAITS
        return Reason.NEEDS if self in (Place.ARGUMENTS, Place.INPUTS) else Reason.QUEUED


def place_of(stage: Stage, *, begun: bool, on_thread: bool, fetching: bool) -> Place | None:
    if begun:
        return Place.THREAD if on_thread else Place.TASK
    if fetching:
        return Place.ARGUMENTS
    if stage in WAITING:
        return Place.INPUTS if stage is FETCHING else Place.MAILBOX
    return Place.BACKLOG if on_thread else None


@dataclass(frozen=True, slots=True)
class Waiting:
    """A call that waits, as its process knows it.

    Attributes:
        stamp: Changes whenever it wakes, also if it then waits for the same.
        on: The calls of which one has to move on before it can.
        own: Whether it is a call of the runtime itself, which no error names.
    """

    actor: str
    method: str
    line: str
    begun: bool
    reason: Reason
    stamp: tuple[int, ...]
    on: tuple[CallAt, ...]
    own: bool = False


class Deadlock(NamedTuple):
    """A cycle of waiting: each call of it waits for the next, the last one for the first.

    The last one is the call to give up: the youngest of the user's calls that have not begun (giving them up is safe).
    Numbers decide which is younger, so that all processes that find the deadlock choose the same call.
    """

    calls: tuple[CallAt, ...]
    waiting: tuple[Waiting, ...]

    @property
    def shown(self) -> tuple[Waiting, ...]:
        *others, last = self.waiting
        shown = [last]
        for one in others:
            if one.own:
                shown[-1] = replace(shown[-1], reason=one.reason)
            else:
                shown.append(one)
        return *shown[1:], shown[0]

    @property
    def victim(self) -> CallAt:
        return self.calls[-1]

    @property
    def cycle(self) -> tuple[WaitingCall, ...]:
        return tuple(WaitingCall(one.actor, one.method, one.line) for one in self.shown)

    def __str__(self) -> str:
        shown = self.shown
        names = [f"{one.method} of {one.actor}" for one in shown]
        steps = [f"{name} ({one.line})" if one.line else name for name, one in zip(names, shown, strict=True)]
        connections = [f"{one.reason.value} {step}" for one, step in zip(shown, [*steps[1:], names[0]], strict=True)]
        story = f"{steps[0]} {', which '.join(connections)}"
        return story if all(one.reason is not Reason.MEETS for one in shown) else story + _WAY_OUT


class Phase(Enum):
    EXPLORING = "exploring"
    CONFIRMING = "confirming"
    OVER = "over"


class Search:
    def __init__(self, roots: Iterable[CallAt]) -> None:
        self.phase = Phase.EXPLORING
        self.deadlocks: list[Deadlock] = []
        self._asked: set[CallAt] = set(roots)
        self._known: dict[CallAt, Waiting | None] = {}
        # All calls that waited in the first round; those of them that wait unchanged in the second.
        self._stuck: dict[CallAt, Waiting] = {}
        self._still: dict[CallAt, Waiting] = {}

    @property
    def questions(self) -> dict[PeerId, list[CallAt]]:
        hosts = groupby(sorted(self._asked), attrgetter("host"))
        return {host: list(calls) for host, calls in hosts}

    def handle_answers(self, answers: Mapping[CallAt, Waiting | None]) -> None:
        if not answers.keys() <= self._asked:
            raise LocalProtocolError(f"no question was asked about {answers.keys() - self._asked}")
        self._asked -= answers.keys()
        if self.phase is Phase.EXPLORING:
            self._known.update(answers)
            found = {other for waiting in answers.values() if waiting is not None for other in waiting.on}
            self._asked |= found - self._known.keys()
        else:
            self._still.update((call, self._stuck[call]) for call, now in answers.items() if now == self._stuck[call])
        if not self._asked or len(self._known) > _MOST_CALLS:
            self._next_phase()

    def _next_phase(self) -> None:
        if self.phase is Phase.EXPLORING and len(self._known) <= _MOST_CALLS:
            self._stuck = reduced({call: waiting for call, waiting in self._known.items() if waiting is not None})
            self._asked = set(self._stuck)
            self.phase = Phase.CONFIRMING if self._stuck else Phase.OVER
        else:
            self._asked = set()
            self.deadlocks = [_cycle_of(knot, self._still) for knot in knots(reduced(self._still))]
            self.phase = Phase.OVER


def reduced(waiting: dict[CallAt, Waiting]) -> dict[CallAt, Waiting]:
    stuck = {call: one for call, one in waiting.items() if one.on}
    behind: dict[CallAt, list[CallAt]] = {}
    for call, one in stuck.items():
        for other in one.on:
            behind.setdefault(other, []).append(call)
    alive = [call for call in behind if call not in stuck]
    while alive:
        alive += [call for call in behind.get(alive.pop(), ()) if stuck.pop(call, None) is not None]
    return stuck


def knots(stuck: dict[CallAt, Waiting]) -> list[set[CallAt]]:
    """The sets of calls that wait for each other and for no call outside the set."""
    found: list[set[CallAt]] = []
    left = set(stuck)
    while left:
        knot = _reach(min(left), stuck)
        # A call that does not lead back waits for a smaller set; the smallest is a knot.
        while (out := next((call for call in sorted(knot) if len(_reach(call, stuck)) < len(knot)), None)) is not None:
            knot = _reach(out, stuck)
        found.append(knot)
        left -= {call for call in left if _reach(call, stuck) & knot}
    return found


def _reach(start: CallAt, stuck: dict[CallAt, Waiting]) -> set[CallAt]:
    found: set[CallAt] = set()
    ahead = [start]
    while ahead:
        for call in stuck[ahead.pop()].on:
            if call not in found:
                found.add(call)
                ahead.append(call)
    return found


def _cycle_of(knot: set[CallAt], stuck: dict[CallAt, Waiting]) -> Deadlock:
    def weight(call: CallAt) -> tuple[bool, bool, int, PeerId, CallId]:
        # The number of a strand is none in the order of its owner's calls: those are younger.
        serial = call.number if call.within else serial_of(call.number)
        return not stuck[call].begun, not stuck[call].own, serial, call.owner, call.number

    victim = max(knot, key=weight)
    came_from: dict[CallAt, CallAt] = {}
    ahead = [victim]
    while victim not in came_from:
        call = ahead.pop(0)
        for other in stuck[call].on:
            if other not in came_from:
                came_from[other] = call
                ahead.append(other)
    path = [victim]
    while (before := came_from[path[-1]]) != victim:
        path.append(before)
    calls = tuple(reversed(path))
    return Deadlock(calls, tuple(stuck[call] for call in calls))
