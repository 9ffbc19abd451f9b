"""Members of groups that send each other messages."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from inside import inboxes_here, members_watched_here, traffic_here

import aiodaft
from aiodaft import Actor, method

Array: TypeAlias = "np.ndarray[Any, Any]"


class Counts(NamedTuple):
    """The contents of the inboxes of a process."""

    boxes: int = 0
    messages: int = 0
    waiting: int = 0
    watches: int = 0
    nbytes: int = 0


class Member(Actor):
    def __init__(self) -> None:
        self.group: aiodaft.typing.CurrentGroup[Member] = aiodaft.current_group()

    @method
    async def send(self, to: int, value: Any, tag: int | str = 0) -> None:
        await self.group.send(value, to=to, tag=tag)

    @method
    def swap_in_threads(self, values: list[Any]) -> list[Any]:
        """Send from the thread of a `def` method, and receive in another one, which knows of no call."""
        other, received = 1 - self.group.rank, list[Any]()
        group = aiodaft.current_group()

        def receive() -> None:
            received.extend(group.irecv(source=other, tag="swap").result() for _ in values)

        thread = threading.Thread(target=receive)
        thread.start()
        sent = [group.isend(value, to=other, tag="swap") for value in values]
        thread.join()
        for ref in sent:
            ref.result()
        return received

    @method
    def recv_beside(self, source: int) -> Any:
        return self.group.irecv(source=source).result()

    @method
    def send_and_drop(self, to: int, value: Any) -> None:
        self.group.isend(value, to=to)

    @method
    async def send_all(self, to: int, values: list[Any], tag: int | str = 0) -> None:
        """All at once; in this order."""
        await asyncio.gather(*(self.group.send(value, to=to, tag=tag) for value in values))

    @method
    async def send_zeros(self, to: int, nbytes: int, tag: int | str = 0) -> None:
        await self.group.send(np.zeros(nbytes, np.uint8), to=to, tag=tag)

    @method
    async def recv(self, source: int | None = None, tag: int | str | None = None) -> Any:
        return await self.group.recv(source=source, tag=tag)

    @method(ordered=False)
    async def swap(self, value: Any) -> Any:
        """Both send first, and receive after."""
        await self.group.send(value, to=1 - self.group.rank)
        return await self.group.recv()

    @method
    async def recv_or_fail(self, source: int | None) -> Any:
        """Receive from a member; fail if there is none."""
        if source is None:
            raise ValueError("a bad batch")
        return await self.group.recv(source=source)

    @method
    async def send_or_fail(self, to: int | None) -> None:
        """Send more than the inbox of a member has room for; or fail when told to."""
        if to is None:
            await self.group.recv(tag="fail")
            raise ValueError("a bad batch")
        await self.group.send("first", to=to)
        try:
            await self.group.send("second", to=to)
        except aiodaft.CallCancelled:
            # Now messages that have room go through, and nothing waits.
            await self.group.send("first again", to=self.group.rank)
            await self.group.send("second again", to=to)

    @method
    async def recv_now(self, source: int | None = None, tag: int | str | None = None) -> Any:
        """With the group as it is now."""
        return await aiodaft.current_group().recv_message(source=source, tag=tag)

    @method
    async def recv_message(self, source: int | None = None, tag: int | str | None = None) -> aiodaft.typing.Message:
        return await self.group.recv_message(source=source, tag=tag)

    @method
    async def recv_many(self, count: int, source: int | None = None, tag: int | str | None = None) -> list[Any]:
        return [await self.group.recv(source=source, tag=tag) for _ in range(count)]

    @method
    async def recv_impatiently(self, count: int) -> list[Any]:
        """Every receive that has to wait is cancelled in the next turn of the loop."""
        received: list[Any] = []
        while len(received) < count:
            with suppress(TimeoutError):
                async with asyncio.timeout(0):
                    received.append(await self.group.recv())
            await asyncio.sleep(0)
        return received

    @method
    async def recv_size(self, source: int) -> int:
        value = await self.group.recv(source=source)
        return int(value.nbytes)

    @method
    async def recv_within(self, seconds: float, source: int) -> str:
        try:
            async with asyncio.timeout(seconds):
                await self.group.recv(source=source)
        except TimeoutError:
            return "too late"
        return "received"

    @method
    async def limit(self, messages: int, nbytes: int) -> None:
        self.group.limit_inbox(messages=messages, nbytes=nbytes)

    @method
    async def exchange(self, nbytes: int) -> tuple[bool, int]:
        """Both send first, and receive after."""
        other = 1 - self.group.rank
        mine = np.full(nbytes, self.group.rank, np.uint8)
        await self.group.send(mine, to=other)
        # A value that was sent does not change any more.
        mine.fill(9)
        theirs = await self.group.recv(source=other)
        return bool((theirs == other).all()), theirs.nbytes

    @method
    async def multiply(self, blocks: tuple[Array, Array]) -> Array:
        """Cannon: the blocks of a move to the left, those of b up."""
        a, b = blocks
        row, column = self.group.along("column"), self.group.along("row")
        i, j, size = self.group.coords["row"], self.group.coords["column"], row.size

        async def shift(ring: aiodaft.typing.CurrentGroup[Member], block: Array, by: int) -> Array:
            await ring.send(block, to=(ring.rank - by) % size)
            shifted: Array = await ring.recv(source=(ring.rank + by) % size)
            return shifted

        a, b = await asyncio.gather(shift(row, a, i), shift(column, b, j))
        product = a @ b
        for _ in range(size - 1):
            a, b = await asyncio.gather(shift(row, a, 1), shift(column, b, 1))
            product += a @ b
        return product

    @method
    async def pass_on(self, rounds: int) -> int:
        """A token goes round the ring of all members."""
        group, token = self.group, 0
        before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        for _ in range(rounds):
            if group.rank == 0:
                await group.send(token, to=after)
                token = await group.recv(source=before)
            else:
                token = 1 + await group.recv(source=before)
                await group.send(token, to=after)
        return token

    @method(ordered=False)
    async def counts(self) -> Counts:
        boxes = inboxes_here()
        return Counts(
            len(boxes),
            sum(len(box.inbox) for box in boxes),
            sum(len(box.inbox.waiting) for box in boxes),
            sum(len(box.watches) for box in boxes),
            sum(box.inbox.nbytes for box in boxes),
        )

    @method
    async def is_watched(self) -> bool:
        """Whether a receiver would hear of the end of this member, alone in its process."""
        return members_watched_here() > 0

    @method
    async def traffic(self) -> aiodaft.state.Traffic:
        return traffic_here()

    @method
    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @method
    def recv_in_thread(self) -> str:
        try:
            asyncio.run(self.group.recv())
        except RuntimeError as error:
            return str(error)
        return ""
