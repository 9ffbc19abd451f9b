"""Producers and consumers of a queue, and the contents of its actors' processes."""

from __future__ import annotations

import asyncio

import numpy as np
from here import current_peer

from aiodaft import Actor, method
from aiodaft.queue import TransferQueue
from aiodaft.state import Traffic


class Producer(Actor):
    """Adds rows: the prompt of row n is n times 20,000 ones."""

    @method
    async def produce(self, queue: TransferQueue, values: list[int], size: int) -> list[int]:
        """Returns the numbers of the rows."""
        rows: list[int] = []
        for start in range(0, len(values), size):
            part = values[start : start + size]
            rows += await queue.put({"prompt": [np.full(20_000, float(value)) for value in part], "value": part})
        return rows

    @method
    async def begin(self, queue: TransferQueue, count: int) -> None:
        """Reserve rows, and never write them."""
        async for _ in queue.metadata.reserve(count):
            await asyncio.Event().wait()


class Worker(Actor):
    """Consumes rows."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    @method
    async def answer(self, queue: TransferQueue, name: str, size: int) -> list[int]:
        """Add the field `name` to each row, until the queue ends. Returns the rows."""
        async with queue.consumer(name) as consumer:
            while batch := await consumer.take(size):
                for value, prompt in zip(batch.fields["value"], batch.fields["prompt"], strict=True):
                    assert prompt.shape == (20_000,)
                    assert float(prompt[-1]) == value
                await queue.write(batch.rows, {name: [prompt + 1 for prompt in batch.fields["prompt"]]})
                await consumer.acknowledge(batch)
                self.seen += batch.rows
        return self.seen

    @method
    async def train(self, queue: TransferQueue, name: str, size: int) -> list[int]:
        """Clear each row, until the queue ends. Returns the rows."""
        async with queue.consumer(name) as consumer:
            while batch := await consumer.take(size):
                for value, response in zip(batch.fields["value"], batch.fields["response"], strict=True):
                    assert float(response[0]) == value + 1
                await consumer.acknowledge(batch)
                await queue.clear(batch.rows)
                self.seen += batch.rows
        return self.seen

    @method
    async def take_and_wait(self, queue: TransferQueue, name: str, size: int) -> None:
        """Take rows, acknowledge the first batch, and wait for ever with the second one."""
        async with queue.consumer(name) as consumer:
            await consumer.acknowledge(await consumer.take(size))
            self.seen += (await consumer.take(size)).rows
            await asyncio.Event().wait()

    @method
    async def rows(self) -> list[int]:
        return self.seen


class Onlooker(Actor):
    """Shares the process of an actor."""

    @method
    async def traffic(self) -> Traffic:
        return current_peer().connections.traffic()

    @method
    async def live_blocks(self) -> int:
        """Blocks of shared memory that hold a value of this process."""
        return sum(transport.arena.live_blocks() for transport in current_peer().store.transports.values())
