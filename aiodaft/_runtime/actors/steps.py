"""Generators of `def` methods: each step runs on the actor's thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator
from contextvars import copy_context
from typing import Any, Final, TypeVar

from aiodaft._protocol.connections.rings import Pace
from aiodaft._runtime.actors.paced import Paced
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.platform.tasks import see_through
from aiodaft._runtime.platform.threads import HelperThread

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
    # An item that is not given yet.
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
