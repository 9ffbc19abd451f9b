"""Actors that wait for each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiodaft
from aiodaft import Actor, method


class RingPoller(Actor):
    """Calls others in the middle of its own calls."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.gate = asyncio.Event()
        self.kept: Any = None
        self.caught: aiodaft.DeadlockDetected | None = None

    # One at a time: a call in here keeps all others out.

    @method(concurrency=1)
    async def alone(self, *others: Any) -> str:
        """Calls the first of the others, which calls the next, and so on."""
        return await others[0].alone(*others[1:]) if others else "done"

    @method(concurrency=1)
    async def in_a_graph(self, *others: Any) -> Any:
        """Each runs a graph in which the next does."""
        if not others:
            return "done"
        async with aiodaft.compile(lambda: others[0].in_a_graph(*others[1:])) as graph:
            return await graph()

    @method(concurrency=1)
    async def catching(self, me: Any = None) -> str:
        """Calls itself, and goes on when it gets the error."""
        try:
            return "done" if me is None else str(await me.catching())
        except aiodaft.DeadlockDetected as error:
            self.caught = error
            return "went on"

    @method(concurrency=1)
    async def fan_out(self, how: str, *others: Any) -> list[Any]:
        """Waits for all others at once."""
        calls = [other.fan_out(how) for other in others]
        if how == "gather":
            return list(await asyncio.gather(*calls))
        if how == "wait":
            await asyncio.wait(calls)
            return [await call for call in calls]
        if how == "shield":
            return [await asyncio.shield(call) for call in calls]
        if how == "as_completed":
            return [await call for call in asyncio.as_completed(calls)]
        if how == "wait_for":
            return [await asyncio.wait_for(call, 60) for call in calls]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call.value()) for call in calls]
        return [task.result() for task in tasks]

    @method(concurrency=2)
    async def two_at_a_time(self, me: Any = None, *, wait: bool = False) -> str:
        """A call that comes back here finds a place, or both taken."""
        if wait:
            await self.gate.wait()
        return str(await me.two_at_a_time()) if me is not None else "done"

    # On the thread.

    @method
    async def remember_loop(self) -> None:
        self.loop = asyncio.get_running_loop()

    @method
    def on_thread(self, other: Any, *others: Any) -> Any:
        """A def method that waits, in the one way in which a thread can."""
        assert self.loop is not None
        call = other.on_thread(*others) if others else other.nothing()
        return asyncio.run_coroutine_threadsafe(call.value(), self.loop).result()

    @method
    def nothing(self) -> str:
        return "nothing"

    # Streams, and arguments.

    @method
    async def items(self, other: Any) -> AsyncIterator[Any]:
        yield await other.consume()

    @method(concurrency=1)
    async def consume(self, producer: Any = None, me: Any = None) -> list[Any]:
        return [] if producer is None else [item async for item in producer.items(me)]

    @method
    async def free(self, value: Any = "free") -> Any:
        return value

    @method
    async def ask_late(self, other: Any) -> Any:
        """Calls only once it is told to."""
        await self.gate.wait()
        return await other.free()

    @method
    async def consume_before_making(self, helper: Any, other: Any) -> str:
        """The call that needs a value goes ahead of the one that makes it."""
        value = helper.ask_late(other)
        needs = other.free(value)
        await helper.open_gate()
        return str(await needs)

    @method(ordered=False)
    async def open_gate(self) -> None:
        self.gate.set()

    @method
    async def keep(self, box: Any) -> None:
        self.kept = box.ref

    @method(concurrency=1)
    async def when_told(self) -> Any:
        """Waits for a ref that it is given later."""
        await self.gate.wait()
        return await self.kept

    @method
    async def what_was_caught(self) -> Any:
        return self.caught and (str(self.caught), self.caught.cycle, self.caught.executed)
