"""Schedules that run on actors."""

import asyncio
import random
from collections.abc import Callable

import pytest
from pipeline_ranks import Rank

import aiodaft
from aiodaft.pipeline import (
    Kind,
    Schedule,
    ScheduleError,
    Task,
    drive,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
    zb_h1,
    zb_h2,
    zbv,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


def last_stage(schedule: Schedule) -> int:
    return max(task.stage for tasks in schedule for task in tasks)


def listed(schedule: Schedule) -> list[list[tuple[int, int, str]]]:
    return [[(task.stage, task.microbatch, task.kind.name) for task in tasks] for tasks in schedule]


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, interleaved, zb_h1, zb_h2, zbv])
async def test_each_rank_does_what_the_schedule_says_in_its_order(
    module_rt: aiodaft.Runtime, make: Callable[[int, int], Schedule]
) -> None:
    schedule = make(2, 4)
    ranks = await module_rt.group(2, Rank, last_stage(schedule))
    before = module_rt.traffic().payload
    done = await asyncio.gather(*drive(schedule, list(ranks), ["a", "b", "c", "d"]))
    assert done == listed(schedule)
    assert module_rt.traffic().payload == before


async def test_the_same_captured(module_rt: aiodaft.Runtime) -> None:
    schedule = zbv(2, 4)
    ranks = list(await module_rt.group(2, Rank, last_stage(schedule)))

    def step(batch: aiodaft.Ref[list[str]]) -> list[aiodaft.Ref[object]]:
        return drive(schedule, ranks, batch)

    async with aiodaft.compile(step) as graph:
        for _ in range(3):
            assert [await ref for ref in graph(["a", "b", "c", "d"])] == listed(schedule)


@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 2)])
async def test_random_valid_orders_never_hang(module_rt: aiodaft.Runtime, p: int, m: int) -> None:
    rng = random.Random(p)
    ranks = list(await module_rt.group(p, Rank, p - 1))
    runs: list[tuple[Schedule, list[aiodaft.Ref[object]]]] = []
    # On both loops: a thousand.
    while len(runs) < 250:
        schedule = random_order(rng, p, m)
        runs.append((schedule, drive(schedule, ranks, list("abc"))))
        if len(runs) % 50 == 0:
            for made, refs in runs[-50:]:
                assert await asyncio.gather(*refs) == listed(made)


def random_order(rng: random.Random, p: int, m: int) -> Schedule:
    """Any order in which each rank might take up what is there to do."""
    order: list[list[Task]] = [[] for _ in range(p)]
    done: set[Task] = set()
    todo = {Task(stage, mb, kind) for stage in range(p) for mb in range(m) for kind in (Kind.F, Kind.B)}
    while todo:
        ready = [
            task
            for task in sorted(todo, key=str)
            if (task.kind is Kind.F and (not task.stage or Task(task.stage - 1, task.microbatch, Kind.F) in done))
            or (
                task.kind is Kind.B
                and Task(task.stage, task.microbatch, Kind.F) in done
                and (task.stage == p - 1 or Task(task.stage + 1, task.microbatch, Kind.B) in done)
            )
        ]
        task = rng.choice(ready)
        todo.remove(task)
        done.add(task)
        order[task.stage].append(task)
    return order


@pytest.mark.parametrize("failing", [(0, 1, "F"), (1, 0, "B"), (1, 2, "W"), (0, 3, "B")])
async def test_an_error_in_any_task_reaches_whoever_waits_and_no_rank_that_depends_on_it_finishes(
    module_rt: aiodaft.Runtime, failing: tuple[int, int, str]
) -> None:
    schedule = zb_h1(2, 4)
    ranks = list(await module_rt.group(2, Rank, 1, failing))
    outcomes = await asyncio.gather(*drive(schedule, ranks, list("abcd")), return_exceptions=True)
    finished = [await rank.times_finished() for rank in ranks]
    if failing[2] == "W":
        # Nothing but the rank's own weights depends on it.
        assert isinstance(outcomes[failing[0]], ArithmeticError)
        assert finished[failing[0]] == 0
    else:
        assert all(isinstance(outcome, ArithmeticError) for outcome in outcomes)
        assert finished == [0, 0]


async def test_the_number_of_actors_must_be_that_of_ranks(module_rt: aiodaft.Runtime) -> None:
    ranks = list(await module_rt.group(2, Rank, 2))
    with pytest.raises(ScheduleError, match="3 ranks cannot run on 2 actors"):
        drive(gpipe(3, 2), ranks, list("ab"))


async def test_a_schedule_of_ones_own_takes_a_few_lines() -> None:
    def two_at_a_time(p: int, m: int) -> Schedule:
        """GPipe in groups of two micro-batches."""
        return [
            [Task(rank, mb, kind) for first in range(0, m, 2) for kind in (Kind.F, Kind.B) for mb in (first, first + 1)]
            for rank in range(p)
        ]

    assert simulate(two_at_a_time(4, 8)).held == (2, 2, 2, 2)
