"""What is told to the forked children of this process: its loops, links and signals are not theirs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import cache
from typing import Final

_callbacks: Final[dict[Callable[[], object], None]] = {}


def when_forked(callback: Callable[[], object]) -> None:
    """Call back, once, in every child that Python forks from this process."""
    _watch()
    _callbacks[callback] = None


def no_more(callback: Callable[[], object]) -> None:
    """Undo `when_forked`. Idempotent."""
    _callbacks.pop(callback, None)


def leave_signals() -> None:
    """In a child: signals that come here are not told to the parent's loop, and SIGTERM ends this process."""
    # They would arrive in a socket that both have.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@cache
def _watch() -> None:
    # For good: Python cannot undo it.
    os.register_at_fork(after_in_child=_tell)


def _tell() -> None:
    callbacks = list(_callbacks)
    _callbacks.clear()
    for callback in callbacks:
        callback()
