"""Wakes tasks that await refs in the turn of the loop in which the values come, right after the messages.

A plain future would wake them in the next turn, and a turn takes longer than the handling of a small answer.
"""

from __future__ import annotations

import asyncio

# The API for other implementations of tasks: https://docs.python.org/3/library/asyncio-extending.html
from asyncio.tasks import _enter_task, _leave_task
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from types import TracebackType
from typing import Any, Protocol

from aiodaft._runtime.platform.tasks import current_task, may_step


class Wakeup(asyncio.Future[None]):
    """The future of one `await` of a ref. It has one waiting task, which `Wakeups` continues."""

    # The task's wakeup, removed when it is called, because the task refers to this future.
    _callback: Callable[[Any], object] | None = None
    _context: Context | None = None

    def __init__(self, wakeups: Wakeups) -> None:
        super().__init__(loop=wakeups.loop)
        self._wakeups = wakeups

    def wake(self) -> None:
        if not self.done():
            self.set_result(None)
            self._wakeups.add(self)

    def go_on(self) -> None:
        callback, context = self._callback, self._context
        if callback is not None and context is not None:
            self._callback = None
            context.run(callback, self)

    def go_on_soon(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            self._wakeups.loop.call_soon(callback, self, context=self._context)

    def set_exception(self, error: type | BaseException, /) -> None:
        super().set_exception(error)
        self.go_on_soon()

    def cancel(self, msg: Any = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled:
            self.go_on_soon()
        return cancelled

    def add_done_callback(self, callback: Callable[[Any], object], /, *, context: Context | None = None) -> None:
        self._callback = callback
        # Not `or`: an empty context is false.
        self._context = copy_context() if context is None else context
        if self.done():
            self.go_on_soon()

    def remove_done_callback(self, callback: Callable[[Any], object], /) -> int:
        if self._callback != callback:
            return 0
        self._callback = None
        return 1


class Wakeups:
    """The tasks of one process that are to be woken.

    Attributes:
        collecting: Set by a callback of the loop that calls `run` after it has handled messages.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.collecting = False
        self.due: deque[Wakeup] = deque()

    def add(self, wakeup: Wakeup) -> None:
        if self.collecting and may_step(self.loop):
            self.due.append(wakeup)
        else:
            wakeup.go_on_soon()

    def run(self) -> None:
        due = self.due
        try:
            while due:
                due.popleft().go_on()
        finally:
            if due:
                # SystemExit or KeyboardInterrupt passes, and may be caught outside.
                self.loop.call_soon(self.run)


# Starts calls at once: a coroutine that never waits ends without a task of its own, which would often cost more.
# A parked task is kept ready. It is the current task while a coroutine takes its first step. If the coroutine waits,
# the task goes on with it. (With eager tasks of Python 3.12, each coroutine costs a task.)


class Started(Protocol):
    task: asyncio.Task[None] | None
    # Default: a copy of the starter's context.
    context: Context | None


class Starter:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._spare: Spare | None = None

    def start(self, call: Started, coro: Coroutine[Any, Any, None], *, at_once: bool = True) -> None:
        """Run the coroutine of a call until it waits for the first time, in a context of its own.

        With `at_once` False, or inside of a task, which must not be interrupted, it starts in its turn like any task.
        """
        loop = self._loop
        if not (at_once and may_step(loop)) or current_task(loop) is not None:
            call.task = loop.create_task(coro, context=call.context)
            return
        spare = self._spare
        if spare is None or spare.is_spoilt:
            spare = self._spare = Spare(loop)
        # Not `or`: an empty context is false.
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
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.task.cancel()


class Spare:
    """A parked task and its coroutine, without a cycle."""

    __slots__ = ("runs", "task")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.runs = Deferred(loop)
        self.task: asyncio.Task[None] = loop.create_task(self.runs, name="aiodaft call")

    @property
    def is_spoilt(self) -> bool:
        """Cancelled with all tasks of the loop, or by an earlier call that had it."""
        # No public method says that a task will be cancelled before its first step.
        task: Any = self.task
        return bool(task._must_cancel) or self.runs.parked.done()


class Deferred(Coroutine[Any, Any, None]):
    """The coroutine of a parked task: waits until it gets a coroutine that has started, and continues that."""

    __slots__ = ("_awaited", "_context", "_fresh", "coro", "parked")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.coro: Coroutine[Any, Any, None] | None = None
        self._context: Context
        # The first future that the coroutine waits for.
        self._awaited: asyncio.Future[Any] | None = None
        self._fresh = False
        self.parked: asyncio.Future[None] = loop.create_future()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.coro, name)

    def go_on(self, coro: Coroutine[Any, Any, None], context: Context, awaited: asyncio.Future[Any] | None) -> None:
        """None: it waits for the next turn of the loop."""
        if asyncio.isfuture(awaited):
            # As tasks do, because other tasks may wait for it before this one gets it.
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
        # As tasks do: cancel the future, which then raises the same message here.
        if asyncio.isfuture(awaited) and isinstance(thrown, asyncio.CancelledError) and awaited.cancel(*thrown.args):
            return awaited
        try:
            return self._context.run(self.coro.throw, thrown)
        finally:
            # Breaks a cycle: the error's frames lead here.
            del kind, error, thrown

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
