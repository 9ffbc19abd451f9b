"""Calls begin where they arrive: their steps before the first wait are seen in the order in which they were made."""

from __future__ import annotations

import asyncio

import pytest
from actors import Sleeper
from first_steps import FirstSteps

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_calls_made_in_first_steps_go_behind_those_that_wait(module_rt: aiodaft.Runtime) -> None:
    actor = await module_rt.spawn(FirstSteps)
    assert await actor.begin_together(actor) == ["first", "second", "after first", "last"]


async def test_calls_that_come_together_may_wait_for_one_future(module_rt: aiodaft.Runtime) -> None:
    actor = await module_rt.spawn(FirstSteps)
    waiting = [actor.wait_shared() for _ in range(5)]
    await actor.settle_shared()
    assert await asyncio.gather(*waiting) == [7] * 5


async def test_what_a_call_puts_into_its_context_is_not_seen_by_later_calls(module_rt: aiodaft.Runtime) -> None:
    actor = await module_rt.spawn(FirstSteps)
    calls = [actor.put_into_context(f"of call {number}") for number in range(4)]
    assert await asyncio.gather(*calls) == ["of no call"] * 4


async def test_who_is_cancelled_cleans_up_before_the_next_call_begins(module_rt: aiodaft.Runtime) -> None:
    sleeper = await module_rt.spawn(Sleeper)
    sleeping = sleeper.sleep(60)
    await sleeper.history()
    # The first message of a turn goes alone, the others together.
    alone = sleeper.history()
    sleeping.cancel()
    assert await sleeper.history() == ["sleep began", "sleep cleaned up"]
    await asyncio.gather(sleeping, alone, return_exceptions=True)
