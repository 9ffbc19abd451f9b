"""Coroutines that begin at once: one that never waits is over without a task, which often costs more than it does.

A task is kept at hand, parked. While a coroutine takes its first steps, that one is the current task; if the coroutine
waits, the task goes on with it, and is its own from then on. (Eager tasks, as Python 3.12 has them, begin at once too;
here those that do not wait cost no task.)
"""

from __future__ import annotations

import asyncio

# What tasks of other makes use: https://docs.python.org/3/library/asyncio-extending.html
from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Coroutine
from contextvars import Context, copy_context
from types import TracebackType
from typing import Any, Protocol

from aiodaft._runtime.platform.tasks import may_step


class Started(Protocol):
    """A call, as far as its task goes."""

    task: asyncio.Task[None] | None
    # In which it begins; by default a copy of that of whoever starts it.
    context: Context | None


class Starter:
    """Begins the calls of one process."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._spare: Spare | None = None

    def start(self, call: Started, coro: Coroutine[Any, Any, None], *, at_once: bool = True) -> None:
        """Run the coroutine of a call until it waits for the first time, in a context of its own.

        If that is not to be at once, or a task runs here, which no other may interrupt, it begins in its turn, as in
        any task.
        """
        loop = self._loop
        if not (at_once and may_step(loop)) or asyncio.current_task(loop) is not None:
            call.task = loop.create_task(coro, context=call.context)
            return
        spare = self._spare
        if spare is None or spare.is_spoilt:
            spare = self._spare = Spare(loop)
        # Not `or`: an empty one counts as false.
        context = copy_context() if call.context is None else call.context
        task = call.task = spare.task
        _enter_task(loop, task)
        try:
            awaited = context.run(coro.send, None)
        except StopIteration:
            return
        finally:
            _leave_task(loop, task)
        self._spare = None
        spare.runs.go_on(coro, context, awaited)

    def close(self) -> None:
        """Let go of the task at hand."""
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.task.cancel()


class Spare:
    """A task at hand, and what it runs: that does not know its task, or the two would be garbage in a circle."""

    __slots__ = ("runs", "task")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.runs = Deferred(loop)
        self.task: asyncio.Task[None] = loop.create_task(self.runs, name="aiodaft call")

    @property
    def is_spoilt(self) -> bool:
        """Whether somebody has cancelled it: who cancels all tasks, or a call that had it before."""
        # Before its first step, a task tells nobody in public that it will be cancelled.
        task: Any = self.task
        return bool(task._must_cancel) or self.runs.parked.done()


class Deferred(Coroutine[Any, Any, None]):
    """What a task runs that was there first: nothing, until it gets a coroutine that has begun."""

    __slots__ = ("_awaited", "_context", "_fresh", "coro", "parked")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.coro: Coroutine[Any, Any, None] | None = None
        self._context: Context
        # What the coroutine gave when it waited for the first time; the task has not heard of it.
        self._awaited: asyncio.Future[Any] | None = None
        self._fresh = False
        self.parked: asyncio.Future[None] = loop.create_future()

    def __getattr__(self, name: str) -> Any:
        # Who looks at a task (its stack, its text, a debugger) gets to see the coroutine.
        return getattr(self.coro, name)

    def go_on(self, coro: Coroutine[Any, Any, None], context: Context, awaited: asyncio.Future[Any] | None) -> None:
        """Have the task go on with a coroutine, which waits for that future, or only for its next turn."""
        if asyncio.isfuture(awaited):
            # As tasks do when they get it: others may wait for it, too, before this one hears of it.
            awaited._asyncio_future_blocking = False
        self.coro, self._context, self._awaited, self._fresh = coro, context, awaited, True
        if not self.parked.done():
            self.parked.set_result(None)

    def send(self, value: None) -> Any:
        if self.coro is None:
            return next(self.parked.__await__())
        if self._fresh:
            awaited = self._take_awaited()
            if awaited is not None:
                return awaited
        return self._context.run(self.coro.send, value)

    def throw(self, kind: Any, error: BaseException | object = None, traceback: TracebackType | None = None, /) -> Any:
        thrown = kind if isinstance(kind, BaseException) else kind() if error is None else error
        assert isinstance(thrown, BaseException)
        if self.coro is None:
            self.parked.cancel()
            raise thrown
        awaited = self._take_awaited()
        # As tasks do: what is waited for is cancelled, and says so to who waits, with the same words.
        if asyncio.isfuture(awaited) and isinstance(thrown, asyncio.CancelledError) and awaited.cancel(*thrown.args):
            return awaited
        return self._context.run(self.coro.throw, thrown)

    def _take_awaited(self) -> Any:
        awaited, self._awaited, self._fresh = self._awaited, None, False
        if asyncio.isfuture(awaited):
            awaited._asyncio_future_blocking = True
        return awaited

    def close(self) -> None:
        if self.coro is not None:
            self.coro.close()

    def __await__(self) -> Any:
        raise TypeError("only a task runs this")
