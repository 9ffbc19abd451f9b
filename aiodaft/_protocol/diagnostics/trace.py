"""The events that processes record for a trace, and the file of them for Chrome and Perfetto. Pure.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

Events are plain tuples, because traced programs make one or two of them per call. Times are seconds on the clock of the
process that records. Slices ("X") on one track must lie beside or inside each other, so an actor has as many tracks as
calls overlap. The submissions of a call, and the steps of a strand, lie inside of their slice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Final, NamedTuple, TypeAlias

from aiodaft._protocol.ids import COLLECTIVES, FIRST_USER_ACTOR, KEYED, RESHARDING, ActorId, PeerId
from aiodaft._protocol.numbers import amount

# version-trace_id-parent_id-flags. Versions after 00 may append fields.
_TRACEPARENT: Final = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_PRINTABLE: Final = re.compile(r"[\t\x20-\x7e]*")
_MAX_STATE: Final = 512
_MAX_BAGGAGE: Final = 8192
_SAMPLED: Final = 1


class TraceContext(NamedTuple):
    """The trace that a call is part of: `with aiodaft.telemetry.trace_context(headers):` begins it, calls carry it on.

    Attributes:
        traceparent: The trace, the operation in it that the calls belong to, and flags: "00-<32 hex>-<16 hex>-01".
        tracestate: Fields of vendors.
        baggage: Fields of programs: names and values.
    """

    traceparent: str
    tracestate: str = ""
    baggage: str = ""

    @property
    def trace_id(self) -> str:
        return self.traceparent.split("-")[1]

    @property
    def span_id(self) -> str:
        return self.traceparent.split("-")[2]

    @property
    def sampled(self) -> bool:
        return bool(int(self.traceparent.split("-")[3], 16) & _SAMPLED)

    def headers(self) -> dict[str, str]:
        """For a request to a server that is to go on with the trace."""
        return {name: value for name, value in self._asdict().items() if value}


def read_headers(headers: Mapping[str, str]) -> TraceContext | None:
    """The trace that a request is part of; None if it is in none, or its header is not valid.

    As the standard says, a `tracestate` or `baggage` that is not valid, or too long, is left out.
    """
    found = {name.lower(): value for name, value in headers.items() if name.lower() in TraceContext._fields}
    traceparent = found.get("traceparent", "").strip()
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None or (match[1] == "00" and match[5]):
        return None
    state, baggage = found.get("tracestate", "").strip(), found.get("baggage", "").strip()
    if len(state) > _MAX_STATE or not _PRINTABLE.fullmatch(state):
        state = ""
    if len(baggage) > _MAX_BAGGAGE or not _PRINTABLE.fullmatch(baggage):
        baggage = ""
    return TraceContext(traceparent, state, baggage)


Event: TypeAlias = tuple[Any, ...]
# Names something that was submitted, or ran, in all processes: (caller, number) of a call; (owner, graph, run) of a run
# of a graph; (owner, graph, run, value) of a step; with one more field of a strand.
Key: TypeAlias = tuple[Any, ...]

SUBMITTED: Final = 0
RAN: Final = 1
FAILED: Final = 2
FETCHED: Final = 3

CANCELLED: Final = "cancelled"
UNFINISHED: Final = "unfinished"
_CANCELLATIONS: Final = {"CancelledError", "CallCancelled", "GeneratorExit"}

_SHOWN: Final = {(COLLECTIVES, "step"), (COLLECTIVES, "take"), (KEYED, "outcome")}


def is_shown(actor: ActorId, method: str) -> bool:
    """Calls of the runtime's own actors are not recorded, except for collectives."""
    return actor >= FIRST_USER_ACTOR or actor == RESHARDING or (actor, method) in _SHOWN


def submitted(
    times: tuple[float, float], key: Key, what: str, actor: str, maker: tuple[Key, int] | None, needs: Sequence[Key]
) -> Event:
    """A call, or a run of a graph, was submitted.

    Args:
        times: Of the submission, and of the moment at which the program went on.
        actor: The name of the actor, or the id of a process whose own actor it is; empty for a graph.
        maker: The call that made it, and the actor of that; None in a program.
    """
    return (SUBMITTED, *times, key, what, actor, maker, tuple(needs))


def ran(
    times: tuple[float, float, float | None, float],
    key: Key,
    actor: int,
    what: str,
    outcome: str,
    inside: Key | None = None,
    needs: Sequence[Key] = (),
) -> Event:
    """A call, a strand or a step is over.

    Args:
        times: Of its arrival, of its last argument's arrival, of its beginning (None: it never began), and of its end.
        outcome: See `outcome_of`.
    """
    return (RAN, *times, key, actor, what, outcome, inside, tuple(needs))


def failed(key: Key, outcome: str) -> Event:
    return (FAILED, key, outcome)


def fetched(began: float, ended: float, kind: str, nbytes: int, source: PeerId) -> Event:
    return (FETCHED, began, ended, kind, nbytes, source)


def outcome_of(error: BaseException) -> str:
    name = type(error).__name__
    return CANCELLED if name in _CANCELLATIONS else name


@dataclass(frozen=True)
class ProcessTrace:
    """The record of one process; `dropped`: events for which there was no room."""

    id: PeerId
    pid: int
    node: str
    actors: dict[int, str]
    events: list[Event]
    dropped: int


@dataclass(frozen=True)
class Ping:
    """The times of a question and of its answer on this clock, and the other clock's time between them."""

    sent: float
    theirs: float
    came: float


def offset_of(pings: Sequence[Ping]) -> float:
    """The seconds by which another clock is ahead of this one: from the quickest answer, as NTP does.

    It is wrong by at most half of the time that this answer took.
    """
    quickest = min(pings, key=lambda ping: ping.came - ping.sent)
    return quickest.theirs - (quickest.sent + quickest.came) / 2


Json: TypeAlias = dict[str, Any]

_PROGRAM: Final = "program"
_TRANSFERS: Final = "transfers"
_GONE: Final = "stopped actors"
_RETURNED: Final = "returned"
_RUN: Final = 3


@dataclass(eq=False)
class Slice:
    """Something that took time, on a track of a process. Times are seconds on the clock of the trace.

    Attributes:
        track: The actor, or another kind of work.
        category: "submit", "call", "step", "graph", "collective" or "transfer".
    """

    process: int
    track: str
    began: float
    ended: float
    name: str
    category: str
    args: Json
    inside: Key | None = None
    tid: int = 0


@dataclass
class _Wait:
    name: str
    category: str
    process: int
    track: str
    began: float
    ended: float


class _Merge:
    def __init__(self, began: float, ended: float, titles: Mapping[PeerId, str]) -> None:
        self._began = began
        self._ended = ended
        self._titles = titles
        self._offset = 0.0
        self._number = 0
        self._actors: Mapping[int, str] = {}
        self._failures: Mapping[Key, str] = {}
        self.slices: list[Slice] = []
        self.waits: list[_Wait] = []
        # A call that was made again has run more than once.
        self.runs: dict[Key, list[Slice]] = {}
        self.submissions: dict[Key, Slice] = {}
        self._calls: dict[Key, str] = {}
        self.needs: list[tuple[Key, Sequence[Key]]] = []

    def read(self, part: ProcessTrace, offset: float, number: int) -> None:
        self._offset, self._number, self._actors = offset, number, part.actors
        self._failures = {event[1]: event[2] for event in part.events if event[0] == FAILED}
        for event in part.events:
            if event[0] == SUBMITTED:
                self._submitted(event)
            elif event[0] == RAN:
                self._ran(event)
            elif event[0] == FETCHED:
                self._fetched(event)

    def _clip(self, time: float) -> float:
        return min(max(time - self._offset, self._began), self._ended)

    def _is_outside(self, began: float, ended: float) -> bool:
        return ended - self._offset < self._began or began - self._offset > self._ended

    def _submitted(self, event: Event) -> None:
        _, began, ended, key, what, target, maker, needs = event
        if self._is_outside(began, ended):
            return
        outcome = self._failures.get(key, "")
        inside, actor = maker or (None, None)
        track = _PROGRAM if actor is None else self._actors.get(actor, _GONE)
        args = {"outcome": outcome} if outcome else {}
        name = _named(f"{what} of {self._titles.get(target, target)}" if target else what, outcome)
        times = self._clip(began), self._clip(ended)
        one = self.submissions[key] = Slice(self._number, track, *times, name, "submit", args, inside)
        self.slices.append(one)
        self.needs.append((key, needs))
        self._calls[key] = what

    def name_collectives(self) -> None:
        for key, slices in self.runs.items():
            for one in slices:
                if one.category == "collective" and key in self._calls:
                    one.name = _named(self._calls[key], one.args["outcome"].removeprefix(_RETURNED))

    def _ran(self, event: Event) -> None:
        _, came, complete, began, ended, key, actor, what, outcome, inside, needs = event
        if self._is_outside(came, ended):
            return
        track = self._actors.get(actor, _GONE)
        since, ready, begun, until = map(self._clip, (came, complete, ended if began is None else began, ended))
        if since < ready:
            self.waits.append(_Wait(f"{what} needs arguments", "arguments", self._number, track, since, ready))
        if ready < begun:
            self.waits.append(_Wait(f"{what} is queued", "queued", self._number, track, ready, begun))
        if began is None:
            return
        args = {"outcome": outcome or _RETURNED, "caller": self._titles.get(key[0], key[0])}
        name, category = _named(what, outcome), _category(actor, key)
        one = Slice(self._number, track, begun, until, name, category, args, inside)
        self.slices.append(one)
        self.runs.setdefault(key, []).append(one)
        if inside is not None:
            # A step without arguments waits for the run alone.
            self.needs.append((key, needs or (key[:_RUN],)))

    def _fetched(self, event: Event) -> None:
        _, began, ended, kind, nbytes, source = event
        if not self._is_outside(began, ended):
            args = {"bytes": nbytes, "kind": kind, "from": self._titles.get(source, source)}
            times, name = (self._clip(began), self._clip(ended)), f"{kind} {amount(nbytes)}"
            self.slices.append(Slice(self._number, _TRANSFERS, *times, name, "transfer", args))


def trace_file(
    parts: Sequence[tuple[ProcessTrace, float]], began: float, ended: float, left_out: Mapping[str, str]
) -> Json:
    """The content of the file.

    Args:
        parts: The record of each process, the program first, and the seconds by which its clock is ahead of the
            trace's.
        began: Earlier events are left out, and calls that were under way are cut.
        left_out: Processes whose events are missing, and why.
    """
    numbers = {process: number for number, process in enumerate(dict.fromkeys(part.id for part, _ in parts), 1)}
    titles = _titles(parts)
    merged = _Merge(began, ended, titles)
    for part, offset in parts:
        merged.read(part, offset, numbers[part.id])
    merged.name_collectives()
    dropped: dict[str, int] = {}
    for part, _ in parts:
        if part.dropped:
            dropped[titles[part.id]] = dropped.get(titles[part.id], 0) + part.dropped
    names = _lay_out(merged)
    events = [
        *_metadata(parts, numbers, titles, names),
        *(_slice_event(one, began) for one in merged.slices),
        *_wait_events(merged.waits, began),
        *_flow_events(merged, began),
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"dropped events": dropped, "left out": dict(left_out)},
    }


def _titles(parts: Sequence[tuple[ProcessTrace, float]]) -> dict[PeerId, str]:
    actors: dict[PeerId, dict[str, None]] = {}
    for part, _ in parts:
        users = (name for actor, name in part.actors.items() if actor >= FIRST_USER_ACTOR)
        actors.setdefault(part.id, {}).update(dict.fromkeys(users))
    first = parts[0][0].id
    return {one: " and ".join(names) or ("controller" if one == first else "worker") for one, names in actors.items()}


def _named(what: str, outcome: str) -> str:
    return f"{what}: {outcome}" if outcome and outcome != UNFINISHED else what


def _category(actor: int, key: Key) -> str:
    if actor < FIRST_USER_ACTOR:
        return "collective"
    return {_RUN - 1: "call", _RUN + 1: "step"}.get(len(key), "graph")


def _lay_out(merged: _Merge) -> dict[tuple[int, int], str]:
    """Give each slice a track on which it lies beside or inside of the others."""
    names: dict[tuple[int, int], str] = {}
    tracks: dict[tuple[int, str], _Tracks] = {}
    counts: dict[int, int] = {}
    for one in sorted(merged.slices, key=lambda one: (one.began, -one.ended)):
        outer = _outer(merged, one)
        if outer is not None:
            one.tid = outer.tid
            continue
        own = tracks.setdefault((one.process, one.track), _Tracks())
        place = own.take(one.began, one.ended)
        if place == len(own.tids):
            tid = counts[one.process] = counts.get(one.process, 0) + 1
            names[one.process, tid] = one.track if not place else f"{one.track} ({place + 1})"
            own.tids.append(tid)
        one.tid = own.tids[place]
    return names


class _Tracks:
    def __init__(self) -> None:
        self.tids: list[int] = []
        self._free: list[int] = []
        self._taken: list[tuple[float, int]] = []

    def take(self, began: float, ended: float) -> int:
        while self._taken and self._taken[0][0] <= began:
            heappush(self._free, heappop(self._taken)[1])
        place = heappop(self._free) if self._free else len(self.tids)
        heappush(self._taken, (ended, place))
        return place


def _outer(merged: _Merge, one: Slice) -> Slice | None:
    outers = merged.runs.get(one.inside, ()) if one.inside is not None else ()
    for outer in outers:
        if outer.process == one.process and outer.tid and outer.began <= one.began and one.ended <= outer.ended:
            return outer
    return None


def _micros(time: float, began: float) -> float:
    return round((time - began) * 1e6, 3)


def _metadata(
    parts: Sequence[tuple[ProcessTrace, float]],
    numbers: Mapping[PeerId, int],
    titles: Mapping[PeerId, str],
    names: Mapping[tuple[int, int], str],
) -> Iterator[Json]:
    for part, _ in parts:
        pid, name = numbers[part.id], f"{titles[part.id]} (pid {part.pid}, {part.node})"
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for (pid, tid), name in names.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _slice_event(one: Slice, began: float) -> Json:
    start, end = _micros(one.began, began), _micros(one.ended, began)
    where = {"pid": one.process, "tid": one.tid, "ts": start, "dur": round(end - start, 3)}
    return {"ph": "X", "name": one.name, "cat": one.category, **where, "args": one.args}


def _wait_events(waits: Iterable[_Wait], began: float) -> Iterator[Json]:
    """Waits overlap: they are asynchronous events, for which viewers find room."""
    for number, wait in enumerate(waits, 1):
        # An `id` would be that of an event of all processes, which Perfetto shows apart from them.
        same = {"name": wait.name, "cat": wait.category, "id2": {"local": hex(number)}, "pid": wait.process, "tid": 0}
        yield {"ph": "b", **same, "ts": _micros(wait.began, began), "args": {"actor": wait.track}}
        yield {"ph": "e", **same, "ts": _micros(wait.ended, began), "args": {}}


def _flow_events(merged: _Merge, began: float) -> Iterator[Json]:
    """From each submission to its run, and from results to the calls and steps that needed them."""
    arrows: list[tuple[str, Slice, float, Slice]] = []
    for key, one in merged.submissions.items():
        arrows += [("call", one, one.began, run) for run in merged.runs.get(key, ())]
    for key, needed in ((key, needed) for key, needs in merged.needs for needed in needs):
        made, submitted = merged.runs.get(needed, ()), merged.submissions.get(needed[:_RUN])
        for run in merged.runs.get(key, ()):
            if made:
                arrows.append(("value", made[-1], made[-1].ended, run))
            elif submitted is not None and len(needed) >= _RUN:
                arrows.append(("call", submitted, submitted.began, run))
    for number, (name, source, at, target) in enumerate(arrows, 1):
        same = {"name": name, "cat": name, "id": number}
        # Inside of the slice, of which the end is not a part.
        start = max(_micros(source.began, began), min(_micros(at, began), _micros(source.ended, began) - 0.001))
        yield {"ph": "s", **same, "pid": source.process, "tid": source.tid, "ts": round(start, 3)}
        where = {"pid": target.process, "tid": target.tid, "ts": _micros(target.began, began)}
        yield {"ph": "f", "bp": "e", **same, **where}
