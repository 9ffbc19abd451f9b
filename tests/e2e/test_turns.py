"""Calls of one group by several callers begin in one order at all members, if their method runs one at a time."""

from __future__ import annotations

import asyncio
import os
import signal

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


async def test_callers_and_runs_of_a_graph_do_not_stop_each_other(rt: aiodaft.Runtime) -> None:
    group, others = await rt.group(2, Gang), [await rt.spawn(Other) for _ in range(2)]
    rounds, pairs = 20, zip(others, ["step", "step_on_loop"], strict=True)
    driven = [other.drive_often(group, name, rounds) for other, name in pairs]
    async with aiodaft.compile(lambda x: (group[0].step(x), group[1].step(x))) as graph:
        for _ in range(rounds):
            assert await asyncio.gather(*graph(1)) == [2, 2]
            assert await group.all(Gang.step_on_loop, 1) == [2, 2]
    assert await asyncio.gather(*driven) == [rounds * 40] * 2


@pytest.mark.parametrize("end", ["cancelled", "killed"])
async def test_a_caller_that_ends_before_its_turn_holds_up_no_other(rt: aiodaft.Runtime, end: str) -> None:
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


async def test_a_member_that_dies_before_a_turn_holds_up_no_later_call(rt: aiodaft.Runtime) -> None:
    supervised = rt.on(restart=Restart("permanent", intensity=9, backoff=AT_ONCE))
    group, other, holder = await supervised.group(2, Gang), await rt.spawn(Other), await rt.spawn(Other)
    first = group.each(Gang.step, [1, holder.held(1)])
    second = other.drive(group, "step", 10)
    await other.sent()
    pid = (await rt.info(group[1])).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await holder.go()
    for refs in (first, second):
        with pytest.raises((aiodaft.DaftError, ExceptionGroup)):
            await refs
    assert await group.all(Gang.step, 1) == [2, 2]
    assert await other.drive(group, "step", 10) == [20, 20]
