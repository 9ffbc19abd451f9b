"""The time of a step before it runs: the instructions of a plan, on hardware that is a few numbers."""

from __future__ import annotations

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from html import escape
from itertools import chain, count
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from aiodaft.tensor.costs import COLLECTIVES, Awaited, kinds_of, work_of
from aiodaft.tensor.hardware import Hardware
from aiodaft.tensor.instructions import Instruction, Slot
from aiodaft.tensor.operations import Cause, ranks_text, size_text, time_text
from aiodaft.tensor.rules import Rules
from aiodaft.tensor.segments import Collective, Instructions, Segment
from aiodaft.tensor.specs import coords
from aiodaft.tensor.stage_runs import rank_in_stage


class Span(NamedTuple):
    """Something that takes time at a rank. Times are seconds since the beginning of the step.

    Attributes:
        kind: `forward`, `backward`, `weights` or `update`; `collective`; `wait`, for an axis.
        microbatch: Of a pipeline.
    """

    rank: int
    start: float
    end: float
    name: str
    kind: str
    microbatch: int = -1


@dataclass(frozen=True)
class Simulation:
    """A step of a plan on some hardware.

    Attributes:
        seconds: The time of the step.
        busy: The seconds of a processor that a rank takes, by rank: of its operations, and on shared processors of the
            copies of its collectives.
        waits: The seconds in which a rank waits for others, by axis and rank; of the axis `pp` these are bubbles, with
            the time after its last task.
        peak: As of the plan.
        collectives: Each collective of the plan, with the seconds that it takes once all members have come to it.
        spans: In the order of their ends. Ranks that do the same at the same time are the first of them.
        same: For each rank, the rank that its spans are listed for.
    """

    seconds: float
    busy: tuple[float, ...]
    waits: Mapping[str, tuple[float, ...]]
    peak: tuple[int, ...]
    collectives: tuple[tuple[Collective, float], ...]
    spans: tuple[Span, ...] = field(repr=False)
    same: tuple[int, ...] = field(repr=False)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The seconds in which a rank waits for other stages, by rank."""
        return self.waits.get("pp", (0.0,) * len(self.busy))

    def describe(self) -> str:
        """The times of the step and of its collectives, as a text."""
        whole, busy = self.seconds or 1.0, max(self.busy)
        share = ", ".join(f"{axis} {max(by) / whole:.0%}" for axis, by in self.waits.items())
        head = (
            f"{time_text(self.seconds)} a step; a rank computes for {time_text(busy)} ({busy / whole:.0%}), "
            f"waits at most: {share}; memory {ranks_text(self.peak)}"
        )
        totals: dict[tuple[str, str], list[float]] = {}
        for one, seconds in self.collectives:
            total = totals.setdefault((one.kind, one.axis), [0, 0.0, 0.0])
            total[0] += one.times
            total[1] += one.times * seconds
            total[2] += one.times * max(one.received)
        return "\n".join([
            head,
            *(
                f"  {count:.0f} x {kind} on {axis}: {time_text(seconds)}, {size_text(received)}"
                for (kind, axis), (count, seconds, received) in totals.items()
            ),
        ])  # fmt: skip

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the spans as a trace for Perfetto or chrome://tracing, in the form of `Runtime.trace`."""
        events: list[dict[str, Any]] = []
        for first, title in self._titles().items():
            for tid, name in enumerate((title, "operations", "collectives")):
                kind = "thread_name" if tid else "process_name"
                events.append({"ph": "M", "name": kind, "pid": first + 1, "tid": tid, "args": {"name": name}})
        for one in self.spans:
            where = {"pid": one.rank + 1, "tid": 2 if one.kind == "collective" else 1}
            times = {"ts": round(one.start * 1e6, 3), "dur": round((one.end - one.start) * 1e6, 3)}
            args = {} if one.microbatch < 0 else {"micro-batch": one.microbatch}
            events.append({"ph": "X", "name": one.name, "cat": one.kind, **where, **times, "args": args})
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")

    def draw(self) -> str:
        """An SVG of the time line: a row for each rank, and one below for its collectives."""
        titles, scale = self._titles(), _WIDTH / (self.seconds or 1.0)
        parts = [_text(4, 12, f"{time_text(self.seconds)} a step")]
        for at, kind in enumerate(_COLOURS):
            x = _LEFT + 90 * at
            parts.append(
                f'<rect x="{x}" y="3" width="10" height="10" fill="{_COLOURS[kind]}"/>{_text(x + 14, 12, kind)}'
            )
        for at, (first, words) in enumerate(titles.items()):
            y = 22 + at * _ROW
            parts.append(_text(4, y + 12, words))
            for one in _joined(self.spans, first):
                top, height = (y + 18, 6) if one.kind == "collective" else (y, 16)
                title = one.name if one.microbatch < 0 else f"{one.name}, micro-batch {one.microbatch}"
                taken = one.end - one.start
                parts.append(
                    f'<rect x="{_LEFT + one.start * scale:.1f}" y="{top}" width="{max(taken * scale, 0.3):.1f}"'
                    f' height="{height}" fill="{_COLOURS[one.kind]}" stroke="#fff" stroke-width="0.4">'
                    f"<title>{escape(title)}: {time_text(taken)}</title></rect>"
                )
        width, height = _LEFT + _WIDTH + 4, 26 + _ROW * len(titles)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
            f' font-family="sans-serif" font-size="11" fill="currentColor">{"".join(parts)}</svg>'
        )

    def _titles(self) -> dict[int, str]:
        """The ranks that have spans, with those that are the same."""
        ranks: dict[int, list[int]] = {}
        for rank, first in enumerate(self.same):
            ranks.setdefault(first, []).append(rank)
        return {first: f"rank {first}" if len(all_) == 1 else _range(all_) for first, all_ in ranks.items()}

    def _repr_html_(self) -> str:
        return f"{self.draw()}<pre>{escape(self.describe())}</pre>"


_LEFT, _WIDTH, _ROW = 90, 800, 30
_COLOURS: Final = {
    "forward": "#4c78a8",
    "backward": "#54a24b",
    "weights": "#b279a2",
    "update": "#9d755d",
    "collective": "#f58518",
}


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x}" y="{y}">{escape(words)}</text>'


def _joined(spans: Sequence[Span], rank: int) -> list[Span]:
    """The spans of a rank but waits; operations of one kind and micro-batch that follow each other are one."""
    joined: list[Span] = []
    for one in spans:
        if one.rank != rank or one.kind == "wait":
            continue
        last = joined[-1] if joined else one
        if one.kind != "collective" and (last.kind, last.microbatch, last.end) == (one.kind, one.microbatch, one.start):
            joined[-1] = last._replace(end=one.end, name=one.kind)
        else:
            joined.append(one)
    return joined


def _range(ranks: Sequence[int]) -> str:
    is_row = ranks[-1] - ranks[0] + 1 == len(ranks)
    return f"ranks {ranks[0]} to {ranks[-1]}" if is_row else f"{len(ranks)} ranks from {ranks[0]}"


def simulate(plan: Instructions, hardware: Hardware) -> Simulation:
    if plan.size > hardware.devices:
        raise ValueError(f"the plan is for {plan.size} ranks, and the hardware has {hardware.devices} devices")
    rules = Rules(plan.inner)
    ranks = _Ranks(plan, hardware, rules)
    programs = {first: _Program(plan, hardware, rules, ranks, first).items() for first in dict.fromkeys(ranks.same)}
    engine = _Engine(programs, Counter(ranks.same), hardware.processors)
    engine.run()
    total = max(engine.ended.values())
    waits = {
        axis: tuple(
            engine.waits.get((axis, first), 0.0) + (total - engine.ended[first] if axis == ranks.pipeline else 0.0)
            for first in ranks.same
        )
        for axis in plan.axes
    }
    return Simulation(
        seconds=total,
        busy=tuple(engine.busy.get(first, 0.0) for first in ranks.same),
        waits=waits,
        peak=plan.peak,
        collectives=tuple((one, max(_seconds_of(one, hardware, ranks))) for one in plan.collectives),
        spans=tuple(engine.spans),
        same=ranks.same,
    )


def _seconds_of(one: Collective, hardware: Hardware, ranks: _Ranks) -> Iterator[float]:
    for first in dict.fromkeys(ranks.same):
        members = ranks.members(one.axis, first)
        yield hardware.seconds(one.kind, one.received[first], members[:2] if one.kind == "send" else members)


class _Ranks:
    """Ranks that do the same at the same time: those with parts of the same shapes, whose neighbours are alike too.

    Attributes:
        same: For each rank the first one that is like it.
    """

    def __init__(self, plan: Instructions, hardware: Hardware, rules: Rules) -> None:
        self.axes = dict(plan.axes)
        self.pipeline = "" if plan.pipeline is None else plan.pipeline.axis
        self._strides = {axis: math.prod(list(self.axes.values())[at + 1 :]) for at, axis in enumerate(self.axes)}
        kinds = kinds_of(plan.specs.values(), rules)
        groups = {axis: [self.members(axis, rank) for rank in range(plan.size)] for axis in self.axes}
        links = {members: hardware.seconds("all_to_all", 1.0, members) for members in set(chain(*groups.values()))}
        self.same = _numbered(
            (
                self.place(rank),
                kinds[self.inner(rank)],
                tuple(sorted(hardware.uneven.get(rank, {}).items())),
                tuple(links[by[rank]] for by in groups.values()),
            )
            for rank in range(plan.size)
        )
        count = 0
        while len(set(self.same)) > count:
            count = len(set(self.same))
            near = {members: self.classes(members) for members in links}
            self.same = _numbered(
                (one, *(near[by[rank]] for by in groups.values())) for rank, one in enumerate(self.same)
            )

    def members(self, axis: str, rank: int) -> range:
        """The ranks along an axis."""
        size, stride = self.axes[axis], self._strides[axis]
        first = rank - rank // stride % size * stride
        return range(first, first + size * stride, stride)

    def classes(self, members: Iterable[int]) -> frozenset[int]:
        return frozenset(self.same[one] for one in members)

    def place(self, rank: int) -> int:
        """The coordinate on the axis of the pipeline."""
        return rank // self._strides[self.pipeline] % self.axes[self.pipeline] if self.pipeline else 0

    def inner(self, rank: int) -> int:
        """The rank among those of its stage."""
        return rank_in_stage(dict(zip(self.axes, coords(self.axes, rank), strict=True)), self.axes, self.pipeline)


def _numbered(keys: Iterable[Any]) -> tuple[int, ...]:
    first: dict[Any, int] = {}
    return tuple(first.setdefault(key, rank) for rank, key in enumerate(keys))


class _Work(NamedTuple):
    seconds: float
    name: str
    kind: str
    microbatch: int


class _Begin(NamedTuple):
    """The beginning of a collective or a message.

    Attributes:
        key: The axis, its members, and what it is among those.
        by: The ranks that have to begin it.
    """

    key: tuple[Any, ...]
    by: frozenset[int]
    work: _Work


class _Wait(NamedTuple):
    key: tuple[Any, ...]


_Item: TypeAlias = _Work | _Begin | _Wait


class _Program:
    """The work of one rank, in its order, as `Code` and `StageRuns` do it."""

    def __init__(self, plan: Instructions, hardware: Hardware, rules: Rules, ranks: _Ranks, rank: int) -> None:
        self._plan = plan
        self._hardware = hardware
        self._rules = rules
        self._ranks = ranks
        self._rank = rank
        self._inner = ranks.inner(rank)
        self._places = [ranks.place(plan.ranks_of(stage)[0]) for stage in plan.stages]
        self._received: dict[int, int] = {}
        for one in plan.collectives:
            self._received[one.slot] = max(self._received.get(one.slot, 0), one.received[rank])
        self._counts: Counter[Any] = Counter()
        self._seconds: dict[int, float] = {}

    def items(self) -> Iterator[_Item]:
        plan, pipeline = self._plan, self._plan.pipeline
        if pipeline is None:
            yield from self._segment(plan.instructions, plan.causes)
            return
        here = self._ranks.place(self._rank)
        segments: dict[tuple[int, str], Segment] = {
            (one.stage, one.kind): one for one in pipeline.segments if self._places[one.stage] == here
        }
        for number, source, target in pipeline.begins:
            yield from self._send(number, source, target, -1)
        for number, source, target in pipeline.begins:
            yield from self._receive(number, source, target, -1)
        for stage, at, kind in pipeline.tasks(here):
            one = segments[stage, kind]
            yield from self._segment(one.instructions, one.causes, _KINDS[kind], at, stage)
            if at:
                yield from self._sums(pipeline.gradients, one.gives, at)
        for (stage, kind), one in segments.items():
            if kind == "U":
                yield from self._segment(one.instructions, one.causes, "update", pipeline.microbatches, stage)

    def _segment(
        self,
        instructions: Sequence[Instruction],
        causes: Sequence[Cause],
        kind: str = "",
        microbatch: int = -1,
        stage: int = 0,
    ) -> Iterator[_Item]:
        awaited, keys = Awaited(), dict[int, tuple[Any, ...]]()
        for one, cause in zip(instructions, causes, strict=True):
            for number in awaited.before(one):
                yield _Wait(keys.pop(number))
            awaited.after(one)
            if one.kind in COLLECTIVES:
                begin = self._collective(one, cause, microbatch)
                keys |= {out: begin.key for out in one.outs if out is not None}
                yield begin
            elif one.kind == "send":
                _, target, number = one.args
                yield from self._send(number, stage, target, microbatch)
            elif one.kind == "receive":
                yield from self._receive(one.args[1], one.args[0], stage, microbatch)
            else:
                yield _Work(self._time(one), cause.module or cause.operation, kind or cause.phase, microbatch)
        for number in awaited.rest():
            yield _Wait(keys.pop(number))

    def _time(self, one: Instruction) -> float:
        known = self._seconds.get(id(one))
        if known is None:
            work = work_of(one, self._plan.specs, self._rules, self._inner)
            known = self._seconds[id(one)] = self._hardware.work(*work, one.target or one.kind, self._rank)
        return known

    def _sums(self, gradients: Sequence[int], gives: Sequence[int], microbatch: int) -> Iterator[_Work]:
        for number in set(gradients).intersection(gives):
            add = Instruction("op", "aten.add.Tensor", (Slot(number), Slot(number)), {}, (number,))
            work = work_of(add, self._plan.specs, self._rules, self._inner)
            seconds = self._hardware.work(*work, "aten.add.Tensor", self._rank)
            yield _Work(seconds, "sum of gradients", "weights", microbatch)

    def _collective(self, one: Instruction, cause: Cause, microbatch: int) -> _Begin:
        axis, (slot, *_) = str(one.target), one.outs
        members = self._ranks.members(axis, self._rank)
        by = self._ranks.classes(members)
        self._counts[axis, by] += 1
        seconds = self._hardware.seconds(one.kind, self._received.get(slot or 0, 0), members)
        name = f"{one.kind} {axis}: {cause.module or cause.operation}"
        return _Begin((axis, by, self._counts[axis, by]), by, _Work(seconds, name, "collective", microbatch))

    def _send(self, number: int, source: int, target: int, microbatch: int) -> Iterator[_Item]:
        if self._places[source] != self._places[target] and self._places[source] == self._ranks.place(self._rank):
            members = self._ranks.members(self._ranks.pipeline, self._rank)
            pair = [members[self._places[source]], members[self._places[target]]]
            nbytes = self._rules.nbytes(self._plan.specs[number], self._inner)
            work = _Work(self._hardware.seconds("send", nbytes, pair), f"send {number}", "collective", microbatch)
            key = self._message(pair, number, microbatch)
            yield _Begin(key, frozenset({self._rank}), work)

    def _receive(self, number: int, source: int, target: int, microbatch: int) -> Iterator[_Item]:
        if self._places[source] != self._places[target] and self._places[target] == self._ranks.place(self._rank):
            members = self._ranks.members(self._ranks.pipeline, self._rank)
            pair = [members[self._places[source]], members[self._places[target]]]
            yield _Wait(self._message(pair, number, microbatch))

    def _message(self, pair: Sequence[int], number: int, microbatch: int) -> tuple[Any, ...]:
        return self._ranks.pipeline, tuple(self._ranks.same[one] for one in pair), number, microbatch


_NOTHING: Final = _Work(0.0, "", "", -1)
_KINDS: Final[Mapping[str, str]] = {"F": "forward", "B": "backward", "W": "weights"}


@dataclass(eq=False, slots=True)
class _Event:
    """A collective or a message; `ends` is known once all have begun it, if no processor has to do it."""

    arrived: int = 0
    work: _Work = _NOTHING
    ready: bool = False
    ends: float = 0.0
    waiting: list[int] = field(default_factory=list)


class _Engine:
    """Runs the programs of ranks against each other. What is being computed shares the processors, if these are few."""

    def __init__(self, programs: Mapping[int, Iterator[_Item]], sizes: Mapping[int, int], processors: int) -> None:
        self._programs = programs
        self._sizes = sizes
        # The ranks that work now.
        self._busy = 0
        self._processors = processors
        self._now = 0.0
        # The seconds of work that each rank that works all the time has done.
        self._done = 0.0
        self._working: list[tuple[float, int, int, _Work, float]] = []
        self._timers: list[tuple[float, int, int]] = []
        self._numbers = count()
        self._events: dict[tuple[Any, ...], _Event] = {}
        self._free: dict[Any, float] = {}
        self._since: dict[int, tuple[float, str]] = {}
        self.spans: list[Span] = []
        self.busy: defaultdict[int, float] = defaultdict(float)
        self.waits: defaultdict[tuple[str, int], float] = defaultdict(float)
        self.ended: dict[int, float] = {}

    def run(self) -> None:
        for rank in self._programs:
            self._go_on(rank)
        while self._working or self._timers:
            is_shared = self._processors and self._busy > self._processors
            rate = self._processors / self._busy if is_shared else 1.0
            timer = self._timers[0][0] if self._timers else math.inf
            ends = self._now + (self._working[0][0] - self._done) / rate if self._working else math.inf
            if ends <= timer:
                self._now, self._done = ends, self._working[0][0]
                _, _, rank, work, began = heappop(self._working)
                self._busy -= self._sizes[rank]
                self.busy[rank] += work.seconds
                self.spans.append(Span(rank, began, self._now, work.name, work.kind, work.microbatch))
            else:
                self._done += (timer - self._now) * rate
                self._now, _, rank = heappop(self._timers)
                self._waited(rank)
            self._go_on(rank)

    def _go_on(self, rank: int) -> None:
        for item in self._programs[rank]:
            match item:
                case _Work():
                    if item.seconds:
                        self._work(rank, item)
                        return
                case _Begin():
                    self._begin(item)
                case _Wait():
                    event = self._events.setdefault(item.key, _Event())
                    self._since[rank] = self._now, item.key[0]
                    if not event.ready:
                        event.waiting.append(rank)
                        return
                    if self._comes(rank, event):
                        return
        self.ended.setdefault(rank, self._now)

    def _work(self, rank: int, work: _Work) -> None:
        self._busy += self._sizes[rank]
        heappush(self._working, (self._done + work.seconds, next(self._numbers), rank, work, self._now))

    def _begin(self, item: _Begin) -> None:
        event = self._events.setdefault(item.key, _Event())
        event.arrived += 1
        event.work = max(event.work, item.work)
        if event.arrived < len(item.by):
            return
        event.ready = True
        if not self._processors:
            start = max(self._now, self._free.get(item.key[:2], 0.0))
            event.ends = self._free[item.key[:2]] = start + event.work.seconds
            work = event.work
            self.spans += (Span(one, start, event.ends, work.name, work.kind, work.microbatch) for one in item.by)
        for rank in event.waiting:
            if not self._comes(rank, event):
                heappush(self._timers, (self._now, next(self._numbers), rank))

    def _comes(self, rank: int, event: _Event) -> bool:
        """Whether a rank that waits has to go on doing so, or has to copy what has come."""
        if self._processors and event.work.seconds:
            self._waited(rank)
            self._work(rank, event.work)
            return True
        if event.ends > self._now:
            heappush(self._timers, (event.ends, next(self._numbers), rank))
            return True
        return False

    def _waited(self, rank: int) -> None:
        since, axis = self._since[rank]
        if self._now > since:
            self.waits[axis, rank] += self._now - since
            self.spans.append(Span(rank, since, self._now, axis, "wait"))
