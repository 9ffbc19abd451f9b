"""How tasks that await refs go on: in the turn of the loop in which the values come, right behind the messages.

Futures have whoever awaits them go on in the next turn, and a turn takes longer than all that a small answer needs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

from aiodaft._runtime.platform.tasks import may_step


class Wakeup(asyncio.Future[None]):
    """What one `await` of a ref waits for: a future that one task waits for, and that says itself when that goes on."""

    # It is forgotten when it is called: it knows the task, and that knows this.
    _callback: Callable[[Any], object] | None = None
    _context: Context | None = None

    def __init__(self, wakeups: Wakeups) -> None:
        super().__init__(loop=wakeups.loop)
        self._wakeups = wakeups

    def wake(self) -> None:
        """There is something to go on with."""
        if not self.done():
            self.set_result(None)
            self._wakeups.add(self)

    def go_on(self) -> None:
        """Have the task take its next step, now; none runs here."""
        callback, context = self._callback, self._context
        if callback is not None and context is not None:
            self._callback = None
            context.run(callback, self)

    def go_on_soon(self) -> None:
        """The same, in its turn."""
        callback, self._callback = self._callback, None
        if callback is not None:
            self._wakeups.loop.call_soon(callback, self, context=self._context)

    # What futures do with those who wait for them.

    def set_exception(self, error: type | BaseException, /) -> None:
        """End the wait with an error."""
        super().set_exception(error)
        self.go_on_soon()

    def cancel(self, msg: Any = None) -> bool:
        """End the wait; False if it is over."""
        cancelled = super().cancel(msg)
        if cancelled:
            self.go_on_soon()
        return cancelled

    def add_done_callback(self, callback: Callable[[Any], object], /, *, context: Context | None = None) -> None:
        """Take what has a task go on."""
        self._callback = callback
        # Not `or`: an empty one counts as false.
        self._context = copy_context() if context is None else context
        if self.done():
            self.go_on_soon()

    def remove_done_callback(self, callback: Callable[[Any], object], /) -> int:
        """Forget it."""
        if self._callback != callback:
            return 0
        self._callback = None
        return 1


class Wakeups:
    """The tasks of one process that can go on.

    Attributes:
        collecting: Set while messages are handled, by who is called by the loop itself, and calls `run` right after.
        due: Those that have come up since then.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.collecting = False
        self.due: deque[Wakeup] = deque()

    def add(self, wakeup: Wakeup) -> None:
        """A task can go on."""
        if self.collecting and may_step(self.loop):
            self.due.append(wakeup)
        else:
            wakeup.go_on_soon()

    def run(self) -> None:
        """Let all go on that can."""
        due = self.due
        try:
            while due:
                due.popleft().go_on()
        finally:
            if due:
                # Something ends the program, and may be caught outside.
                self.loop.call_soon(self.run)
