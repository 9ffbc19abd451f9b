"""Every member of a collective hears that another one does not take part any more."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parting import Parting
from supervised import AT_ONCE

import aiodaft
from aiodaft import ActorDied, CallCancelled, Restart

# Brings torch.
PRELOAD = ("parting",)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


@pytest.mark.parametrize("method", [Parting.gather_and_die, Parting.gather_and_die_in_thread])
async def test_a_call_of_a_group_is_not_made_again_when_another_call_has_failed(
    rt: aiodaft.Runtime, method: Any
) -> None:
    group = await rt.on(restart=Restart(intensity=9, backoff=AT_ONCE)).group(3, Parting)
    refs = group.each(method, [True, False, False])
    with pytest.raises(ValueError, match="a bad batch"):
        await refs[0]
    for ref in refs[1:]:
        with pytest.raises((ActorDied, CallCancelled), match="SIGKILL|bad batch"):
            await ref
    done = await asyncio.gather(*(group[rank].until_done([0], 1, rank) for rank in range(3)))
    assert done == [[[(1, rank) for rank in range(3)]]] * 3
    assert await group.all(Parting.meetings) == [0, 0, 0]


async def test_a_call_that_is_made_again_does_not_wait_for_those_that_have_returned(
    rt: aiodaft.Runtime, fifo: Path
) -> None:
    group = await rt.on(restart=Restart(intensity=9, backoff=AT_ONCE)).group(3, Parting)
    refs = group.each(Parting.gather_then_die, [(rank == 1, str(fifo)) for rank in range(3)])
    assert await refs[0] == await refs[2] == [0, 1, 2]
    await asyncio.to_thread(fifo.write_text, "")
    why = r"all_gather 'again' of .*: Parting.gather_then_die was made again at rank 1, and rank . does not come: .*"
    with pytest.raises(CallCancelled, match=why):
        await refs[1]
    done = await asyncio.gather(*(group[rank].until_done(["again"], 1, rank) for rank in range(3)))
    assert done == [[[(1, rank) for rank in range(3)]]] * 3


async def test_members_that_are_called_as_one_do_not_wait_for_one_that_has_failed(rt: aiodaft.Runtime) -> None:
    group = await rt.group(4, Parting, axes={"dp": 2, "tp": 2})
    replicas = group.along("dp")
    for failing in (0, 1):
        with pytest.raises((ValueError, CallCancelled), match="a bad batch"):
            await replicas.any(Parting.gather_in_replica, failing)
    assert await replicas.any(Parting.gather_in_replica, None) == [0, 1]


LEFT = r"all_gather 'x' of .*: rank 0 has left it: its wait for the result was cancelled"
WAYS = ["cancel", "deadline", "timeout", "task group"]


async def begin(group: aiodaft.Group[Parting], rank: int, value: Any) -> None:
    """A member begins a collective; returns when it has come to the member where they meet."""
    await group[rank].begin("all_gather", value, key="x")
    while not sum(await group.all(Parting.meetings)):
        await asyncio.sleep(0)


@pytest.mark.parametrize("size", [10, 200_000])
@pytest.mark.parametrize("by", WAYS)
async def test_a_member_that_stops_waiting_is_named_at_the_others(rt: aiodaft.Runtime, by: str, size: int) -> None:
    group, value = await rt.group(3, Parting), bytes(size)
    await begin(group, 1, value)
    await group[0].leave_and_go_on(value, "x", by)
    with pytest.raises(CallCancelled, match=LEFT):
        await group[1].finish("x")
    with pytest.raises(CallCancelled, match=LEFT):
        await group[2].do("all_gather", value, key="x")
    assert await group.all(Parting.do, "all_gather", "again", key="x") == [["again"] * 3] * 3
    assert await group.all(Parting.meetings) == [0, 0, 0]


@pytest.mark.parametrize("by", ["deadline", "timeout"])
async def test_a_member_that_stops_waiting_before_its_value_is_there_is_named_at_the_others(
    rt: aiodaft.Runtime, by: str
) -> None:
    group = await rt.group(3, Parting)
    await begin(group, 1, 1)
    await group[0].expect()
    await group[0].leave_with_late_value("x", by)
    with pytest.raises(CallCancelled, match=LEFT):
        await group[1].finish("x")
    with pytest.raises(CallCancelled, match=LEFT):
        await group[2].do("all_gather", 2, key="x")
    await group[1].send("late", 0)
    assert await group.all(Parting.do, "all_gather", "again", key="x") == [["again"] * 3] * 3


@pytest.mark.parametrize("by", ["deadline", "timeout"])
async def test_a_call_that_fails_because_of_a_collective_that_it_has_left_has_not_taken_part(
    rt: aiodaft.Runtime, by: str
) -> None:
    group = await rt.group(3, Parting)
    # So that they are connected.
    await group.all(Parting.do, "barrier", key="x")
    with pytest.raises(TimeoutError):
        await group[0].leave(0, "x", by)
    while sum(await group.all(Parting.meetings)):
        await asyncio.sleep(0)
    # The others, which come later, do not hear of it.
    assert await group.all(Parting.do, "all_gather", "again", key="x") == [["again"] * 3] * 3
    assert await group.all(Parting.meetings) == [0, 0, 0]


async def test_the_deadline_of_a_call_ends_its_collectives_as_any_failure_does(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Parting)
    with pytest.raises(aiodaft.DeadlineExceeded):
        async with aiodaft.deadline(0.05):
            await group[0].do("all_gather", 0, key="x")
    assert await group.all(Parting.do, "all_gather", "again", key="x") == [["again"] * 2] * 2


async def test_a_member_that_stops_waiting_when_all_have_come_has_taken_part(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Parting)
    # With this key they meet at rank 0: the one that comes last leaves when its message was sent.
    await begin(group, 0, "first")
    await group[1].leave_and_go_on("last", "x", "cancel")
    assert await group[0].finish("x") == ["first", "last"]
    assert await group.all(Parting.do, "all_gather", "again", key="x") == [["again"] * 2] * 2


class Careless(aiodaft.Actor):
    """Its steps fail; nothing but the end of their last use frees their values."""

    kept: Any = None

    @aiodaft.method
    async def step(self, how: str) -> None:
        gc.disable()
        group = aiodaft.current_group()
        value = np.ones(1 << 18)
        self.kept = weakref.ref(value)
        if group.rank == 1:
            if how == "raise":
                raise ValueError("planned")
            if how == "leave":
                return
            value = np.ones(3)
        await group.all_reduce(value, key="k", timeout=0.01 if how == "leave" else None)

    @aiodaft.method
    async def keeps(self) -> bool:
        return self.kept() is not None


@pytest.mark.parametrize("how", ["raise", "leave", "disagree"])
async def test_a_collective_that_has_failed_keeps_no_value(rt: aiodaft.Runtime, how: str) -> None:
    group = await rt.group(2, Careless)
    await asyncio.gather(*group.all(Careless.step, how), return_exceptions=True)
    for _ in range(20):
        if not any(await group.all(Careless.keeps)):
            break
    assert await group.all(Careless.keeps) == [False, False]
