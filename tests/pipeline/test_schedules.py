"""Pipeline schedules: their theory, their refusals, and that torch's own are the same."""

import itertools
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torchs
from torch.testing._internal.distributed.fake_pg import FakeStore

from aiodaft.pipeline import (
    Kind,
    Schedule,
    ScheduleError,
    Task,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
    transfers,
    zb_h1,
    zb_h2,
    zbv,
)

F, B, W = Kind
SIZES = [(p, m) for p in (2, 3, 4, 8) for m in (2 * p, 5 * p)]
EVERY = (gpipe, one_f_one_b, interleaved, zb_h1, zb_h2, zbv)


def without(schedule: Schedule, *left_out: Task) -> Schedule:
    return [[task for task in tasks if task not in left_out] for tasks in schedule]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_idle_time_is_what_theory_says(p: int, m: int) -> None:
    flushed = 3 * (p - 1)
    assert simulate(gpipe(p, m)).makespan == 3 * (p + m - 1)
    assert max(simulate(gpipe(p, m)).idle) == flushed
    assert max(simulate(one_f_one_b(p, m)).idle) == flushed
    # In the time that one of three chunks takes: 3(p-1), where a whole share would take three times that.
    assert max(simulate(interleaved(p, m, chunks=3)).idle) == flushed
    assert max(simulate(zb_h1(p, m)).idle) == flushed / 3
    assert max(simulate(zb_h2(p, m)).idle) == 0
    assert max(simulate(zbv(p, m)).idle) == 0


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_activations_held_are_what_the_schedule_says(p: int, m: int) -> None:
    assert simulate(gpipe(p, m)).held == (m,) * p
    assert simulate(one_f_one_b(p, m)).held == tuple(range(p, 0, -1))
    assert simulate(zb_h1(p, m)).held == (p,) * p
    assert simulate(zb_h2(p, m)).held == (2 * p - 1,) * p
    # A rank's share of the model is two stages here.
    assert simulate(zbv(p, m)).held == (2 * p,) * p


@pytest.mark.parametrize("make", EVERY)
@pytest.mark.parametrize("p", [1, 2, 5])
def test_few_microbatches_are_a_valid_schedule_too(make: Callable[[int, int], Schedule], p: int) -> None:
    for m in (p,) if make is interleaved else range(1, 2 * p):
        ends = simulate(make(p, m)).ends
        assert len(ends) == sum(map(len, make(p, m)))


@pytest.mark.parametrize("make", EVERY)
def test_transfers_are_all_that_goes_between_ranks(make: Callable[[int, int], Schedule]) -> None:
    p, m = 4, 8
    stages = 1 + max(task.stage for tasks in make(p, m) for task in tasks)
    # The two stages in the middle of a V live together.
    hops = stages - 1 - (make is zbv)
    found = transfers(make(p, m))
    assert len(found) == 2 * hops * m
    assert all(a.kind is b.kind and a.microbatch == b.microbatch and r != s for a, b, r, s in found)


def test_a_micro_batch_that_skips_a_stage_goes_past_it_and_takes_none_of_its_time() -> None:
    """Row TR3: the rest of any schedule without the tasks of a stage is a schedule."""
    full = one_f_one_b(4, 4)
    schedule = without(full, *(Task(stage, mb, kind) for stage, mb in ((1, 0), (2, 0), (2, 3)) for kind in Kind))
    past = [(a, b) for a, b, source, target in transfers(schedule) if abs(source - target) > 1]
    assert past == [
        (Task(0, 0, F), Task(3, 0, F)),
        (Task(3, 0, B), Task(0, 0, B)),
        (Task(1, 3, F), Task(3, 3, F)),
        (Task(3, 3, B), Task(1, 3, B)),
    ]
    assert simulate(schedule).makespan < simulate(full).makespan
    assert [len(tasks) for tasks in schedule] == [8, 6, 4, 8]


def test_the_order_of_a_timeline_puts_everything_after_what_it_needs() -> None:
    order = simulate(zbv(4, 9)).order()
    at = {task: place for place, task in enumerate(order)}
    for task in order:
        if task.kind is F and task.stage:
            assert at[task] > at[Task(task.stage - 1, task.microbatch, F)]
        if task.kind is W:
            assert at[task] > at[Task(task.stage, task.microbatch, B)]


def test_a_cycle_is_refused_and_named() -> None:
    stuck = [
        [Task(0, 0, F), Task(0, 0, B), Task(0, 1, F), Task(0, 1, B)],
        [Task(1, 1, F), Task(1, 0, F), Task(1, 0, B), Task(1, 1, B)],
    ]
    with pytest.raises(ScheduleError) as caught:
        simulate(stuck)
    assert str(caught.value) == (
        "tasks of the schedule wait for each other: rank 0 is at B(stage 0, micro-batch 0) and waits for "
        "B(stage 1, micro-batch 0), which rank 1 has after F(stage 1, micro-batch 1); "
        "rank 1 is at F(stage 1, micro-batch 1) and waits for F(stage 0, micro-batch 1), "
        "which rank 0 has after B(stage 0, micro-batch 0)"
    )


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([[Task(0, 0, F)]], "B(stage 0, micro-batch 0) is missing"),
        (without(zb_h1(3, 2), Task(1, 1, W)), "W(stage 1, micro-batch 1) is missing"),
        (without(zb_h1(3, 2), Task(1, 0, B)), "B(stage 1, micro-batch 0) is missing"),
        (without(one_f_one_b(3, 2), Task(0, 1, F), Task(0, 1, B)), "a micro-batch can skip any stage but the first"),
        (
            without(one_f_one_b(3, 2), Task(2, 0, F), Task(2, 0, B)),
            "B(stage 2, micro-batch 0) is missing: a micro-batch",
        ),
        (
            [[task for task in tasks if task.microbatch != 1] for tasks in gpipe(2, 3)],
            "B(stage 0, micro-batch 1) is mi",
        ),
        ([[Task(0, 0, F), Task(0, 0, F), Task(0, 0, B)]], "F(stage 0, micro-batch 0) is listed 2 times"),
        ([[Task(0, 0, F)], [Task(0, 0, B)]], "stage 0 is on rank 0 and on rank 1"),
        ([[Task(1, 0, F), Task(1, 0, B)]], "no rank has stage 0"),
        ([[Task(0, 0, F), Task(0, 0, B), Task(0, -1, F)]], "micro-batches are numbered from 0"),
        ([[Task(0, 0, F), Task(0, 0, B), Task(0, 0, W)], [Task(1, 0, F), Task(1, 0, B)]], "W(stage 1"),
        ([[]], "there are no tasks"),
        ([], "there are no tasks"),
    ],
)
def test_what_is_no_schedule_is_refused(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        simulate(schedule)
    assert message in str(caught.value)


@pytest.mark.parametrize("make", EVERY)
def test_sizes_that_make_no_sense_are_refused(make: Callable[[int, int], Schedule]) -> None:
    with pytest.raises(ValueError, match="ranks=0"):
        make(0, 4)
    with pytest.raises(ValueError, match="microbatches=0"):
        make(2, 0)


def test_interleaved_wants_whole_rounds() -> None:
    with pytest.raises(ValueError, match="multiple of the number of ranks"):
        interleaved(4, 6)


def test_costs_change_the_times() -> None:
    slow_backward = simulate(one_f_one_b(2, 4), {F: 1, B: 2, W: 2})
    assert slow_backward.makespan == 5 * (2 + 4 - 1)


def test_a_thousand_random_orders_run_or_are_refused_for_a_cycle() -> None:
    rng = random.Random(0)
    refused = 0
    for _ in range(1000):
        p, m = rng.randint(2, 4), rng.randint(1, 4)
        schedule = [[Task(rank, mb, kind) for kind in (F, B) for mb in range(m)] for rank in range(p)]
        for tasks in schedule:
            rng.shuffle(tasks)
            tasks.sort(key=lambda task: task.kind is B if rng.random() < 0.7 else 0)
        try:
            assert len(simulate(schedule).order()) == 2 * p * m
        except ScheduleError:
            refused += 1
    assert 100 < refused < 900


@pytest.fixture
def four_ranks() -> Iterator[None]:
    init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    destroy_process_group()


KINDS = {"FORWARD": F, "FULL_BACKWARD": B, "BACKWARD_INPUT": B, "BACKWARD_WEIGHT": W}


def of_torch(cls: type, stages: list[int], of: int, microbatches: int) -> Schedule:
    """A schedule of torch.distributed.pipelining, as ours."""
    made = [PipelineStage(nn.Identity(), stage, of, torch.device("cpu")) for stage in stages]
    multi = issubclass(cls, torchs.PipelineScheduleMulti)
    schedule = cls(made if multi else made[0], microbatches, loss_fn=lambda y, target: y)
    order = schedule.pipeline_order if multi else schedule._get_pipeline_order()
    return [
        [
            Task(action.stage_index, action.microbatch_index, KINDS[action.computation_type.name])
            for action in order[rank]
            if action is not None and action.computation_type.name in KINDS
        ]
        for rank in range(4)
    ]


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("m", [4, 8, 16])
def test_torch_has_the_same_schedules(m: int) -> None:
    assert of_torch(torchs.ScheduleGPipe, [0], 4, m) == gpipe(4, m)
    # torch's list for the last rank counts forwards from 1; it runs them from 0.
    assert of_torch(torchs.Schedule1F1B, [0], 4, m)[:3] == one_f_one_b(4, m)[:3]
    assert of_torch(torchs.ScheduleInterleaved1F1B, [0, 4], 8, m) == interleaved(4, m)
    assert of_torch(torchs.ScheduleInterleavedZeroBubble, [0], 4, m) == zb_h1(4, m)


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("m", [8, 16])
def test_torch_has_the_same_v_but_for_the_last_weights(m: int) -> None:
    theirs, ours = of_torch(torchs.ScheduleZBVZeroBubble, [0, 7], 8, m), zbv(4, m)
    assert (simulate(theirs).idle, simulate(theirs).held) == (simulate(ours).idle, simulate(ours).held)
    for a, b in itertools.zip_longest(theirs, ours):
        assert [task for task in a if task.kind is not W] == [task for task in b if task.kind is not W]
