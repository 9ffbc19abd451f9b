"""The queue between processes: each ready row once, values on the direct way, nothing left (row MP3)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

import numpy as np
import pytest
from queue_actors import Onlooker, Producer, Worker

import aiodaft
from aiodaft.queue import Metadata, Storage, TransferQueue, Wants, at_once, open_queue

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONSUMERS = {"response": ["prompt", "value"], "score": ["prompt", "value"], "train": ["value", "response", "score"]}


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def are_waiting(rt: aiodaft.Runtime, queue: TransferQueue, count: int) -> None:
    """So many producers wait for room."""
    while (await rt.info(queue.metadata)).running.count("Metadata.reserve") != count:
        await asyncio.sleep(0)


async def test_three_consumers_see_each_row_once_and_nothing_is_left(rt: aiodaft.Runtime) -> None:
    # The capacity is a multiple of the size of the batches: a rest that is too small for a batch would fill the queue.
    count, size = 96, 8
    producers, workers = [await rt.spawn(Producer) for _ in range(2)], [await rt.spawn(Worker) for _ in range(4)]
    async with open_queue(rt, CONSUMERS, capacity=48, storages=2) as queue:
        onlooker = await rt.on(with_=queue.metadata).spawn(Onlooker)
        before, here = await onlooker.traffic(), rt.traffic().payload
        consuming = [worker.answer(queue, "response", size) for worker in workers[:2]]
        consuming += [workers[2].answer(queue, "score", size), workers[3].train(queue, "train", size)]
        values = [list(range(place, count, 2)) for place in range(2)]
        rows = await asyncio.gather(
            *(one.produce(queue, mine, size) for one, mine in zip(producers, values, strict=True))
        )
        await queue.finish()
        first, second, scored, trained = await asyncio.gather(*consuming)
        everything = list(range(count))
        assert sorted(rows[0] + rows[1]) == sorted(first + second) == sorted(scored) == sorted(trained) == everything
        after = await onlooker.traffic()
        # No value came to the metadata actor, or here.
        assert after.payload == 0
        assert rt.traffic().payload == here
        assert (after.control - before.control) / count <= 200
        assert await queue.metadata.count() == 0
        assert [await storage.count() for storage in queue.storages] == [0, 0]
        for actor in (*producers, *workers, *queue.storages):
            there = await rt.on(with_=actor).spawn(Onlooker)
            while await there.live_blocks():
                await asyncio.sleep(0)


async def test_a_consumer_that_dies_gives_its_rows_to_the_others(rt: aiodaft.Runtime) -> None:
    doomed = await rt.spawn(Worker)
    async with open_queue(rt, {"train": ["value"]}) as queue:
        await queue.put({"value": list(range(6))})
        waiting = doomed.take_and_wait(queue, "train", 2)
        while await doomed.rows() != [2, 3]:
            await asyncio.sleep(0)
        async with queue.consumer("train") as consumer:
            assert (await consumer.take(2)).rows == [4, 5]
            os.kill((await rt.info(doomed)).pid, signal.SIGKILL)
            with pytest.raises(aiodaft.ActorDied):
                await waiting
            again = await consumer.take(2)
            assert (again.rows, again.fields) == ([2, 3], {"value": [2, 3]})
        # Leaving the block gives them back, too.
        await queue.finish()
        async with queue.consumer("train") as consumer:
            assert (await consumer.take(10)).rows == [2, 3, 4, 5]


async def test_a_put_waits_for_room_and_is_in_turn(rt: aiodaft.Runtime) -> None:
    loop = asyncio.get_running_loop()
    async with open_queue(rt, {"train": ["x"]}, capacity=3) as queue:
        rows = await queue.put({"x": [1, 2]})
        large = loop.create_task(queue.put({"x": [3, 4, 5]}))
        # Behind the large one, although there is room.
        await are_waiting(rt, queue, 1)
        small = loop.create_task(queue.put({"x": [6]}))
        await are_waiting(rt, queue, 2)
        assert await queue.metadata.count() == 2
        await queue.clear(rows)
        assert await large == [2, 3, 4]
        assert await queue.metadata.count() == 3
        small.cancel()
        with pytest.raises(asyncio.CancelledError):
            await small
        await queue.clear([2])
        assert await queue.put({"x": [7]}) == [5]
        with pytest.raises(ValueError, match="4 rows are more than the queue has room for, which is 3"):
            await queue.put({"x": [1, 2, 3, 4]})


async def test_rows_of_a_producer_that_dies_before_it_has_written_leave_room(rt: aiodaft.Runtime) -> None:
    producer = await rt.spawn(Producer)
    async with open_queue(rt, {"train": ["x"]}, capacity=2) as queue:
        begun = producer.begin(queue, 2)
        while await queue.metadata.count() != 2:
            await asyncio.sleep(0)
        waiting = asyncio.get_running_loop().create_task(queue.put({"x": [1, 2]}))
        os.kill((await rt.info(producer)).pid, signal.SIGKILL)
        with pytest.raises(aiodaft.ActorDied):
            await begun
        await waiting
        assert await queue.metadata.count() == 2


async def test_values_that_come_after_a_row_was_cleared_do_not_stay(rt: aiodaft.Runtime) -> None:
    async with open_queue(rt, {"train": ["x"]}, storages=2) as queue:
        rows = await queue.put({"x": [0, 1, 2, 3]})
        for part in ([3], [0, 2], [1], [1]):
            await queue.clear(part)
            await queue.write(rows, {"y": rows})
        assert [await storage.count() for storage in queue.storages] == [0, 0]


async def test_a_take_that_is_given_up_loses_no_row(rt: aiodaft.Runtime) -> None:
    async with open_queue(rt, {"train": Wants(["x"], at_once)}) as queue, queue.consumer("train") as consumer:
        for value in range(20):
            taking = asyncio.get_running_loop().create_task(consumer.take(1))
            for _ in range(value):
                await asyncio.sleep(0)
            (row,) = await queue.put({"x": [value]})
            taking.cancel()
            await asyncio.wait([taking])
            batch = await consumer.take(1) if taking.cancelled() else taking.result()
            assert (batch.rows, batch.fields) == ([row], {"x": [value]})
            await consumer.acknowledge(batch)


async def test_a_sampler_is_a_function_of_the_user(rt: aiodaft.Runtime) -> None:
    def newest_pair(ready: Sequence[int], count: int) -> Sequence[int]:
        pairs = [row for row in ready if row % 2 == 0 and row + 1 in ready]
        return (pairs[-1], pairs[-1] + 1) if pairs and count >= 2 else ()

    async with open_queue(rt, {"train": Wants(["y"], newest_pair)}) as queue, queue.consumer("train") as consumer:
        # A ref as a value goes from the actor that makes it to its storage.
        producer = await rt.spawn(Producer)
        rows = await queue.put({"x": [producer.produce(queue, [], 1)] * 6})
        for part in ([0, 3, 1], [2]):
            await queue.write(part, {"y": part})
        assert (await consumer.take(5)).rows == [2, 3]
        assert (await consumer.take(5)).rows == [0, 1]
        assert rows == [0, 1, 2, 3, 4, 5]


async def test_mistakes_are_named_at_their_line(rt: aiodaft.Runtime) -> None:
    with pytest.raises(ValueError, match="capacity is a positive number, not 0"):
        await open_queue(rt, {}, capacity=0).__aenter__()
    async with open_queue(rt, {"train": ["x"]}) as queue:
        with pytest.raises(ValueError, match=r"same positive number of values, not \{'x': 1, 'y': 2\}"):
            await queue.put({"x": [1], "y": [1, 2]})
        with pytest.raises(ValueError, match="1 values of 'x' for 2 rows"):
            await queue.write([0, 1], {"x": [1]})
        with pytest.raises(ValueError, match="no consumer 'eval', only 'train'"):
            await queue.consumer("eval").__aenter__()
        async with queue.consumer("train") as consumer:
            with pytest.raises(ValueError, match="positive number of rows, not 0"):
                await consumer.take(0)
            rows = await queue.put({"x": [np.ones(3)]})
            await queue.storages[0].clear(rows)
            with pytest.raises(LookupError, match=r"the rows \[0\] of the queue were cleared"):
                await consumer.take(1)
        await queue.finish()
        with pytest.raises(ValueError, match="the queue is finished"):
            await queue.put({"x": [1]})


@pytest.mark.usefixtures("module_rt")
async def test_the_rows_of_a_storage_that_dies_are_lost_and_no_others() -> None:
    async with (
        aiodaft.Runtime(preload=(), unhandled="log") as rt,
        open_queue(rt, {"train": ["x"], "eval": ["x", "y"]}, capacity=4, storages=2) as queue,
        queue.consumer("train") as train,
    ):
        assert await queue.put({"x": [0, 1, 2, 3]}) == [0, 1, 2, 3]
        os.kill((await rt.info(queue.storages[1])).pid, signal.SIGKILL)
        with pytest.raises(aiodaft.ActorDied):
            await train.take(4)
        # Their places are free, also those of rows that another consumer waited for.
        assert await queue.metadata.count() == 2
        assert (await train.take(2)).rows == [0, 2]
        assert await queue.put({"x": [4, 6]}) == [4, 6]
        assert (await train.take(2)).fields == {"x": [4, 6]}
        await queue.clear([0, 1, 2])
        await queue.write([4, 6], {"y": [4, 6]})
        await queue.finish()
        async with queue.consumer("eval") as consumer:
            assert (await consumer.take(9)).rows == [4, 6]


@pytest.mark.usefixtures("module_rt")
async def test_without_a_storage_producers_and_consumers_that_wait_are_told() -> None:
    async with (
        aiodaft.Runtime(preload=(), unhandled="log") as rt,
        open_queue(rt, {"train": ["x"]}) as queue,
        queue.consumer("train") as consumer,
    ):
        taking = asyncio.get_running_loop().create_task(consumer.take(1))
        os.kill((await rt.info(queue.storages[0])).pid, signal.SIGKILL)
        with pytest.raises(aiodaft.ActorDied):
            await queue.put({"x": [1]})
        for using in (taking, consumer.take(1), queue.put({"x": [1]})):
            with pytest.raises(aiodaft.ActorDied, match="all storages of the queue have died"):
                await using


@pytest.mark.usefixtures("module_rt")
async def test_a_storage_that_is_restarted_is_used_on() -> None:
    async with aiodaft.Runtime(preload=(), unhandled="log") as rt:
        storages = [await rt.on(restart=aiodaft.Restart()).spawn(Storage, 2) for _ in range(2)]
        metadata = await rt.spawn(Metadata, {"train": (["x"], at_once)}, 8, storages)
        queue = TransferQueue(metadata, tuple(storages))
        async with queue.consumer("train") as consumer:
            await queue.put({"x": [0, 1, 2, 3]})
            pid = (await rt.info(storages[1])).pid
            os.kill(pid, signal.SIGKILL)
            while (await rt.info(storages[1])).pid == pid:
                await asyncio.sleep(0)
            with pytest.raises(LookupError, match=r"rows \[1, 3\] .* restarted"):
                await consumer.take(4)
            assert await queue.put({"x": [4, 5]}) == [4, 5]
            assert (await consumer.take(8)).fields == {"x": [0, 2, 4, 5]}
