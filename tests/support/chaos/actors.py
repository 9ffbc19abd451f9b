"""The actors of a chaos run. Each call that runs is noted in a file, where it outlives its actor."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from transport_probes import no_more_threads

from aiodaft.actor import Actor
from aiodaft.channel import Channel
from aiodaft.member import current_group
from aiodaft.methods import method
from aiodaft.queue import TransferQueue

__all__ = ["LOGGER", "Lump", "Victim", "made", "parcel"]

# Its records go to the files on a disk that fills up.
LOGGER = "chaos.victim"

# Every so many items of a channel, one is too large for a message.
_LARGE_EVERY = 4


def made(number: int, size: int) -> bytes:
    """The bytes that call `number` makes."""
    return random.Random(number).randbytes(size)


def parcel(number: int, index: int) -> bytes:
    """An item of a channel: small, or one that stays with its sender until it is received."""
    return made(number + index, 10 if index % _LARGE_EVERY else 70_000)


class Lump:
    """Bytes that are used where they arrive: in shared memory."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __reduce_ex__(self, protocol: Any, /) -> tuple[Any, ...]:
        return Lump, (pickle.PickleBuffer(self.data),)


class Victim(Actor):
    """Does a little of everything."""

    def __init__(self, notes: Path) -> None:
        # A write of a few bytes to the end of a file is done or not, also when the writer is killed.
        self._notes = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        # Forked children: their pids, and the descriptors that let them go on.
        self._children: dict[int, tuple[int, int]] = {}

    def _note(self, number: int) -> None:
        logging.getLogger(LOGGER).info("call %s", number)
        os.write(self._notes, f"{number}\n".encode())

    @method
    async def make(self, number: int, size: int) -> bytes:
        """Bytes that depend on the number of the call."""
        self._note(number)
        return made(number, size)

    @method
    def flip(self, number: int, data: bytes) -> bytes:
        """The same bytes backwards."""
        self._note(number)
        return data[::-1]

    @method
    async def nap(self, number: int, hundredths: int) -> int:
        """Sleep, and give back for how long."""
        self._note(number)
        await asyncio.sleep(hundredths / 100)
        return hundredths

    @method
    async def count(self, number: int, items: int) -> AsyncIterator[int]:
        """A stream."""
        self._note(number)
        for item in range(items):
            yield item

    @method
    async def ask(self, number: int, other: Victim, size: int) -> bytes:
        """Have another actor make something, as the call after this one."""
        self._note(number)
        return await other.make(number + 1, size)

    @method
    async def send(self, number: int, channel: Channel[int], items: int) -> None:
        """Fill a channel, and close it."""
        self._note(number)
        for item in range(items):
            await channel.send(item)
        await channel.aclose()

    @method
    async def receive(self, number: int, channel: Channel[int]) -> list[int]:
        """Empty a channel."""
        self._note(number)
        return [item async for item in channel]

    @method
    async def pour(self, number: int, channel: Channel[tuple[int, int, bytes]], sender: int, items: int) -> None:
        """Be one of several senders; leave the channel open."""
        self._note(number)
        for index in range(items):
            await channel.send((sender, index, parcel(number, index)))

    @method
    async def draw(self, number: int, channel: Channel[tuple[int, int, bytes]]) -> list[tuple[int, int, bytes]]:
        """Be one of several receivers."""
        self._note(number)
        return [item async for item in channel]

    @method
    async def keep_to_itself(self, number: int, channel: Channel[bytes], items: int) -> list[bytes]:
        """Send to a channel and receive from it at the same time."""
        self._note(number)

        async def send() -> None:
            for index in range(items):
                await channel.send(parcel(number, index))
            await channel.aclose()

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            return [item async for item in channel]

    @method
    async def share(self, number: int, size: int) -> tuple[bytes, int]:
        """The bytes that all members of the group make, and the message of the member before this one."""
        group = current_group()
        self._note(number + group.rank)
        shares = await group.all_gather(made(number + group.rank, size), key=number)
        await group.send(number + group.rank, to=(group.rank + 1) % group.size, tag=number)
        return b"".join(shares), await group.recv(source=(group.rank - 1) % group.size, tag=number)

    @method
    def turn(self, job: tuple[int, bytes]) -> bytes:
        """The bytes of a job backwards."""
        self._note(job[0])
        return job[1][::-1]

    @method
    async def fill(self, number: int, queue: TransferQueue, items: int) -> None:
        """Put items into a queue, which stays open."""
        self._note(number)
        for index in range(items):
            await queue.put({"item": [parcel(number, index)]})

    @method
    async def drain(self, number: int, queue: TransferQueue) -> list[bytes]:
        """Take the items of a queue until it is finished."""
        self._note(number)
        came: list[bytes] = []
        async with queue.consumer("drain") as consumer:
            while batch := await consumer.take(2):
                came += batch.fields["item"]
                await consumer.acknowledge(batch)
                await queue.clear(batch.rows)
        return came

    @method(concurrency=1)
    async def go_without_threads(self, seconds: float) -> None:
        """Start no thread for some time."""
        with no_more_threads():
            await asyncio.sleep(seconds)

    @method
    def wait_on_thread(self, number: int, other: Victim, size: int) -> bytes:
        """Have another actor make something, and wait for it on the thread."""
        self._note(number)
        return other.make(number + 1, size).result()

    @method
    def fork(self, number: int, lump: Lump) -> None:
        """Fork a child that keeps the value, and looks at it again when it is let go."""
        self._note(number)
        before = bytes(lump.data)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.close(writing)
                # Also when this process ends.
                os.read(reading, 1)
                os._exit(bytes(lump.data) != before)
            finally:
                os._exit(2)
        os.close(reading)
        self._children[number] = (child, writing)

    @method
    def let_go(self, number: int, forked: int) -> int | None:
        """The exit status of the child of an earlier call: 0 if its value is unchanged; None if it ended before."""
        self._note(number)
        if forked not in self._children:
            # It was another incarnation that forked it.
            return None
        child, writing = self._children.pop(forked)
        # Closing it would not do: children that were forked later have it, too.
        os.write(writing, b".")
        os.close(writing)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
