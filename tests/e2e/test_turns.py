"""Calls of one group by several callers begin in one order at all members, if their method runs one at a time."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from gang import Gang, Other
from supervised import AT_ONCE

import aiodaft
from aiodaft import Restart

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


@pytest.mark.parametrize("name", ["step", "step_on_loop"])
async def test_the_call_of_another_caller_does_not_come_in_between_at_one_member(
    rt: aiodaft.Runtime, name: str
) -> None:
    group, other = await rt.group(2, Gang), await rt.spawn(Other)
    # This one has begun at the first member, and waits for its argument at the second.
    first = group.each(getattr(Gang, name), [1, other.held(1)])
    second = other.drive(group, name, 10)
    await other.sent()
    await other.go()
    assert await first == [2, 2]
    assert await second == [20, 20]


async def test_callers_on_loops_and_threads_do_not_stop_each_other(rt: aiodaft.Runtime) -> None:
    group, others = await rt.group(3, Gang), [await rt.spawn(Other) for _ in range(4)]
    rounds = 8
    driven = [
        others[0].drive_often(group, "step", rounds),
        others[0].drive_without_waiting(group, "step_on_loop", rounds),
        others[1].drive_without_waiting(group, "step", rounds),
        others[2].drive_from_thread(group, "step_on_loop", rounds),
        others[3].drive_without_waiting(group, "step", rounds),
    ]
    for _ in range(rounds):
        assert await group.all(Gang.step, 1) == [3, 3, 3]
        assert await group.all(Gang.step_on_loop, 1) == [3, 3, 3]
    assert await asyncio.gather(*driven) == [rounds * 90] * 5


@pytest.mark.parametrize("waits", ["owner", "other"])
async def test_a_call_that_waits_for_an_argument_holds_up_no_other_caller(rt: aiodaft.Runtime, waits: str) -> None:
    group, other, holder = await rt.group(2, Gang), await rt.spawn(Other), await rt.spawn(Other)
    assert await other.drive_often(group, "step", 1) == 40
    if waits == "owner":
        late: Any = group.each(Gang.alone, [1, holder.held(2)])
        assert await other.drive_often(group, "step", 3) == 120
    else:
        late = other.drive_each(group, holder)
        await other.sent()
        for _ in range(3):
            assert await group.all(Gang.step, 1) == [2, 2]
    await holder.go()
    assert await late == [1, 2]


@pytest.mark.parametrize("end", ["cancelled", "killed"])
async def test_a_caller_that_ends_holds_up_no_other(rt: aiodaft.Runtime, end: str) -> None:
    group, other, holder = await rt.group(2, Gang), await rt.spawn(Other), await rt.spawn(Other)
    first = group.each(Gang.step, [1, holder.held(1)])
    second = other.drive(group, "step", 10)
    await other.sent()
    if end == "killed":
        await rt.kill(other)
    else:
        second.cancel()
    with pytest.raises(aiodaft.DaftError):
        await second
    await holder.go()
    assert await first == [2, 2]
    assert await group.all(Gang.step, 1) == [2, 2]


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_member_that_dies_holds_up_no_later_call(rt: aiodaft.Runtime, rank: int) -> None:
    supervised = rt.on(restart=Restart("permanent", intensity=9, backoff=AT_ONCE))
    group, other, holder = await supervised.group(2, Gang), await rt.spawn(Other), await rt.spawn(Other)
    assert await other.drive_often(group, "alone", 2) == 40
    first = group.each(Gang.alone, [1, holder.held(1)])
    second = other.drive(group, "alone", 10)
    await other.sent()
    with pytest.raises(aiodaft.ActorDied):
        await group[rank].die()
    await holder.go()
    await asyncio.gather(_over(first), _over(second))
    assert await group.all(Gang.step, 1) == [2, 2]
    assert await other.drive_often(group, "step", 10) == 400


async def _over(refs: Any) -> None:
    """Wait for the end, whatever it is."""
    with suppress(aiodaft.DaftError, ExceptionGroup):
        await refs


async def test_a_group_that_changes_has_one_order_again(rt: aiodaft.Runtime) -> None:
    group, others = await rt.group(2, Gang), [await rt.spawn(Other) for _ in range(2)]
    for size in (3, 2):
        driven = [other.drive_without_waiting(group, "alone", 20) for other in others]
        await group.resize(size)
        # Its members may have left by then.
        before = await asyncio.gather(*driven, return_exceptions=True)
        assert all(isinstance(one, int | Exception) for one in before)
        assert not any(isinstance(one, aiodaft.CallCancelled) for one in before)
        await asyncio.gather(*(other.follow(group, group.epoch) for other in others))
        driven = [other.drive_often(group, "step", 10) for other in others]
        assert await group.all(Gang.step, 1) == [size] * size
        assert await asyncio.gather(*driven) == [10 * 10 * size * size] * 2
