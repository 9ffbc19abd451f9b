"""Deadlines (row CR6; A14-A17 of the fault tests)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from actors import Sleeper
from leaks import is_alive

import aiodaft


async def test_a_deadline_ends_the_call_here_and_there(rt: aiodaft.Runtime) -> None:
    sleeper = await rt.spawn(Sleeper)
    with pytest.raises(aiodaft.DeadlineExceeded) as caught:
        async with aiodaft.deadline(0.1):
            await sleeper.sleep(60)
    assert caught.value.executed is None
    assert "sleep cleaned up" in await sleeper.history()


async def test_a_call_whose_deadline_passes_in_the_queue_never_starts(rt: aiodaft.Runtime) -> None:
    sleeper = await rt.spawn(Sleeper)
    running = sleeper.block(20)
    await sleeper.history()
    ref: Any = None
    with pytest.raises(aiodaft.DeadlineExceeded):
        async with aiodaft.deadline(0.05):
            ref = sleeper.block(20)
            await asyncio.sleep(60)
    with pytest.raises(aiodaft.DeadlineExceeded) as caught:
        await ref
    assert caught.value.executed is False
    # The actor knows of no deadline of this one: it is cancelled from here.
    ref = sleeper.block(20)
    with pytest.raises(
        aiodaft.DeadlineExceeded, match=r"not done within .* Sleeper\.block of Sleeper-1 was"
    ) as awaited:
        async with aiodaft.deadline(0.01):
            await ref
    assert awaited.value.executed is False
    await sleeper.unblock()
    assert await running == "unblocked"
    assert (await sleeper.history()).count("block began") == 1


async def test_deadlines_travel_to_nested_calls_and_only_shrink(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(Sleeper), await rt.spawn(Sleeper)
    assert await a.time_left(b) == float("inf")
    async with aiodaft.deadline(5):
        direct, nested = await a.time_left(), await a.time_left(b)
        assert 0 < nested <= direct + 0.002 <= 5.002
        async with aiodaft.deadline(50):
            assert await a.time_left(b) <= 5.002
        async with aiodaft.deadline(2):
            assert await a.time_left(b) <= 2.002


async def test_deadlines_do_not_look_at_the_clock_on_the_wall(
    rt: aiodaft.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await rt.spawn(Sleeper), await rt.spawn(Sleeper)
    for hours in (1, -1):
        for jump in (a.jump(hours), b.jump(hours)):
            await jump
        elsewhen = time.time() + 3600 * hours
        monkeypatch.setattr(time, "time", lambda then=elsewhen: then)
        async with aiodaft.deadline(50):
            assert 0 < await a.time_left(b) <= 50.002
        with pytest.raises(aiodaft.DeadlineExceeded):
            async with aiodaft.deadline(0.05):
                await a.call(b, 60)
    assert (await b.history()).count("nested cleaned up") == 2


async def test_a_call_that_begins_when_one_with_a_deadline_ends_has_none(rt: aiodaft.Runtime) -> None:
    sleeper = await rt.spawn(Sleeper)
    async with aiodaft.deadline(50):
        first = sleeper.time_left_alone()
    second = sleeper.time_left_alone()
    await sleeper.unblock()
    assert await first <= 50.002
    assert await second == float("inf")


@pytest.mark.parametrize("how", ["spawn", "scope", "kill"])
async def test_what_is_cleared_up_after_a_deadline_is_cleared_up_in_full(rt: aiodaft.Runtime, how: str) -> None:
    pids: list[int] = []

    async def outlive(owner: aiodaft.Runtime | aiodaft.Scope) -> None:
        async with owner.on(gpus=4).spawn(Sleeper) as sleeper:
            pids.append((await rt.info(sleeper)).pid)
            try:
                await asyncio.sleep(60)
            finally:
                if how == "kill":
                    await rt.kill(sleeper)

    with pytest.raises(aiodaft.DeadlineExceeded, match="not done within 0.3 s"):
        async with aiodaft.deadline(0.3):
            if how == "scope":
                async with rt.scope() as scope:
                    await outlive(scope)
            else:
                await outlive(rt)
    assert not any(map(is_alive, pids))
    assert (await rt.resources())[1]["gpus"] == 4
