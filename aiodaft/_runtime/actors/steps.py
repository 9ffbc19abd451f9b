"""Generators of `def` methods: each step runs on the actor's thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextvars import copy_context
from typing import Any, Final, TypeVar

from aiodaft._protocol.connections.session import Pace
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.platform.tasks import see_through
from aiodaft._runtime.platform.threads import HelperThread


class Paced:
    # The number of items that the consumer still takes.
    credit = 0
    # The step of its generator that is on the actor's thread, or waits for it.
    step: asyncio.Future[Any] | None = None
    # Its generator was told to end: the awaits of its cleanup are not cancelled with the call.
    closes = False
    _credit_wanted: asyncio.Event | None = None

    def add_credit(self, count: int) -> None:
        self.credit += count
        if self._credit_wanted is not None:
            self._credit_wanted.set()

    async def wait_credit(self) -> None:
        while self.credit <= 0:
            if self._credit_wanted is None:
                self._credit_wanted = asyncio.Event()
            self._credit_wanted.clear()
            await self._credit_wanted.wait()
        self.credit -= 1

    async def give_items(self, items: AsyncGenerator[Any, None], give: Callable[[Any, Any], Awaitable[None]]) -> None:
        try:
            await self.wait_credit()
            async for item in items:
                await give(self, item)
                await self.wait_credit()
        finally:
            # The end of the `async for` does not close the generator, and garbage collection closes it too late.
            await items.aclose()


async def enter(instance: Any, thread: HelperThread) -> tuple[Any, Any]:
    """Enter an instance if it is a context manager; `__aenter__` takes precedence over `__enter__`.

    Returns:
        The instance that serves the calls, and the manager to `leave`, or None.
    """
    if hasattr(type(instance), "__aenter__"):
        entered = await instance.__aenter__()
    elif hasattr(type(instance), "__enter__"):
        entered = await thread.run(instance.__enter__)
    else:
        return instance, None
    return (entered if isinstance(entered, type(instance)) else instance), instance


async def leave(manager: Any, thread: HelperThread) -> None:
    if hasattr(type(manager), "__aenter__"):
        await manager.__aexit__(None, None, None)
    elif manager is not None:
        await thread.run(lambda: manager.__exit__(None, None, None))


T = TypeVar("T")

_END: Final = object()


def take_step(call: Paced, step: Callable[[], T]) -> T:
    """Run a step of the generator of a call. By this frame of the thread, others find the call."""
    return step()


async def in_steps(
    call: Paced,
    items: Generator[Any, None, object],
    thread: HelperThread,
    pace: Pace,
    suspect: Callable[[], object],
    encode: Callable[[Any], StoredValue] | None,
) -> AsyncGenerator[Any, None]:
    """Run the generator of a call in a thread, from item to item, in the context of this task; `encode` items there.

    `suspect` is called when a step may have to wait for the thread.

    Cancellation: the generator is closed at its next item, because a thread cannot be interrupted.
    """
    context = copy_context()
    made: deque[Any] = deque(maxlen=1)

    def step() -> bool:
        item = next(items, _END)
        if item is _END:
            return False
        made.append(item if encode is None else encode(item))
        return True

    def close() -> bool:
        call.closes = True
        items.close()
        return False

    def begin_step(function: Callable[[], bool]) -> asyncio.Future[bool]:
        # The loop leaves the processor to the thread.
        pace.threads += 1
        call.step = thread.begin(lambda: context.run(take_step, call, function))
        call.step.add_done_callback(step_ended)
        if thread.backlog:
            suspect()
        return call.step

    def step_ended(_: object) -> None:
        pace.threads -= 1

    try:
        while await begin_step(step):
            call.step = None
            yield made.popleft()
    finally:
        # Comes behind a step that is under way.
        await see_through(begin_step(close))
        if made and encode is not None:
            made.popleft().release()
