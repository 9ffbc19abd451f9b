"""A pipeline schedule by an integer program: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, appendix G."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import combinations, product
from typing import Any, Final, NamedTuple

from .schedule import (
    UNIT_COSTS,
    Costs,
    Kind,
    Schedule,
    Task,
    Timeline,
    cost_of,
    gpipe,
    needs,
    one_f_one_b,
    simulate,
    steady,
    zb_h1,
    zb_h2,
    zbv,
)

__all__ = ["Row", "minimum", "solved"]

F, B, W = Kind
_ORDER: Final = {F: 0, B: 1, W: 2}


class Row(NamedTuple):
    """`low <= sum of factor * variable <= high`."""

    factors: Mapping[int, float]
    low: float
    high: float = math.inf


def minimum(
    costs: Sequence[float], rows: Sequence[Row], highest: Sequence[float], whole: Sequence[bool], seconds: float
) -> Sequence[float] | None:
    """The values from 0 to `highest`, of which some are whole numbers, with the least sum of costs; None if none fit.

    They are the best that HiGHS finds in this time.
    """
    try:
        optimize: Any = import_module("scipy.optimize")
        sparse: Any = import_module("scipy.sparse")
    except ImportError as error:
        raise ImportError("a search needs SciPy, for its solver HiGHS: pip install 'aiodaft[plan]'") from error
    places = [(value, at, variable) for at, row in enumerate(rows) for variable, value in row.factors.items()]
    values, ats, variables = zip(*places, strict=True)
    found = optimize.milp(
        costs,
        constraints=optimize.LinearConstraint(
            sparse.coo_array((values, (ats, variables)), shape=(len(rows), len(costs))).tocsr(),
            [row.low for row in rows],
            [row.high for row in rows],
        ),
        integrality=list(map(int, whole)),
        bounds=optimize.Bounds(0, highest),
        options={"time_limit": max(seconds, 0.0)},
    )
    return None if found.x is None else [float(one) for one in found.x]


def solved(
    places: Sequence[int],
    microbatches: int,
    costs: Costs = UNIT_COSTS,
    *,
    held: int,
    seconds: float = 10.0,
) -> Schedule:
    """A schedule with `W` tasks whose worst rank idles least, of those that hold so many activations at most.

    It is never worse than `one_f_one_b`, `zb_h1`, `zb_h2` and `zbv` where these fit, and the best that there is if the
    solver ends in time, as it does for about 200 tasks.

    Args:
        places: The rank of each stage: `[0, 1, 2]`, or `[0, 1, 1, 0]` for a V.
        microbatches: Their number.
        costs: The time of each kind of task, or a list with that of each stage.
        held: The most activations, of one micro-batch and stage, that a rank may hold at a time.
        seconds: The limit of the solver's time; with 0, the best of the known schedules.

    Raises:
        ImportError: SciPy is not installed: it comes with the extra `plan`.
        ValueError: No schedule holds so few; it says the least. Or an argument cannot be.
    """
    most = max(map(list(places).count, places), default=0)
    if microbatches < 1 or not places or set(places) != set(range(max(places) + 1)):
        raise ValueError(
            f"places={list(places)}, microbatches={microbatches}: give a stage to each rank from 0 on, and at least "
            "one micro-batch"
        )
    try:
        times = [cost_of(Task(stage, 0, kind), costs) for stage, kind in product(range(len(places)), Kind)]
    except LookupError:
        times = [math.nan]
    if not all(0 <= one < math.inf for one in times):
        raise ValueError(f"costs={costs}: give a time from 0 on for F, B and W, or a list with that of each stage")
    if held < most:
        raise ValueError(f"held={held}: a rank with {most} stages holds at least {most} activations")
    fitting = [one for one in _known(places, microbatches, costs, held) if max(simulate(one, costs).held) <= held]
    best = min(fitting, key=lambda one: _rated(simulate(one, costs)))
    timeline = simulate(best, costs)
    if seconds <= 0 or max(timeline.idle) <= 1e-9 * timeline.makespan:
        return best
    found = _Model(best, costs, timeline, held).solve(seconds)
    return min((best, found), key=lambda one: _rated(simulate(one, costs))) if found is not None else best


def _rated(timeline: Timeline) -> tuple[float, float]:
    return round(max(timeline.idle), 9), timeline.makespan


def _known(places: Sequence[int], microbatches: int, costs: Costs, held: int) -> Iterator[Schedule]:
    ranks = max(places) + 1
    yield _greedy(places, microbatches, costs, held)
    if list(places) == [*range(ranks), *range(ranks)[::-1]]:
        yield zbv(ranks, microbatches)
    if list(places) == [*range(ranks)]:
        yield from (zb_h1(ranks, microbatches), zb_h2(ranks, microbatches))
        for whole in (gpipe(ranks, microbatches), one_f_one_b(ranks, microbatches)):
            yield [[one for task in row for one in _split(task)] for row in whole]
        for more in range(ranks):
            warm_ups = [min(rest + min(more, rest), held - 1) for rest in range(ranks)[::-1]]
            yield [
                steady(rank, microbatches, warm_up=warm_up, lag=held - 1 - warm_up)
                for rank, warm_up in enumerate(warm_ups)
            ]


def _split(task: Task) -> tuple[Task, ...]:
    return (task, task._replace(kind=W)) if task.kind is B else (task,)


def _greedy(places: Sequence[int], microbatches: int, costs: Costs, held: int) -> Schedule:
    """The task that can begin first is next, a backward before a forward before a gradient of weights.

    A rank begins with a micro-batch when it has room for it in all its stages, so that none waits for memory forever.
    """
    ranks, path = max(places) + 1, range(len(places))
    room, free = [held] * ranks, [0.0] * ranks
    done = dict.fromkeys(product(path, Kind), 0)
    ends: dict[Task, float] = {}
    schedule: list[list[Task]] = [[] for _ in range(ranks)]

    def options() -> Iterator[tuple[float, int, int, Task]]:
        for (stage, kind), microbatch in done.items():
            task, rank = Task(stage, microbatch, kind), places[stage]
            needed = list(needs(task, path))
            fits = kind is not F or places.index(rank) < stage or places.count(rank) <= room[rank]
            if microbatch < microbatches and fits and all(one in ends for one in needed):
                start = max([free[rank], *(ends[one] for one in needed)])
                yield start, (B, F, W).index(kind), -stage, task

    while any(count < microbatches for count in done.values()):
        start, *_, task = min(options(), key=lambda option: option[:3])
        rank = places[task.stage]
        free[rank] = ends[task] = start + cost_of(task, costs)
        room[rank] += task.kind is W
        if task.kind is F and places.index(rank) == task.stage:
            room[rank] -= places.count(rank)
        done[task.stage, task.kind] += 1
        schedule[rank].append(task)
    return schedule


class _Model:
    """Variables: the start of each task, the idle time of the worst rank, the end of all, and the order of pairs."""

    def __init__(self, known: Schedule, costs: Costs, timeline: Timeline, held: int) -> None:
        self.known = known
        self.tasks = {task: at for at, task in enumerate(task for row in known for task in row)}
        self.costs = {task: cost_of(task, costs) for task in self.tasks}
        self.horizon = timeline.makespan
        self.idle, self.end = len(self.tasks), len(self.tasks) + 1
        self.highest = [*[self.horizon] * self.idle, max(timeline.idle) * (1 - 1e-6), self.horizon]
        self.rows: list[Row] = []
        self.pairs: dict[tuple[Task, Task], int] = {}
        path = range(1 + max(task.stage for task in self.tasks))
        for task, at in self.tasks.items():
            self.rows.append(Row({self.end: 1, at: -1}, self.costs[task]))
            for other in needs(task, path):
                self.rows.append(Row({at: 1, self.tasks[other]: -1}, self.costs[other]))
        for row in known:
            self._one_at_a_time(row)
            self._memory(row, held)
            self._idle(row)

    def solve(self, seconds: float) -> Schedule | None:
        binary = len(self.pairs)
        costs = [0.0] * self.idle + [1.0, 1e-4] + [0.0] * binary
        whole = [False] * (self.end + 1) + [True] * binary
        found = minimum(costs, self.rows, [*self.highest, *[1.0] * binary], whole, seconds)
        if found is None:
            return None
        middles = {task: found[at] + self.costs[task] / 2 for task, at in self.tasks.items()}
        return [sorted(row, key=middles.__getitem__) for row in self.known]

    def _one_at_a_time(self, row: Sequence[Task]) -> None:
        for pair in combinations(row, 2):
            for first, then in (pair, pair[::-1]):
                always, factors = self._before(first, then)
                if always or factors:
                    late = {at: -self.horizon * factor for at, factor in factors.items()}
                    wait = self.costs[first] - (self.horizon * (1 - always) if factors else 0)
                    self.rows.append(Row({self.tasks[then]: 1, self.tasks[first]: -1, **late}, wait))

    def _before(self, one: Task, other: Task) -> tuple[float, dict[int, float]]:
        """Whether it comes before the other: a constant, and factors of variables to add."""
        if (known := _known_order(one, other)) is not None:
            return float(known), {}
        if (other, one) in self.pairs:
            return 1.0, {self.pairs[other, one]: -1.0}
        return 0.0, {self.pairs.setdefault((one, other), self.end + 1 + len(self.pairs)): 1.0}

    def _memory(self, row: Sequence[Task], held: int) -> None:
        for forward, others in product((task for task in row if task.kind is F), [row]):
            constant, total = 1.0, dict[int, float]()
            for other in others:
                if other.kind is not B and other != forward:
                    sign = 1 if other.kind is F else -1
                    always, factors = self._before(other, forward)
                    constant += sign * always
                    for at, factor in factors.items():
                        total[at] = total.get(at, 0.0) + sign * factor
            self.rows.append(Row(total, -math.inf, held - constant))

    def _idle(self, row: Sequence[Task]) -> None:
        work = sum(self.costs[task] for task in row)
        last = max(task.microbatch for task in row)
        for first, end in product(row, row):
            if (first.kind, first.microbatch, end.kind, end.microbatch) == (F, 0, W, last):
                self.rows.append(Row({self.idle: 1, self.tasks[first]: 1, self.tasks[end]: -1}, self.costs[end] - work))


def _known_order(one: Task, other: Task) -> bool | None:
    """Micro-batches come in their order, and a task after those that it needs."""
    if one.stage == other.stage:
        kinds = _ORDER[one.kind] - _ORDER[other.kind]
        microbatches = one.microbatch - other.microbatch
        return kinds + microbatches < 0 if kinds * microbatches >= 0 else None
    if one.microbatch != other.microbatch or W in (one.kind, other.kind):
        return None
    if one.kind is other.kind:
        return (one.stage < other.stage) == (one.kind is F)
    return one.kind is F
