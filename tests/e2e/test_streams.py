"""Streams: bounded, ordered, and ended when the consumer leaves (row CR9)."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import pytest
from actors import Box, Echo, Streamer
from failing import Failing
from inside import peer_of

import aiodaft
from aiodaft._runtime.objects.ref_table import StreamState
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.serialization.decoder import ReceivedValue
from aiodaft._runtime.serialization.encoder import Names

pytestmark = pytest.mark.asyncio(loop_scope="module")

# The items that a producer may be ahead of its consumer.
WINDOW = 16


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


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
    # Before the first item is taken, it makes as many as there is room for.
    while (await streamer.progress())[0] < WINDOW:
        pass
    taken = 0
    async for _ in stream:
        taken += 1
        made, _ = await streamer.progress()
        assert made <= taken + WINDOW
        if taken == 100:
            break
    await stream.aclose()


async def test_breaking_out_runs_the_producers_finally(rt: aiodaft.Runtime) -> None:
    streamer = await rt.spawn(Streamer)
    async for item in streamer.numbers(10**9):
        if item == 5:
            break
    await until_ended(streamer)
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
    assert produced <= WINDOW
    # Dropped before it began, it never runs.
    assert ended == 1 or not produced


async def test_an_error_comes_after_the_items_before_it(rt: aiodaft.Runtime) -> None:
    streamer = await rt.spawn(Streamer)
    items: list[int] = []
    with pytest.raises(ValueError, match="the stream broke"):
        async for item in streamer.fail_after(40):
            items.append(item)  # noqa: PERF401 - a comprehension would lose the items before the error
    assert items == list(range(40))


async def test_a_failed_argument_is_told_once(rt: aiodaft.Runtime) -> None:
    async with rt.scope() as scope:
        source, streamer = await scope.spawn(Failing), await scope.spawn(Streamer)
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


# Loops that are left. Names and tracebacks keep the stream, and the garbage collector does not run.


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


async def until_ended(streamer: Streamer, count: int = 1) -> None:
    """Returns once that many producers of the actor have ended."""
    while (await streamer.progress())[1] < count:
        await asyncio.sleep(0)


async def forward(stream: aiodaft.Stream[int]) -> AsyncIterator[int]:
    """As the generator of a route that sends events."""
    async for item in stream:
        yield item


async def run_until(reached: asyncio.Event, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    task = asyncio.get_running_loop().create_task(work)
    await reached.wait()
    return task


@pytest.mark.usefixtures("no_collector")
async def test_leaving_a_loop_ends_the_producer_although_the_stream_has_a_name(rt: aiodaft.Runtime) -> None:
    streamer = await rt.spawn(Streamer)
    left_by_break, left_by_error = streamer.numbers(10**9), streamer.numbers(10**9)
    async for _ in left_by_break:
        break
    await until_ended(streamer, 1)
    with pytest.raises(ZeroDivisionError) as caught:
        async for item in left_by_error:
            item / 0
    await until_ended(streamer, 2)
    assert caught.tb is not None


@pytest.mark.usefixtures("no_collector")
async def test_a_cancelled_loop_ends_the_producer_although_the_error_is_kept(rt: aiodaft.Runtime) -> None:
    streamer, reached = await rt.spawn(Streamer), asyncio.Event()
    stream = streamer.stalling()
    kept: list[BaseException] = []

    async def consume() -> None:
        try:
            async for _ in stream:
                reached.set()
        except asyncio.CancelledError as error:
            kept.append(error)
            await asyncio.Event().wait()

    task = await run_until(reached, consume())
    await asyncio.sleep(0)
    task.cancel()
    await until_ended(streamer)
    assert len(kept) == 1
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("how", ["cancelled", "failed", "returned"])
async def test_a_loop_in_a_suspended_generator_ends_with_its_task(rt: aiodaft.Runtime, how: str) -> None:
    streamer, reached = await rt.spawn(Streamer), asyncio.Event()
    generator = forward(streamer.numbers(10**9))

    async def send() -> None:
        async for _ in generator:
            reached.set()
            if how == "cancelled":
                await asyncio.Event().wait()
            if how == "failed":
                raise OSError("the client left")
            return

    task = await run_until(reached, send())
    if how == "cancelled":
        task.cancel()
    await asyncio.wait([task])
    await until_ended(streamer)
    with pytest.raises(RuntimeError, match="ended because the task that ran the `async for` over it ended"):
        await anext(generator)
    if how == "failed":
        assert isinstance(task.exception(), OSError)


async def test_a_generator_may_take_each_step_in_a_task_of_its_own(rt: aiodaft.Runtime) -> None:
    streamer = await rt.spawn(Streamer)
    generator = forward(streamer.numbers(100))
    items = [await asyncio.get_running_loop().create_task(generator.__anext__()) for _ in range(100)]  # type: ignore[arg-type]
    assert items == list(range(100))


async def test_a_stream_says_that_its_loop_was_left(rt: aiodaft.Runtime) -> None:
    streamer = await rt.spawn(Streamer)
    for count in (3, 10**9):
        stream = streamer.numbers(count)
        async for _ in stream:
            break
        with pytest.raises(RuntimeError, match=r"Streamer\.numbers: the stream ended because .* use `await anext"):
            await anext(stream)
        await stream.aclose()


async def test_the_first_items_can_be_taken_before_a_loop(rt: aiodaft.Runtime) -> None:
    streamer = await rt.spawn(Streamer)
    stream = streamer.numbers(40)
    assert await anext(stream) == 0
    assert [item async for item in stream] == list(range(1, 40))
    assert [item async for item in stream] == []


async def test_a_loop_that_is_left_takes_nothing_from_other_loops(rt: aiodaft.Runtime) -> None:
    streamer, reached = await rt.spawn(Streamer), asyncio.Event()
    stream = streamer.numbers(300)
    items: list[int] = []

    async def consume() -> None:
        async for item in stream:
            items.append(item)
            reached.set()
            await asyncio.sleep(0)

    first = await run_until(reached, consume())
    second = asyncio.get_running_loop().create_task(consume())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first, second])
    assert first.cancelled()
    assert items == list(range(300))


# Several consumers.


class Arriving:
    """A stream with items that come when a test says so."""

    def __init__(self, peer: Peer, count: int) -> None:
        self.gate = asyncio.Event()
        self.state = StreamState(peer.objects, peer.process.next_number(), "Test.items")
        for index in range(count):
            self.state.on_item(peer.process.tasks.start_ahead(self._bring(peer, index), name="bring"))

    async def _bring(self, peer: Peer, index: int) -> ReceivedValue:
        await self.gate.wait()
        kept = peer.store.keep(index, Names("an item"))
        return ReceivedValue(kept.payload, None, [], [])

    async def consumers(self, count: int) -> list[asyncio.Task[int]]:
        tasks = [asyncio.get_running_loop().create_task(self.state.next_item()) for _ in range(count)]
        await asyncio.sleep(0)
        return tasks


async def test_consumers_that_are_cancelled_leave_the_items_in_their_order(rt: aiodaft.Runtime) -> None:
    stream = Arriving(peer_of(rt), 3)
    tasks = await stream.consumers(2)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    stream.gate.set()
    assert [await stream.state.next_item() for _ in range(3)] == [0, 1, 2]


async def test_what_a_cancelled_consumer_leaves_another_one_gets_that_waits_already(rt: aiodaft.Runtime) -> None:
    stream = Arriving(peer_of(rt), 1)
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
    with pytest.raises(aiodaft.exceptions.SerializationError, match="let the actors share a Channel"):
        await echo.echo(Box(stream))
    with pytest.raises(TypeError, match="nothing to tell"):
        streamer.numbers.tell(1)  # type: ignore[attr-defined]  # the mistake under test
    assert [item async for item in stream] == [0]
