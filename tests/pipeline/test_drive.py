"""Schedules that run on actors."""

import asyncio
import functools
import random
from collections.abc import Callable

import pytest
from pipeline_ranks import Rank, batch_of

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
    solved,
    transfers,
    zb_h1,
    zb_h2,
    zbv,
)
from aiodaft.pipeline.schedule import needs

pytestmark = pytest.mark.asyncio(loop_scope="module")


def last_stage(schedule: Schedule) -> int:
    return max(task.stage for tasks in schedule for task in tasks)


def listed(schedule: Schedule) -> list[list[tuple[int, int, str]]]:
    return [[(task.stage, task.microbatch, task.kind.name) for task in tasks] for tasks in schedule]


def by_solver(p: int, m: int) -> Schedule:
    return solved([*range(p), *range(p)[::-1]], m, {Kind.F: 1, Kind.B: 2, Kind.W: 1}, held=2 * p, seconds=0)


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, interleaved, zb_h1, zb_h2, zbv, by_solver])
async def test_each_rank_does_what_the_schedule_says_in_its_order(
    module_rt: aiodaft.Runtime, make: Callable[[int, int], Schedule]
) -> None:
    schedule = make(2, 4)
    ranks = await module_rt.group(2, Rank, last_stage(schedule))
    before = module_rt.traffic().payload
    done = await asyncio.gather(*drive(schedule, list(ranks), batch_of(schedule)))
    assert done == listed(schedule)
    assert module_rt.traffic().payload == before


async def test_the_same_captured(module_rt: aiodaft.Runtime) -> None:
    schedule = zbv(2, 4)
    ranks = list(await module_rt.group(2, Rank, last_stage(schedule)))

    def step(batch: aiodaft.Ref[list[list[int]]]) -> list[aiodaft.Ref[object]]:
        return drive(schedule, ranks, batch)

    async with aiodaft.compile(step) as graph:
        for _ in range(3):
            assert [await ref for ref in graph(batch_of(schedule))] == listed(schedule)


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("count", [25, pytest.param(334, marks=[pytest.mark.programs, pytest.mark.timeout(600)])])
async def test_random_valid_orders_never_hang(module_rt: aiodaft.Runtime, p: int, count: int) -> None:
    """Row CO6, a thousand in CI: stages on any rank, weights apart or not, some skipped; every fifth compiled, too."""
    rng = random.Random(p)
    last = 4
    ranks = list(await module_rt.group(p, Rank, last))
    runs: list[tuple[Schedule, list[aiodaft.Ref[object]]]] = []
    for number in range(count):
        schedule = random_order(rng, p, last + 1, rng.randint(1, 4))
        runs.append((schedule, drive(schedule, ranks, batch_of(schedule))))
        if number % 5 == 0:
            async with aiodaft.compile(functools.partial(drive, schedule, ranks)) as graph:
                runs.append((schedule, graph(batch_of(schedule))))
    for made, refs in runs:
        assert await asyncio.gather(*refs) == listed(made)


def random_order(rng: random.Random, p: int, stages: int, m: int) -> Schedule:
    """Any order in which each rank might take up its open tasks; every micro-batch may skip stages."""
    # Each rank has at least one stage.
    rank_of = [*range(p), *(rng.randrange(p) for _ in range(stages - p))]
    rng.shuffle(rank_of)
    kinds = rng.choice([(Kind.F, Kind.B), tuple(Kind)])
    order: list[list[Task]] = [[] for _ in range(p)]
    done: set[Task] = set()
    # The first micro-batch goes through all stages, so that each has a rank.
    paths = [
        [stage for stage in range(stages) if not mb or stage in {0, stages - 1} or rng.random() < 0.7]
        for mb in range(m)
    ]
    todo = [Task(stage, mb, kind) for mb, path in enumerate(paths) for stage in path for kind in kinds]
    while todo:
        task = rng.choice([task for task in todo if done.issuperset(needs(task, paths[task.microbatch]))])
        todo.remove(task)
        done.add(task)
        order[rank_of[task.stage]].append(task)
    return order


# The tasks of the ranks when two users of torch.distributed.pipelining were stuck, each waiting for the other's
# receive: https://github.com/pytorch/pytorch/issues/172668. Two ranks, four stages.
STUCK = {
    "receives where they are needed": (False, ["0SEND_F1 2RECV_F0 2F0", "1SEND_F0 1RECV_F1 1F1"]),
    "odd ranks receive first": (True, ["0SEND_F2 2RECV_B0 2B0", "3SEND_B0 3F1 3B1 1RECV_F2 3SEND_B1 1F2"]),
}


@pytest.mark.parametrize("name", STUCK)
async def test_the_two_published_stuck_orders_run(module_rt: aiodaft.Runtime, name: str) -> None:
    """Row CO6: planned by hand, sends and receives make these schedules wait for themselves; refs cannot."""
    odd_receive_first, published = STUCK[name]
    schedule = interleaved(2, 4)
    stuck = with_transfers_by_hand(schedule, odd_receive_first)
    run_blocking(stuck)
    assert [" ".join(left)[: len(text)] for left, text in zip(stuck, published, strict=True)] == published
    ranks = list(await module_rt.group(2, Rank, last_stage(schedule)))
    assert await asyncio.gather(*drive(schedule, ranks, batch_of(schedule))) == listed(schedule)
    async with aiodaft.compile(functools.partial(drive, schedule, ranks)) as graph:
        assert await asyncio.gather(*graph(batch_of(schedule))) == listed(schedule)


def with_transfers_by_hand(schedule: Schedule, odd_receive_first: bool) -> list[list[str]]:
    """Each rank's actions as torch writes them: a receive right before its task, a send right after it."""
    inward = {transfer.target: transfer.source for transfer in transfers(schedule)}
    outward = set(inward.values())
    actions: list[list[str]] = []
    for rank, tasks in enumerate(schedule):
        made: list[str] = []
        for task in tasks:
            stage, mb, kind = task.stage, task.microbatch, task.kind.name
            receive = [f"{stage}RECV_{kind}{mb}"] if task in inward else []
            before = len(made) - 1 if odd_receive_first and rank % 2 and made and "SEND" in made[-1] else len(made)
            made[before:before] = receive
            made.append(f"{stage}{kind}{mb}")
            made += [f"{stage}SEND_{kind}{mb}"] if task in outward else []
        actions.append(made)
    return actions


def run_blocking(actions: list[list[str]]) -> None:
    """Two ranks, where a send waits for its receive: take the tasks that they get done from their lists."""
    while True:
        heads = [left[0] if left else "" for left in actions]
        alone = [rank for rank, head in enumerate(heads) if head and "_" not in head]
        if not alone and not (matches(*heads) or matches(*heads[::-1])):
            return
        for rank in alone or (0, 1):
            del actions[rank][0]


def matches(send: str, receive: str) -> bool:
    if "SEND" not in send or "RECV" not in receive:
        return False
    stage, what = send.split("SEND_")
    return receive == f"{int(stage) + (1 if what[0] == 'F' else -1)}RECV_{what}"


async def test_a_schedule_that_waits_for_itself_is_refused_where_it_is_compiled(module_rt: aiodaft.Runtime) -> None:
    """Row CO6: with the cycle, and before any rank is called."""
    ranks = list(await module_rt.group(2, Rank, 1))
    stuck = [
        [Task(0, 0, Kind.F), Task(0, 0, Kind.B), Task(0, 1, Kind.F), Task(0, 1, Kind.B)],
        [Task(1, 1, Kind.F), Task(1, 0, Kind.F), Task(1, 0, Kind.B), Task(1, 1, Kind.B)],
    ]
    with pytest.raises(ScheduleError, match="wait for each other: rank 0 is at B.*; rank 1 is at F") as caught:
        aiodaft.compile(functools.partial(drive, stuck, ranks))
    with pytest.raises(ScheduleError) as interpreted:
        drive(stuck, ranks, ["a", "b"])
    assert str(interpreted.value) == str(caught.value)
    assert (await ranks[0].times_finished(), (await module_rt.info(ranks[0])).done) == (0, 1)


@pytest.mark.parametrize("failing", [(0, 1, "F"), (1, 0, "B"), (1, 2, "W"), (0, 3, "B")])
async def test_an_error_in_any_task_reaches_every_awaiter_and_no_rank_that_depends_on_it_finishes(
    module_rt: aiodaft.Runtime, failing: tuple[int, int, str]
) -> None:
    schedule = zb_h1(2, 4)
    ranks = list(await module_rt.group(2, Rank, 1, failing))
    outcomes = await asyncio.gather(*drive(schedule, ranks, batch_of(schedule)), return_exceptions=True)
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
