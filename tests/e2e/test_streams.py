"""Streams: bounded, ordered, and ended when nobody listens (row CR9)."""

from __future__ import annotations

import asyncio
import gc

import pytest
from actors import Box, Echo, Streamer
from failing import Failing

import aiodaft
from aiodaft._runtime.kept import Arrived
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.serialization import Names
from aiodaft._runtime.streams import CREDIT_WINDOW, StreamState


async def test_items_come_in_order(rt: aiodaft.Runtime) -> None:
    streamer = await rt.spawn(Streamer)
    assert [item async for item in streamer.numbers(1000)] == list(range(1000))
    assert [item async for item in streamer.numbers(0)] == []


async def test_large_and_small_items_keep_their_order(rt: aiodaft.Runtime) -> None:
    streamer = await rt.spawn(Streamer)
    items = [bytes(item) async for item in streamer.blobs(20, 300_000)]
    assert items == [bytes([i]) * 300_000 if i % 2 == 0 else bytes([i]) for i in range(20)]


async def test_the_producer_is_never_more_than_a_window_ahead(rt: aiodaft.Runtime) -> None:
    streamer = await rt.spawn(Streamer)
    stream = streamer.numbers(10_000)
    taken = 0
    async for _ in stream:
        taken += 1
        made, _ = await streamer.progress()
        assert made <= taken + CREDIT_WINDOW
        if taken == 100:
            break
    await stream.aclose()


async def test_breaking_out_runs_the_producers_finally(rt: aiodaft.Runtime) -> None:
    streamer = await rt.spawn(Streamer)
    async for item in streamer.numbers(10**9):
        if item == 5:
            break
    gc.collect()
    while (await streamer.progress())[1] == 0:
        await asyncio.sleep(0)
    async with streamer.numbers(10**9) as stream:
        assert await anext(stream) == 0
    assert (await streamer.progress())[1] == 2


async def test_a_stream_that_is_dropped_unused_ends(rt: aiodaft.Runtime) -> None:
    streamer = await rt.spawn(Streamer)
    streamer.numbers(10**9)
    gc.collect()
    while (await rt.info(streamer)).running:
        await asyncio.sleep(0)
    produced, ended = await streamer.progress()
    assert produced <= CREDIT_WINDOW
    # Dropped before it began, it never runs.
    assert ended == 1 or not produced


async def test_an_error_comes_after_the_items_before_it(rt: aiodaft.Runtime) -> None:
    streamer = await rt.spawn(Streamer)
    items: list[int] = []
    with pytest.raises(ValueError, match="the stream broke"):
        async for item in streamer.fail_after(40):
            items.append(item)  # noqa: PERF401 - a comprehension would lose what came before the error
    assert items == list(range(40))


async def test_a_failed_argument_is_told_once() -> None:
    async with aiodaft.Runtime(preload=()) as rt:
        source, streamer = await rt.spawn(Failing), await rt.spawn(Streamer)
        stream = streamer.numbers(source.raise_value_error())  # type: ignore[arg-type]  # a ref for the value
        with pytest.raises(ValueError, match="bad value"):
            await anext(stream)
        assert await source.count() == 1


async def test_a_dead_producer_ends_the_stream_with_an_error(rt: aiodaft.Runtime) -> None:
    streamer = await rt.spawn(Streamer)
    stream = streamer.numbers(10**9)
    assert await anext(stream) == 0
    await rt.kill(streamer)
    with pytest.raises(aiodaft.ActorDied):
        async for _ in stream:
            pass


async def test_a_cancelled_wait_loses_no_item(rt: aiodaft.Runtime) -> None:
    streamer = await rt.spawn(Streamer)
    stream = streamer.numbers(300)
    items: list[int] = []
    for ticks in range(2000):
        task = asyncio.get_running_loop().create_task(stream.__anext__())
        for _ in range(ticks % 7):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            if isinstance(task.exception(), StopAsyncIteration):
                break
            items.append(task.result())
    items += [item async for item in stream]
    assert items == list(range(300))


class Arriving:
    """A stream whose items come when a test says so."""

    def __init__(self, peer: Peer, count: int) -> None:
        self.gate = asyncio.Event()
        self.state = StreamState(peer, peer.next_number(), "Test.items")
        for index in range(count):
            self.state.on_item(peer.tasks.start_ahead(self._bring(peer, index), name="bring"))

    async def _bring(self, peer: Peer, index: int) -> Arrived:
        await self.gate.wait()
        kept = peer.store.keep(index, Names("an item"))
        return Arrived(kept.payload, None, [], [])

    async def consumers(self, count: int) -> list[asyncio.Task[int]]:
        tasks = [asyncio.get_running_loop().create_task(self.state.next_item()) for _ in range(count)]
        await asyncio.sleep(0)
        return tasks


async def test_consumers_that_are_cancelled_leave_the_items_in_their_order(rt: aiodaft.Runtime) -> None:
    stream = Arriving(rt.peer, 3)
    tasks = await stream.consumers(2)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    stream.gate.set()
    assert [await stream.state.next_item() for _ in range(3)] == [0, 1, 2]


async def test_what_a_cancelled_consumer_leaves_another_one_gets_that_waits_already(rt: aiodaft.Runtime) -> None:
    stream = Arriving(rt.peer, 1)
    first, second = await stream.consumers(2)
    first.cancel()
    await asyncio.wait([first])
    stream.gate.set()
    assert await second == 0


async def test_two_streams_of_one_actor_run_side_by_side(rt: aiodaft.Runtime) -> None:
    streamer = await rt.spawn(Streamer)
    first, second = streamer.numbers(100), streamer.numbers(100)
    pairs = [(await anext(first), await anext(second)) for _ in range(100)]
    assert pairs == [(index, index) for index in range(100)]


async def test_misuse_says_what_to_do_instead(rt: aiodaft.Runtime) -> None:
    streamer, echo = await rt.spawn(Streamer), await rt.spawn(Echo)
    stream = streamer.numbers(1)
    with pytest.raises(TypeError, match="use `async for`"):
        await stream  # type: ignore[misc]  # the mistake under test
    with pytest.raises(aiodaft.SerializationError, match="let the actors share a Channel"):
        await echo.echo(Box(stream))
    with pytest.raises(TypeError, match="nothing to tell"):
        streamer.numbers.tell(1)  # type: ignore[attr-defined]  # the mistake under test
    assert [item async for item in stream] == [0]
