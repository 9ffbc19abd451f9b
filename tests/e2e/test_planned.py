"""Planned collectives: what members exchange again and again, through memory that they share."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch
from planners import Planner
from supervised import AT_ONCE

import aiodaft
from aiodaft import ActorDied, CallCancelled, GroupChanged, Restart

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Bytes of one element, of several windows, and of windows that members cannot divide evenly.
MANY = 600_001


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def opened(rt: aiodaft.Runtime, count: int) -> aiodaft.Group[Planner]:
    group = await rt.group(count, Planner)
    await group.all(Planner.open)
    return group


async def errors_of(refs: Any) -> list[Any]:
    return await asyncio.gather(*refs, return_exceptions=True)


# Elements of float32 in a window, and fewer than three or four members have in the next one.
WINDOW_AND_SOME = (1 << 18) + 2


@pytest.mark.parametrize("count", [2, 3, 4])
async def test_each_collective_equals_local_torch(rt: aiodaft.Runtime, count: int) -> None:
    group = await rt.group(count, Planner)
    for size in (0, 1, 10, MANY, WINDOW_AND_SOME):
        await group.all(Planner.check_in_thread, size, torch.float32, "sum")
        await group.all(Planner.check_on_loop, size, torch.bfloat16, "max")
    await group.all(Planner.check_on_loop, 70_000, torch.int64, "min")
    for dtype in (torch.float64, torch.float16, torch.int8, torch.uint8, torch.bool, torch.complex64):
        await group.all(Planner.check_in_thread, 100, dtype, "sum")
    await group.all(Planner.check_in_thread, 100, torch.float32, "product")
    assert await group.all(Planner.left) == [(0, 0)] * count


async def test_results_are_written_into_tensors_that_are_views_of_their_conjugates(rt: aiodaft.Runtime) -> None:
    assert await (await opened(rt, 2)).all(Planner.gather_into_conjugates) == [[1j, 1 + 1j]] * 2


async def test_an_exchange_gives_its_result_again(rt: aiodaft.Runtime) -> None:
    group = await opened(rt, 2)
    assert await group.all(Planner.await_twice) == [True, True]


async def test_another_loop_cannot_await_an_exchange_and_the_plan_goes_on(rt: aiodaft.Runtime) -> None:
    group = await opened(rt, 2)
    with pytest.raises(RuntimeError, match="all_reduce sum is awaited on another event loop than the one"):
        await group[0].reduce_on_another_loop()
    assert [one.item() for one in await group.all(Planner.reduce, torch.ones(()))] == [2, 2]


async def test_a_group_of_one_has_plans(rt: aiodaft.Runtime) -> None:
    group = await opened(rt, 1)
    assert await group.all(Planner.reduce, torch.ones(2)) == [pytest.approx(torch.ones(2))]


async def test_parts_of_a_group_have_plans_of_their_own(rt: aiodaft.Runtime) -> None:
    group = await rt.group(4, Planner, axes={"dp": 2, "tp": 2})
    await group.all(Planner.open, "tp")
    found = await group.each(Planner.reduce, [torch.tensor(rank) for rank in range(4)])
    assert [one.item() for one in found] == [1, 1, 5, 5]


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2, "tp": 2}, {"dp": 1, "tp": 3}])
async def test_each_axis_has_a_plan_and_all_go_on_at_once(rt: aiodaft.Runtime, axes: dict[str, int]) -> None:
    ranks = torch.arange(math.prod(axes.values())).reshape(*axes.values())
    group = await rt.group(ranks.numel(), Planner, axes=axes)
    sums = [ranks.sum(dim, keepdim=True).expand(ranks.shape).flatten().tolist() for dim in range(len(axes))]
    assert await group.all(Planner.reduce_along_each, *axes) == [
        [(total, 1, 4) for total in along] for along in zip(*sums, strict=True)
    ]


async def test_processors_that_reorder_writes_count_the_signals(rt: aiodaft.Runtime) -> None:
    group = await rt.group(3, Planner)
    await group.all(Planner.count_signals)
    for size in (10, MANY):
        await group.all(Planner.check_in_thread, size, torch.float32, "sum")
        await group.all(Planner.check_on_loop, size, torch.float32, "sum")


async def test_lengths_are_those_of_the_rows(rt: aiodaft.Runtime) -> None:
    for error in await errors_of((await opened(rt, 2)).all(Planner.scatter, torch.ones(3), [1, 1])):
        with pytest.raises(ValueError, match=r"reduce_scatter: expected lengths of 2 parts of 3 rows, not \[1, 1\]"):
            raise error


async def test_tasks_of_a_member_take_turns(rt: aiodaft.Runtime) -> None:
    assert await (await opened(rt, 2)).all(Planner.at_once, 5) == [[0, 2, 4, 6, 8]] * 2


@pytest.mark.parametrize("size", [1, MANY])
async def test_what_is_repeated_sends_no_message(rt: aiodaft.Runtime, size: int) -> None:
    assert await (await opened(rt, 3)).all(Planner.sent_meanwhile, size, 5) == [0, 0, 0]


async def test_members_that_disagree_are_named_and_the_plan_goes_on(rt: aiodaft.Runtime) -> None:
    group = await opened(rt, 3)
    for sizes, ops, what in [
        ([2, 2, 3], ["sum"] * 3, r"all_reduce sum float32 \[\[2\]\], rank 2 has all_reduce sum float32 \[\[3\]\]"),
        ([MANY, MANY, 2], ["sum"] * 3, "rank 2 has all_reduce sum"),
        ([2, 2, 2], ["sum", "sum", "max"], r"all_reduce sum .*, rank 2 has all_reduce max"),
    ]:
        refs = [group[rank].reduce(torch.ones(sizes[rank]), ops[rank]) for rank in range(3)]
        for error in await errors_of(refs):
            with pytest.raises(ValueError, match=rf"the members disagree: rank \d has .*{what}"):
                raise error
    assert [one.item() for one in await group.all(Planner.reduce, torch.ones(()))] == [3] * 3


async def test_members_that_disagree_in_calls_of_the_group_have_that_error_and_the_plan_goes_on(
    rt: aiodaft.Runtime,
) -> None:
    group = await opened(rt, 2)
    for error in await errors_of(group.each(Planner.reduce_late, [2, 3])):
        with pytest.raises(ValueError, match=r"rank 0 has all_reduce sum float32 \[\[2\]\], rank 1 has"):
            raise error
    assert [one.item() for one in await group.all(Planner.reduce, torch.ones(()))] == [2, 2]


async def test_bad_arguments_are_refused_at_once(rt: aiodaft.Runtime) -> None:
    group = await opened(rt, 2)
    for member in group:
        with pytest.raises(ValueError, match="a plan combines tensors by the name of an op"):
            await member.reduce(torch.ones(1), max)
        with pytest.raises(RuntimeError, match="all_reduce sum would block the event loop of this thread: use `await`"):
            await member.block_the_loop()
    assert [one.item() for one in await group.all(Planner.reduce, torch.ones(()))] == [2, 2]


@pytest.mark.parametrize(
    ("tensor", "out", "error"),
    [
        (None, None, "all_reduce sum: a plan is for dense tensors, not for NoneType"),
        (torch.ones(2), torch.ones(3), r"the result is torch.float32 \(2,\), and `out` is torch.float32 \(3,\)"),
    ],
)
async def test_what_one_member_cannot_use_ends_the_plan_for_all(
    rt: aiodaft.Runtime, tensor: Any, out: Any, error: str
) -> None:
    group = await opened(rt, 2)
    first = group[0].reduce(torch.ones(2))
    with pytest.raises((TypeError, ValueError), match=error):
        await group[1].reduce(tensor, out=out)
    with pytest.raises(CallCancelled, match=f"rank 1 has left it: all_reduce sum: .*{error}"):
        await first
    with pytest.raises(CallCancelled, match="this member has left it"):
        await group[1].reduce(torch.ones(2))


@pytest.mark.parametrize(
    ("place", "turn", "size"),
    [
        ("tell", 0, 1),
        ("signal", 0, 1),
        ("come_soon", 0, 1),
        ("signal", 1, MANY),
        ("come_soon", 2, MANY),
        ("put", 2, MANY),
    ],
)
async def test_a_death_in_an_exchange_is_told_to_the_others(
    rt: aiodaft.Runtime, place: str, turn: int, size: int
) -> None:
    group = await opened(rt, 3)
    dying = group[1].die_at(place, turn, size)
    others = [group[rank].reduce(torch.ones(size), "sum", 9) for rank in (0, 2)]
    with pytest.raises(ActorDied, match="SIGKILL"):
        await dying
    for ref in others:
        with pytest.raises(ActorDied, match="SIGKILL") as raised:
            await ref
        assert any("this was Planner" in note and "rank 1" in note for note in raised.value.__notes__)
    with pytest.raises(ActorDied):
        await group[0].reduce(torch.ones(size))


@pytest.mark.parametrize("method", [Planner.reduce, Planner.reduce_on_loop])
async def test_a_member_that_is_stopped_ends_the_plan(rt: aiodaft.Runtime, method: Any) -> None:
    group = await opened(rt, 3)
    waiting = group[0:1].all(method, torch.ones(1))
    await rt.stop(group[2])
    with pytest.raises((ActorDied, GroupChanged), match="stopped|has changed"):
        await waiting[0]


async def test_the_error_of_another_call_of_the_group_ends_what_waits(rt: aiodaft.Runtime) -> None:
    group = await opened(rt, 3)
    for error in (await errors_of(group.each(Planner.reduce_unless, [False, True, False])))[::2]:
        with pytest.raises(CallCancelled, match="a bad batch"):
            raise error
    await group.all(Planner.open)
    assert await group.all(Planner.reduce_unless, False) == [3, 3, 3]


async def test_a_member_that_stops_waiting_is_named(rt: aiodaft.Runtime) -> None:
    group = await opened(rt, 2)
    await group[1].leave()
    # That one has signalled, so the other has its result.
    await group[0].reduce(torch.ones(1))
    with pytest.raises(CallCancelled, match="rank 1 has left it: all_reduce sum: its wait was cancelled"):
        await group[0].reduce(torch.ones(1))
    assert await group.all(Planner.left) == [(0, 0)] * 2


async def test_a_call_that_is_cancelled_in_a_thread_ends_the_plan(rt: aiodaft.Runtime) -> None:
    group = await opened(rt, 2)
    first = group[0].reduce(torch.ones(1), "sum", 2)
    second = group[1].reduce(torch.ones(1))
    await second
    first.cancel()
    # When it has ended, it has come to one more exchange at most.
    with pytest.raises(CallCancelled):
        await first
    with pytest.raises(CallCancelled, match="rank 0 has left it"):
        await group[1].reduce(torch.ones(1), "sum", 2)
    # It comes after the end of the call that was cancelled. Both still have the plan.
    await errors_of(group.all(Planner.reduce, torch.ones(1)))
    assert await group.all(Planner.left) == [(0, 0)] * 2


async def test_a_new_epoch_ends_the_plan_and_members_open_another_one(rt: aiodaft.Runtime) -> None:
    group = await rt.on(restart=Restart(intensity=9, backoff=AT_ONCE)).group(2, Planner)
    await group.all(Planner.open)
    waiting = group[0].reduce(torch.ones(1))
    await group.renew()
    with pytest.raises(GroupChanged, match="this plan is of epoch 1, it has epoch 2 now; use what current_group"):
        await waiting
    await group.all(Planner.open)
    assert [one.item() for one in await group.all(Planner.reduce, torch.ones(()))] == [2, 2]
    assert await group.all(Planner.left) == [(1, 1)] * 2


@pytest.mark.parametrize("end", ["close", "forget"])
async def test_a_plan_that_is_closed_or_dropped_leaves_nothing(rt: aiodaft.Runtime, end: str) -> None:
    group = await opened(rt, 2)
    first = group[0].reduce(torch.ones(1))
    await getattr(group[1], end)()
    with pytest.raises(CallCancelled, match="rank 1 has left it: it was closed"):
        await first
    await getattr(group[0], end)()
    assert await group.all(Planner.left) == [(0, 0)] * 2


async def test_a_plan_whose_opening_is_cancelled_leaves_nothing(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Planner)
    for error in await errors_of(group.all(Planner.cancel_when_descriptors_came)):
        assert isinstance(error, CallCancelled)
    assert await group.all(Planner.left) == [(0, 0)] * 2


async def test_members_without_shared_memory_meet_as_in_other_collectives(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Planner)
    # It is enough that one of them says so.
    await group[1].live_apart()
    await group.all(Planner.check_in_thread, 100, torch.float32, "sum")
    await group.all(Planner.check_on_loop, 100, torch.float32, "max")
    assert await group.all(Planner.left) == [(0, 0)] * 2
