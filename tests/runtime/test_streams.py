"""Streams without processes: items are taken in order, credit goes back, and a consumer that leaves says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from rooms import Bench, Wire, turns

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.ids import CallId
from aiodaft._protocol.objects.value import CREDIT_WINDOW
from aiodaft._runtime.objects.ref_table import StreamState
from aiodaft._runtime.serialization.decoder import ReceivedValue
from aiodaft._runtime.serialization.encoder import Names
from aiodaft.exceptions import RuntimeClosed
from aiodaft.ref import Stream

NUMBER = CallId(7)
HALF = CREDIT_WINDOW // 2


class Producer(Wire):
    """The connection to the process of a producer. It may not have got the call yet."""

    def __init__(self) -> None:
        super().__init__()
        self.unsent = False

    def withdraw(self, number: CallId) -> bool:
        assert number == NUMBER
        return self.unsent


class Consumer(Bench):
    """A process that consumes one stream."""

    def __init__(self) -> None:
        super().__init__(grace=0.0)
        # The orders to the method in this process: to end, or to yield more items.
        self.told: list[int] = []
        owner = SimpleNamespace(
            cancel_local=lambda number: self.told.append(0),
            credit_local=lambda number, count: self.told.append(count),
        )
        objects: Any = SimpleNamespace(process=self.process, store=self.store, owner=owner)
        self.state = StreamState(objects, NUMBER, "Streamer.numbers")
        self.stream: Stream[Any] = Stream(self.state)
        self.producer = Producer()

    def connect(self) -> Producer:
        connection: Any = self.producer
        self.state.connection = connection
        return self.producer

    def encoded(self, value: object) -> ReceivedValue:
        return ReceivedValue(self.store.keep(value, Names("an item")).payload, None, [], [])

    def take(self) -> asyncio.Task[Any]:
        return self.process.loop.create_task(self.state.next_item())

    def bring(self, value: object, gate: asyncio.Event) -> None:
        async def fetch() -> ReceivedValue:
            await gate.wait()
            return self.encoded(value)

        self.state.on_item(self.process.tasks.start_ahead(fetch(), name="bring"))


@pytest.fixture
async def consumer() -> AsyncIterator[Consumer]:
    made = Consumer()
    yield made
    await made.process.tasks.aclose()


async def test_items_come_in_order_however_they_arrive(consumer: Consumer) -> None:
    gate = asyncio.Event()
    consumer.bring("fetched", gate)
    consumer.state.on_item(consumer.encoded([1]))
    consumer.state.on_item(("as it is",))
    first = consumer.take()
    await turns()
    assert not first.done()
    gate.set()
    assert [await first, await anext(consumer.stream), await anext(consumer.stream)] == ["fetched", [1], "as it is"]


async def test_a_consumer_waits_for_the_next_item_and_the_end(consumer: Consumer) -> None:
    first = consumer.take()
    await turns()
    consumer.state.on_item((1,))
    assert await first == 1
    second = consumer.take()
    await turns()
    consumer.state.on_plain(None)
    with pytest.raises(StopAsyncIteration):
        await second


async def test_the_error_of_the_producer_comes_after_its_items(consumer: Consumer) -> None:
    consumer.state.on_item((1,))
    consumer.state.on_error(ValueError("broken"))
    assert await anext(consumer.stream) == 1
    with pytest.raises(ValueError, match="broken"):
        await anext(consumer.stream)
    assert [item async for item in consumer.stream] == []


async def test_the_producer_gets_credit_for_half_a_window_in_one_message(consumer: Consumer) -> None:
    producer = consumer.connect()
    for index in range(CREDIT_WINDOW):
        consumer.state.on_item((index,))
    for _ in range(CREDIT_WINDOW):
        await anext(consumer.stream)
    assert producer.sent == [m.credit(NUMBER, HALF)] * 2


async def test_an_item_that_cannot_be_opened_is_taken_and_credited(consumer: Consumer) -> None:
    async def fail() -> ReceivedValue:
        raise ValueError("lost")

    for _ in range(HALF):
        consumer.state.on_item(consumer.process.tasks.start_ahead(fail(), name="bring"))
    for _ in range(HALF):
        with pytest.raises(ValueError, match="lost"):
            await anext(consumer.stream)
    # The method is in this process.
    assert consumer.told == [HALF]


async def test_a_cancelled_consumer_leaves_its_item_to_the_one_that_waits(consumer: Consumer) -> None:
    gate = asyncio.Event()
    consumer.bring("x", gate)
    first, second = consumer.take(), consumer.take()
    await turns()
    first.cancel()
    await turns()
    gate.set()
    assert await second == "x"
    assert first.cancelled()


async def test_a_loop_that_is_left_cancels_the_producer_and_ends_the_stream(consumer: Consumer) -> None:
    producer = consumer.connect()
    consumer.state.on_item((1,))
    consumer.state.on_item((2,))
    async for _ in consumer.stream:
        break
    with pytest.raises(RuntimeError, match=r"the `async for` over it was left; to take items one by one"):
        await anext(consumer.stream)
    await turns()
    assert producer.sent == [m.cancel(NUMBER)]
    await consumer.stream.aclose()
    assert producer.sent == [m.cancel(NUMBER)]


async def test_the_task_of_a_loop_that_is_cancelled_ends_the_stream(consumer: Consumer) -> None:
    producer = consumer.connect()
    consumer.state.on_item((1,))
    got = asyncio.Event()

    async def through() -> AsyncIterator[int]:
        async for item in consumer.stream:
            yield item

    items = through()

    async def run() -> None:
        async for _ in items:
            got.set()
            await asyncio.Event().wait()

    task = consumer.process.loop.create_task(run())
    await got.wait()
    task.cancel()
    await turns()
    assert producer.sent == [m.cancel(NUMBER)]


async def test_a_stream_is_closed_before_its_call_was_sent(consumer: Consumer) -> None:
    producer = consumer.connect()
    producer.unsent = True
    over: list[BaseException | None] = []
    consumer.state.watch(over.append)
    await consumer.stream.aclose()
    await turns()
    assert (producer.sent, over) == ([], [None])
    consumer.state.watch(over.append)
    await turns()
    assert over == [None, None]


async def test_who_watches_a_stream_is_told_its_error_also_if_the_consumer_takes_it_at_once(
    consumer: Consumer,
) -> None:
    error, over = ValueError("the producer failed"), list[BaseException | None]()
    consumer.state.watch(over.append)
    consumer.state.on_error(error)
    with pytest.raises(ValueError, match="the producer failed"):
        await consumer.state.next_item()
    assert over == []
    await turns()
    assert over == [error]


async def test_a_dropped_stream_cancels_the_method_of_this_process(consumer: Consumer) -> None:
    del consumer.stream
    await turns()
    assert consumer.told == [0]
    consumer.state.on_item((1,))
    consumer.state.on_plain(None)
    with pytest.raises(StopAsyncIteration):
        await consumer.state.next_item()


async def test_a_stream_that_ended_is_dropped_without_a_word(consumer: Consumer) -> None:
    producer = consumer.connect()
    consumer.state.on_plain(None)
    del consumer.stream
    await turns()
    assert (producer.sent, consumer.told) == ([], [])


async def test_an_item_that_the_closing_runtime_does_not_fetch_says_so(consumer: Consumer) -> None:
    consumer.bring("x", asyncio.Event())
    taken = consumer.take()
    await turns()
    consumer.process.closed = "it was closed"
    await consumer.process.tasks.aclose()
    with pytest.raises(RuntimeClosed, match=r"an item of Streamer.numbers cannot be had: it was closed"):
        await taken
