"""The pipeline schedules of the literature, for a number of ranks and micro-batches.

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

from collections import Counter
from typing import Final

from .schedule import Kind, Schedule, Task

__all__ = ["gpipe", "interleaved", "one_f_one_b", "zb_h1", "zb_h2", "zbv"]

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
    return [_steady(rank, microbatches, warm_up=ranks - rank - 1) for rank in range(ranks)]


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with weight gradients in the time when ranks would idle: a third of the bubble, the same memory."""
    _check(ranks, microbatches)
    return [_steady(rank, microbatches, warm_up=ranks - rank - 1, lag=rank) for rank in range(ranks)]


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Twice the warm-up of ZB-H1, twice the delay: no bubble (from `2 * ranks - 1` micro-batches), twice the memory.

    The ranks end at different times: for no bubble, the optimizer must not make them wait for each other.
    """
    _check(ranks, microbatches)
    return [_steady(rank, microbatches, warm_up=2 * (ranks - rank - 1), lag=2 * rank) for rank in range(ranks)]


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


def _steady(rank: int, microbatches: int, *, warm_up: int, lag: int | None = None) -> list[Task]:
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
