"""Wakes tasks that await refs in the turn of the loop in which the values come, right after the messages.

A plain future would wake them in the next turn, and a turn takes longer than the handling of a small answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

from aiodaft._runtime.platform.tasks import may_step


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
        """Have the task take its next step now; called outside of tasks."""
        callback, context = self._callback, self._context
        if callback is not None and context is not None:
            self._callback = None
            context.run(callback, self)

    def go_on_soon(self) -> None:
        """The same in the next turn of the loop."""
        callback, self._callback = self._callback, None
        if callback is not None:
            self._wakeups.loop.call_soon(callback, self, context=self._context)

    # As in `asyncio.Future`.

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
        collecting: Set by a callback of the loop while it handles messages; it calls `run` right after that.
        due: The wakeups since then.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.collecting = False
        self.due: deque[Wakeup] = deque()

    def add(self, wakeup: Wakeup) -> None:
        """Wake a task: in `run` while collecting, else in the next turn."""
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
