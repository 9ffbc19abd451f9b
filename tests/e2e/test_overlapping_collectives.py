"""Collectives of one key in calls of a group, and in runs of a graph, that are under way at the same time.

Without the number that tells the calls apart, the one that a member skips would be met by that member's next one.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from overlapping import Step, Stepper
from supervised import AT_ONCE

import aiodaft
from aiodaft import ActorDied, CallCancelled, GroupChanged, Refs, Restart

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


def steps(group: aiodaft.Group[Stepper], name: str, *held: int) -> list[Step]:
    """The steps of the members in a call; some ranks are held."""
    return [Step(name, (name, rank), held=rank in held) for rank in range(len(group))]


def call(group: aiodaft.Group[Stepper], name: str, *held: int) -> Refs[list[Any]]:
    return group.each(Stepper.step, steps(group, name, *held))


def gathered(group: aiodaft.Group[Stepper], name: str) -> list[list[Any]]:
    return [[(name, rank) for rank in range(len(group))]] * len(group)


async def until_none_waits(group: aiodaft.Group[Stepper]) -> None:
    while sum(await group.all(Stepper.meetings)):
        await asyncio.sleep(0)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("how", ["is cancelled", "fails"])
async def test_a_call_that_ends_at_one_member_is_not_replaced_by_the_next(
    rt: aiodaft.Runtime, how: str, rank: int
) -> None:
    group = await rt.group(3, Stepper)
    first = call(group, "first", rank)
    await group[rank].holds("first")
    # The member has come with this one, the others with that one.
    second = call(group, "second")
    assert await second == gathered(group, "second")
    if how == "fails":
        await group[rank].fail("first")
    else:
        first[rank].cancel()
    found = await asyncio.gather(*first, return_exceptions=True)
    ended = found.pop(rank)
    assert isinstance(ended, ValueError if how == "fails" else CallCancelled)
    for error in found:
        assert isinstance(error, CallCancelled)
        assert f"[{rank}] failed: " in str(error)
    assert await call(group, "third") == gathered(group, "third")
    assert await group.all(Stepper.meetings) == [0, 0, 0]


async def test_calls_that_begin_in_opposite_orders_meet_their_own(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Stepper)
    first, second = call(group, "first", 0, 1), call(group, "second", 0, 1)
    for name, other in (("first", "second"), ("second", "first")):
        await group[0].go(name)
        await group[1].go(other)
    assert await first == gathered(group, "first")
    assert await second == gathered(group, "second")


async def test_the_timeout_of_one_call_ends_no_other(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Stepper)
    first = call(group, "first", 1)
    await group[1].holds("first")
    short = group.each(Stepper.step, [step._replace(timeout=0.05) for step in steps(group, "short", 1)])
    with pytest.raises(TimeoutError, match=r"all_gather 'g' of .*: rank 1 of 2 did not come in 0.05 s"):
        await short[0]
    await group[1].go("first")
    assert await first == gathered(group, "first")
    short[1].cancel()
    assert await call(group, "second") == gathered(group, "second")


@pytest.mark.parametrize("how", ["is cancelled", "fails"])
async def test_runs_of_a_graph_do_not_meet_each_other(rt: aiodaft.Runtime, how: str) -> None:
    group = await rt.group(2, Stepper)
    async with aiodaft.compile(lambda a, b: tuple(group.each(Stepper.step, [a, b]))) as graph:
        first = graph(*steps(group, "first", 1))
        await group[1].holds("first")
        assert await asyncio.gather(*graph(*steps(group, "second"))) == gathered(group, "second")
        if how == "fails":
            await group[1].fail("first")
        else:
            for result in first:
                result.cancel()
        early, late = await asyncio.gather(*first, return_exceptions=True)
        assert isinstance(early, CallCancelled)
        assert isinstance(late, ValueError if how == "fails" else CallCancelled)
        # Nor calls of the group.
        third = graph(*steps(group, "third", 1))
        await group[1].holds("third")
        assert await call(group, "fourth") == gathered(group, "fourth")
        await group[1].go("third")
        assert await asyncio.gather(*third) == gathered(group, "third")
    await until_none_waits(group)


async def test_calls_that_a_death_ends_are_not_met_by_those_after_it(rt: aiodaft.Runtime) -> None:
    group = await rt.on(restart=Restart(intensity=9, backoff=AT_ONCE)).group(3, Stepper)
    first = call(group, "first", 1)
    await group[1].holds("first")
    with pytest.raises(ActorDied):
        await group[1].die()
    # Whether the members have heard of the death or not: all have this one, or none.
    second = call(group, "second")
    found = await asyncio.gather(*second, return_exceptions=True)
    assert found == gathered(group, "second") or all(isinstance(one, Exception) for one in found)
    for error in await asyncio.gather(*first, return_exceptions=True):
        assert isinstance(error, ActorDied | GroupChanged | CallCancelled)
    third = call(group, "third", 2)
    await group[2].holds("third")
    assert await call(group, "fourth") == gathered(group, "fourth")
    await group[2].go("third")
    assert await third == gathered(group, "third")


async def test_members_that_are_called_as_one_meet_within_that_call(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Stepper, axes={"dp": 1, "tp": 2})
    replicas = group.along("dp")
    first = replicas.any(Stepper.step, Step("first", 1, held=True))
    await group[1].holds("first")
    await group[0].go("first")
    assert await replicas.any(Stepper.step, Step("second", 2)) == [2, 2]
    assert await replicas.each(Stepper.step, [Step("third", 3)]) == [[3, 3]]
    await group[1].go("first")
    assert await first == [1, 1]


async def test_calls_of_single_members_and_of_slices_meet_by_key_and_order(rt: aiodaft.Runtime) -> None:
    group = await rt.group(3, Stepper)
    one, two, three = steps(group, "apart")
    expected = gathered(group, "apart")[0]
    assert await asyncio.gather(group[0].step(one), *group[1:].each(Stepper.step, [two, three])) == [expected] * 3
    slices = [
        *group[:1].each(Stepper.step, [one]),
        *group[1:].with_policy(aiodaft.policies.nearest).each(Stepper.step, [two, three]),
    ]
    assert await asyncio.gather(*slices) == [expected] * 3


async def test_what_a_call_leaves_behind_meets_by_key_and_order(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Stepper)
    one, two = steps(group, "left", 0)
    await group.each(Stepper.leave, [one, two])
    # The call is over; rank 1 has come within it, or after it.
    await group[0].go("left")
    assert await group.all(Stepper.take_left) == gathered(group, "left")
    await group.each(Stepper.leave, [Step("late", 1, held=True), Step("late", 2, held=True)])
    await group[0].go("late")
    assert await group[1].step(Step("by itself", 3)) == [1, 3]
    await group[1].go("late")
    assert await group[0].step(Step("by itself", 4)) == [4, 2]


async def test_whatever_is_cancelled_or_fails_the_others_meet_their_own(rt: aiodaft.Runtime) -> None:
    group, source = await rt.group(3, Stepper), random.Random(38)
    under_way: list[tuple[str, bool, Refs[list[Any]]]] = []

    async def check(name: str, is_whole: bool, refs: Refs[list[Any]]) -> None:
        for found, right in zip(
            await asyncio.gather(*refs, return_exceptions=True), gathered(group, name), strict=True
        ):
            assert found == right or (not is_whole and isinstance(found, CallCancelled | ValueError)), (name, found)

    for number in range(200):
        name, fate = str(number), source.random()
        fails = source.randrange(3) if fate < 0.25 else None
        todo = [Step(name, (name, rank), turns=source.randrange(4), fails=rank == fails) for rank in range(3)]
        refs = group.each(Stepper.step, todo)
        if 0.25 < fate < 0.5:
            for _ in range(source.randrange(4)):
                await asyncio.sleep(0)
            refs[source.randrange(3)].cancel()
        under_way.append((name, fate >= 0.5, refs))
        if len(under_way) > 5:
            await check(*under_way.pop(source.randrange(5)))
    for one in under_way:
        await check(*one)
    await until_none_waits(group)
