"""Calls that were made together, where the failed await of one keeps the program from awaiting the others. Pure.

In `a, b = m.step(), n.step()` the code that awaits `b` does not run if `await a` raises: the error of the call, or the
cancellation of a timeout. When `b` is dropped then, its error is no news to the program: it has an error of that task
already.

Times are numbers of calls: a later event in a process has a higher number.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, NamedTuple, TypeVar

from aiodaft._protocol.ids import CallId, serial_of

Maker = TypeVar("Maker")

# Awaits that are remembered. If more calls fail before a sibling is dropped, its error is reported after all.
_REMEMBERED: Final = 1024


class _Failed(NamedTuple, Generic[Maker]):
    maker: Maker
    call: CallId
    raised: int


class FailedAwaits(Generic[Maker]):
    """The awaits of one process that have raised something."""

    def __init__(self) -> None:
        self._failed: deque[_Failed[Maker]] = deque(maxlen=_REMEMBERED)

    def note(self, maker: Maker, call: CallId, raised: int) -> None:
        """An await raised something: of a call that the task `maker` made."""
        self._failed.append(_Failed(maker, call, raised))

    def excuse(self, maker: Maker, call: CallId, failed: int, dropped: int) -> bool:
        """Whether the error of a call is no news, because the await of a sibling had failed before.

        A sibling is another call of the same task, its `maker`, under way at the same time. `dropped`: the call's ref.
        """
        made = serial_of(call)
        return any(
            one.maker == maker and one.call != call and serial_of(one.call) < failed and made < one.raised < dropped
            for one in self._failed
        )
