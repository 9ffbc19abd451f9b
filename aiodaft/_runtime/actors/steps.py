"""Generators of `def` methods: each step runs on the actor's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator
from contextvars import copy_context
from typing import Any, Final

from aiodaft._protocol.connections.pace import Pace
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.platform.tasks import see_through
from aiodaft._runtime.platform.threads import HelperThread

_END: Final = object()


async def in_steps(
    items: Generator[Any, None, object], thread: HelperThread, pace: Pace, encode: Callable[[Any], StoredValue] | None
) -> AsyncGenerator[Any, None]:
    """Run a generator in a thread, from item to item, in the context of this task, and `encode` its items there.

    Cancellation: the generator is closed at its next item, because a thread cannot be interrupted.
    """
    context = copy_context()
    # An item that is not given yet.
    made: deque[Any] = deque(maxlen=1)

    def step() -> bool:
        item = next(items, _END)
        if item is _END:
            return False
        made.append(item if encode is None else encode(item))
        return True

    async def next_step() -> bool:
        # The loop leaves the processor to the thread.
        pace.threads += 1
        try:
            return await thread.run(lambda: context.run(step))
        finally:
            pace.threads -= 1

    try:
        while await next_step():
            yield made.popleft()
    finally:
        # Comes behind a step that is under way.
        await see_through(thread.begin(lambda: context.run(items.close)))
        if made and encode is not None:
            made.popleft().release()
