"""Bounds: of windows, frames, deadlines, and of the memory of processes that ended."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from actors import Echo, Log
from inside import peer_of

import aiodaft
from aiodaft._runtime.process import Env

MIB = 1 << 20


class Counter(aiodaft.Actor):
    @aiodaft.method
    async def count(self, *args: Any) -> int:
        return len(args)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def test_large_arguments_do_not_block_the_call_that_would_free_them(rt: aiodaft.Runtime) -> None:
    log = await rt.spawn(Log)
    refs = [log.after_gate(bytes(8 * MIB)) for _ in range(9)]
    await log.open_gate()
    assert [len(value) for value in await asyncio.gather(*refs)] == [8 * MIB] * 9


async def test_a_call_that_is_cancelled_before_it_begins_leaves_the_others_in_order(rt: aiodaft.Runtime) -> None:
    log = await rt.spawn(Log)
    for _ in range(200):
        first, second = log.note_async(1), log.note_async(2)
        second.cancel()
        third = log.note(3)
        await asyncio.gather(first, second, third, return_exceptions=True)
    seen = [item for item in await log.all() if item != 2]
    assert seen == [1, 3] * 200


@pytest.mark.parametrize("seconds", [math.inf, 1e17])
async def test_a_deadline_may_be_as_far_away_as_one_likes(rt: aiodaft.Runtime, seconds: float) -> None:
    echo = await rt.spawn(Echo)
    async with aiodaft.deadline(seconds):
        assert await echo.echo([1]) == [1]


async def test_many_small_values_that_are_here_travel_in_one_call(rt: aiodaft.Runtime) -> None:
    echo, other = await rt.spawn(Echo), await rt.spawn(Echo)
    refs = [other.echo(bytes(60_000)) for _ in range(400)]
    await asyncio.gather(*refs)
    assert [len(value) for value in await echo.echo(refs)] == [60_000] * 400


async def test_more_refs_than_a_message_has_room_for_are_refused(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    ref = echo.echo(1)
    with pytest.raises(
        aiodaft.exceptions.SerializationError,
        match=r"args\[0\] of Echo.echo cannot travel to Echo-\d+: it holds more than",
    ):
        await echo.echo([ref] * 100_000)
    assert await echo.echo([ref] * 1000) == [1] * 1000


async def test_more_arguments_than_a_message_has_room_for_travel_as_one_value(rt: aiodaft.Runtime) -> None:
    counter, echo = await rt.spawn(Counter), await rt.spawn(Echo)
    many, ref = [1] * 140_000, echo.echo(1)
    assert await counter.count(*many) == len(many)
    assert await counter.count(ref, *many) == len(many) + 1
    counter.count.tell(*["x" * 1000] * 20_000)
    assert await counter.count() == 0


@pytest.fixture
async def forgetful_rt(nothing_left_behind: None) -> AsyncIterator[aiodaft.Runtime]:
    """A runtime that remembers three processes that ended."""
    async with aiodaft.Runtime(preload=(), env=Env(remembered=3)) as runtime:
        yield runtime


@pytest.mark.asyncio(loop_scope="function")
async def test_a_process_is_remembered_for_a_while_and_forgotten_for_good(forgetful_rt: aiodaft.Runtime) -> None:
    rt = forgetful_rt
    gone: list[Any] = []
    for _ in range(6):
        echo = await rt.spawn(Echo)
        assert await echo.echo(1) == 1
        await rt.stop(echo)
        gone.append(echo)
    gc.collect()
    assert len(peer_of(rt).connections) <= 4
    for echo in gone:
        with pytest.raises(aiodaft.ActorDied) as caught:
            await echo.echo(2)
        assert caught.value.executed is False
    assert rt.traffic().messages_sent >= 12
