"""Pipeline schedules as data: the tasks of each rank, in order; and the schedules of the literature.

A schedule does not list transfers: they follow from it (`transfers`), and aiodaft makes them by passing refs. A
micro-batch of which a stage has no task skips this stage ("SkipPipe", arXiv:2502.19913).

The table is for `p` ranks, enough micro-batches `m` and unit costs of forward, backward (input) and backward (weights).
"Idle" is the idle time of the worst rank; "held" the most activations that one rank holds, in activations of its whole
share of the model.

| schedule | idle | held | from |
|---|---|---|---|
| gpipe | 3(p-1) | m | Huang et al., "GPipe", 2019 |
| one_f_one_b | 3(p-1) | p | Narayanan et al., "PipeDream", 2019 (the schedule with flushes) |
| interleaved | 3(p-1)/v | about p(1+1/v) | Narayanan et al., "Efficient Large-Scale Language Model Training", 2021 |
| zb_h1 | p-1 | p | Qi et al., "Zero Bubble Pipeline Parallelism", 2023 |
| zb_h2 | 0 | 2p-1 | the same |
| zbv | 0 | p | Qi et al., "Pipeline Parallelism with Controllable Memory", 2024 |
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from aiodaft.ref import Ref


class Kind(Enum):
    """The computation of a task, for one micro-batch on one stage.

    In a schedule with `W` tasks, `B` computes the gradient of the stage's input and `W` that of its weights (Qi et al.,
    "Zero Bubble Pipeline Parallelism", 2023); otherwise `B` computes both.
    """

    F = "forward"
    B = "backward"
    W = "weights"

    def __repr__(self) -> str:
        return self.name


class Task(NamedTuple):
    """One task. Stages are numbered through the model; a rank may have several."""

    stage: int
    microbatch: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.kind.name}(stage {self.stage}, micro-batch {self.microbatch})"


# For each rank, its tasks in the order in which it runs them.
Schedule: TypeAlias = Sequence[Sequence[Task]]

Costs: TypeAlias = Mapping[Kind, float | Sequence[float]]
"""The time of each kind of task, or a list with that of each stage."""

UNIT_COSTS: Final[Mapping[Kind, float]] = {Kind.F: 1.0, Kind.B: 1.0, Kind.W: 1.0}


class ScheduleError(ValueError):
    """A schedule that cannot be run: a task is missing or repeated, or tasks wait for each other."""


class Transfer(NamedTuple):
    """Activations (F) or gradients (B) that one task sends to a task of another rank."""

    source: Task
    target: Task
    source_rank: int
    target_rank: int


@dataclass(frozen=True)
class Timeline:
    """The times of a schedule.

    Attributes:
        starts: The start of each task.
        ends: The end of each task.
        idle: For each rank, its idle time between its first and its last task.
        held: For each rank, the most activations (of one micro-batch and stage, from F to the end of B and W) that it
            holds at a time.
    """

    starts: Mapping[Task, float]
    ends: Mapping[Task, float]
    idle: tuple[float, ...]
    held: tuple[int, ...]

    @property
    def makespan(self) -> float:
        return max(self.ends.values())

    def order(self) -> list[Task]:
        """All tasks in the order in which they begin: each comes after the tasks that it needs."""
        return sorted(self.starts, key=lambda task: (self.starts[task], self.ends[task]))


def cost_of(task: Task, costs: Costs) -> float:
    cost = costs[task.kind]
    return cost[task.stage] if isinstance(cost, Sequence) else cost


def simulate(schedule: Schedule, costs: Costs = UNIT_COSTS) -> Timeline:
    """Compute the times of a schedule. Transfers take no time; without `W` tasks, a `B` takes the costs of both.

    Raises:
        ScheduleError: It cannot be run: a task is missing or repeated, or tasks wait for each other.
    """
    ranks, paths = rank_of_stages(schedule), paths_of(schedule)
    split = _is_split(schedule, paths, len(ranks))
    starts: dict[Task, float] = {}
    ends: dict[Task, float] = {}
    position = [0] * len(schedule)
    free = [0.0] * len(schedule)
    progress = True
    while progress:
        progress = False
        for rank, tasks in enumerate(schedule):
            while position[rank] < len(tasks):
                task = tasks[position[rank]]
                needed = list(needs(task, paths[task.microbatch]))
                if any(other not in ends for other in needed):
                    break
                starts[task] = max([free[rank], *(ends[other] for other in needed)])
                free[rank] = ends[task] = starts[task] + cost_of(task, costs)
                if not split and task.kind is Kind.B:
                    free[rank] = ends[task] = ends[task] + cost_of(task._replace(kind=Kind.W), costs)
                position[rank] += 1
                progress = True
    if len(ends) < sum(map(len, schedule)):
        raise ScheduleError(_cycle(schedule, position, ends))
    return Timeline(starts, ends, tuple(_idle(tasks, starts, ends) for tasks in schedule), _held(schedule, split=split))


def transfers(schedule: Schedule) -> list[Transfer]:
    """The transfers from rank to rank in one run.

    Raises:
        ScheduleError: As `simulate`.
    """
    ranks, paths = rank_of_stages(schedule), paths_of(schedule)
    return [
        Transfer(source, task, ranks[source.stage], ranks[task.stage])
        for task in simulate(schedule).order()
        for source in needs(task, paths[task.microbatch])
        if ranks[source.stage] != ranks[task.stage]
    ]


def needs(task: Task, path: Sequence[int]) -> Iterator[Task]:
    """The tasks that a task needs the results of: its own stage's first, then that of the stage before or behind.

    Args:
        task: The task.
        path: The stages of its micro-batch.
    """
    stage, microbatch, kind = task
    place = path.index(stage)
    if kind is Kind.F:
        if place > 0:
            yield Task(path[place - 1], microbatch, Kind.F)
        return
    yield Task(stage, microbatch, Kind.F if kind is Kind.B else Kind.B)
    if kind is Kind.B and place + 1 < len(path):
        yield Task(path[place + 1], microbatch, Kind.B)


def paths_of(schedule: Schedule) -> dict[int, list[int]]:
    """For each micro-batch, the stages that have tasks of it, in order."""
    stages: defaultdict[int, set[int]] = defaultdict(set)
    for tasks in schedule:
        for task in tasks:
            stages[task.microbatch].add(task.stage)
    return {microbatch: sorted(found) for microbatch, found in stages.items()}


def rank_of_stages(schedule: Schedule) -> list[int]:
    """The rank of each stage.

    Raises:
        ScheduleError: A stage has no rank, or two.
    """
    ranks: dict[int, int] = {}
    for rank, tasks in enumerate(schedule):
        for task in tasks:
            if ranks.setdefault(task.stage, rank) != rank:
                raise ScheduleError(f"stage {task.stage} is on rank {ranks[task.stage]} and on rank {rank}")
    if not ranks:
        raise ScheduleError("there are no tasks")
    missing = [stage for stage in range(max(ranks) + 1) if stage not in ranks]
    if missing:
        raise ScheduleError(f"no rank has stage {missing[0]}")
    return [ranks[stage] for stage in range(len(ranks))]


def _is_split(schedule: Schedule, paths: Mapping[int, Sequence[int]], stages: int) -> bool:
    """Check that each task is there once. Returns whether the schedule has `W` tasks."""
    counts = Counter(task for tasks in schedule for task in tasks)
    split = any(task.kind is Kind.W for task in counts)
    wanted = {
        Task(stage, microbatch, kind)
        for microbatch in range(1 + max(paths))
        for stage in {0, stages - 1, *paths.get(microbatch, ())}
        for kind in Kind
        if split or kind is not Kind.W
    }
    for task in sorted(wanted - counts.keys(), key=str):
        if task.stage in paths.get(task.microbatch, ()):
            raise ScheduleError(f"{task} is missing")
        raise ScheduleError(f"{task} is missing: a micro-batch can skip any stage but the first and the last")
    for task in sorted(counts.keys() - wanted, key=str):
        raise ScheduleError(f"{task} is no task of this schedule: micro-batches are numbered from 0")
    for task, count in counts.items():
        if count > 1:
            raise ScheduleError(f"{task} is listed {count} times")
    return split


def _cycle(schedule: Schedule, position: Sequence[int], ends: Mapping[Task, float]) -> str:
    """Describe a cycle of stuck ranks: each waits for a task that comes later on another one."""
    ranks, paths = rank_of_stages(schedule), paths_of(schedule)
    heads = {rank: tasks[position[rank]] for rank, tasks in enumerate(schedule) if position[rank] < len(tasks)}
    rank = next(iter(heads))
    steps: dict[int, str] = {}
    while rank not in steps:
        head = heads[rank]
        awaited = next(task for task in needs(head, paths[head.microbatch]) if task not in ends)
        other = ranks[awaited.stage]
        steps[rank] = f"rank {rank} is at {head} and waits for {awaited}, which rank {other} has after {heads[other]}"
        rank = other
    cycle = list(steps.values())[list(steps).index(rank) :]
    return "tasks of the schedule wait for each other: " + "; ".join(cycle)


def _idle(tasks: Sequence[Task], starts: Mapping[Task, float], ends: Mapping[Task, float]) -> float:
    if not tasks:
        return 0.0
    return ends[tasks[-1]] - starts[tasks[0]] - sum(ends[task] - starts[task] for task in tasks)


def _held(schedule: Schedule, *, split: bool) -> tuple[int, ...]:
    last = Kind.W if split else Kind.B
    peaks: list[int] = []
    for tasks in schedule:
        held = peak = 0
        for task in tasks:
            held += task.kind is Kind.F
            peak = max(peak, held)
            held -= task.kind is last
        peaks.append(peak)
    return tuple(peaks)


class PipelineRank(Protocol):
    """The methods that a schedule calls on an actor. They are all `def`, so that they run in order.

    A rank keeps the activations of a micro-batch from its `forward` to its `backward` (or to its `weights`, if the
    schedule has W tasks).
    """

    def start(self, batch: Any) -> Ref[None]:
        """Begin a run: with the batch on ranks with the first or the last stage, with None on others."""
        ...

    def forward(self, stage: int, microbatch: int, x: Any) -> Ref[Any]:
        """Compute the activations of a stage. `x` is None for the first stage, which takes its part of the batch.

        The `backward` of the last stage gets the result of its `forward`: None, if the actor keeps the loss.
        """
        ...

    def backward(self, stage: int, microbatch: int, gradient: Any) -> Ref[Any]:
        """Compute the gradient of the stage's input from that of its output (at the last stage: see `forward`)."""
        ...

    def weights(self, stage: int, microbatch: int) -> Ref[None]:
        """Compute the gradients of the stage's weights; only schedules with W tasks call it."""
        ...

    def finish(self, done: Any) -> Ref[Any]:
        """End a run, and return a result, such as the losses.

        `done` contains only None. If a forward or a backward fails, no rank finishes, so that none steps its optimizer.
        If a `weights` fails, its rank does not.
        """
        ...


def drive(schedule: Schedule, ranks: Sequence[PipelineRank], batch: Any) -> list[Ref[Any]]:
    """Run a schedule once. Returns the results of the ranks' `finish`.

    All calls are made at once, and each rank runs its own in the order of the schedule. Activations and gradients go
    from rank to rank as refs: they do not pass through the caller, and there are no sends and receives to put in order.
    If a forward or a backward fails, every returned ref fails with its error; if a `weights` fails, that of its rank.

    Args:
        schedule: For each rank its tasks.
        ranks: The actors.
        batch: A value or ref for the ranks with the first and the last stage.

    Raises:
        ScheduleError: The schedule cannot be run, or its number of ranks is not that of the actors.
    """
    if len(schedule) != len(ranks):
        raise ScheduleError(f"a schedule for {len(schedule)} ranks cannot run on {len(ranks)} actors")
    order = simulate(schedule).order()
    rank_of, paths = rank_of_stages(schedule), paths_of(schedule)
    ends = {rank_of[0], rank_of[-1]}
    began = [actor.start(batch if rank in ends else None) for rank, actor in enumerate(ranks)]
    results: dict[Task, Ref[Any]] = {}
    for task in order:
        stage, microbatch, kind = task
        actor = ranks[rank_of[stage]]
        needed = [results[other] for other in needs(task, paths[microbatch])]
        if kind is Kind.F:
            results[task] = actor.forward(stage, microbatch, needed[0] if needed else None)
        elif kind is Kind.B:
            # At the last stage, the result of its `forward`.
            results[task] = actor.backward(stage, microbatch, needed[-1])
        else:
            results[task] = actor.weights(stage, microbatch)
    # A task that fails makes the last task of its micro-batch fail, the backward of the first stage.
    ended = [ref for task, ref in results.items() if task.stage == 0 and task.kind is Kind.B]
    weights = [(rank_of[task.stage], ref) for task, ref in results.items() if task.kind is Kind.W]
    return [
        actor.finish([*began, *ended, *(ref for where, ref in weights if where == rank)])
        for rank, actor in enumerate(ranks)
    ]


F, B, W = Kind
# Each rank of the V has one stage on the way down, and one on the way up.
_DOWN: Final = 0
_UP: Final = 1


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    _check(ranks, microbatches)
    return [[Task(rank, mb, kind) for kind in (F, B) for mb in range(microbatches)] for rank in range(ranks)]


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """One forward, one backward, after the forwards that fill the ranks behind."""
    _check(ranks, microbatches)
    return [steady(rank, microbatches, warm_up=ranks - rank - 1) for rank in range(ranks)]


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with weight gradients in the time when ranks would idle: a third of the bubble, the same memory."""
    _check(ranks, microbatches)
    return [steady(rank, microbatches, warm_up=ranks - rank - 1, lag=rank) for rank in range(ranks)]


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Twice the warm-up of ZB-H1, twice the delay: no bubble (from `2 * ranks - 1` micro-batches), twice the memory.

    The ranks end at different times: for no bubble, the optimizer must not make them wait for each other.
    """
    _check(ranks, microbatches)
    return [steady(rank, microbatches, warm_up=2 * (ranks - rank - 1), lag=2 * rank) for rank in range(ranks)]


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B over several stages per rank, far apart in the model: a bubble that is `chunks` times smaller.

    Raises:
        ValueError: The number of micro-batches is no multiple of `ranks`.
    """
    _check(ranks, microbatches, chunks)
    if microbatches % ranks:
        raise ValueError(f"{microbatches} micro-batches on {ranks} ranks: take a multiple of the number of ranks")

    def nth(k: int, rank: int, kind: Kind) -> Task:
        """The k-th forward or backward of a rank: rounds of `ranks` micro-batches, chunk after chunk."""
        chunk, round_, place = k // ranks % chunks, k // (ranks * chunks), k % ranks
        chunk = chunks - 1 - chunk if kind is B else chunk
        return Task(chunk * ranks + rank, round_ * ranks + place, kind)

    total = microbatches * chunks
    schedule: list[list[Task]] = []
    for rank in range(ranks):
        warm_up = min(total, 2 * (ranks - rank - 1) + (chunks - 1) * ranks)
        tasks = [nth(k, rank, F) for k in range(warm_up)]
        for k in range(total):
            tasks += [nth(warm_up + k, rank, F)] if warm_up + k < total else []
            tasks.append(nth(k, rank, B))
        schedule.append(tasks)
    return schedule


def zbv(ranks: int, microbatches: int) -> Schedule:
    """Two stages per rank in the shape of a V (first and last stage share a rank): no bubble, the memory of 1F1B."""
    _check(ranks, microbatches)
    return [_one_side_of_v(rank, ranks, microbatches) for rank in range(ranks)]


def steady(rank: int, microbatches: int, *, warm_up: int, lag: int | None = None) -> list[Task]:
    """Warm-up forwards, then forward and backward in turn; with `lag`, W tasks come that many micro-batches later."""
    tasks = [Task(rank, mb, F) for mb in range(min(warm_up, microbatches))]
    for mb in range(microbatches):
        tasks += [Task(rank, mb + warm_up, F)] if mb + warm_up < microbatches else []
        tasks.append(Task(rank, mb, B))
        tasks += [Task(rank, mb - lag, W)] if lag is not None and mb >= lag else []
    if lag is not None:
        tasks += [Task(rank, mb, W) for mb in range(max(0, microbatches - lag), microbatches)]
    return tasks


def _one_side_of_v(rank: int, ranks: int, microbatches: int) -> list[Task]:
    stages = rank, 2 * ranks - 1 - rank
    tasks: list[Task] = []
    done: Counter[tuple[Kind, int]] = Counter()

    def work(times: int, *steps: tuple[Kind, int]) -> None:
        for step in times * steps:
            if done[step] < microbatches:
                tasks.append(Task(stages[step[1]], done[step], step[0]))
                done[step] += 1

    work(2 * (ranks - rank) - 1, (F, _DOWN))
    work(rank, (F, _UP), (F, _DOWN))
    work(ranks - rank, (F, _UP), (B, _UP), (W, _UP))
    while done[F, _UP] < microbatches or done[F, _DOWN] < microbatches:
        work(1, (F, _DOWN), (B, _DOWN), (W, _DOWN), (F, _UP), (B, _UP), (W, _UP))
    work(rank, (B, _DOWN), (B, _UP))
    work(ranks - rank, (B, _DOWN), (W, _DOWN))
    # The remaining W tasks of both sides, in the order of the micro-batches.
    while done[W, _DOWN] < microbatches or done[W, _UP] < microbatches:
        work(1, (W, _UP) if done[W, _UP] <= done[W, _DOWN] else (W, _DOWN))
    return tasks


def _check(ranks: int, microbatches: int, chunks: int = 1) -> None:
    for name, count in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if count < 1:
            raise ValueError(f"{name}={count}: there must be at least one")
