"""Hooks for forked children of this process, to which its loops, connections and signal handlers do not belong.

A signal that reaches a child before it has left the parent's signal handling goes to the parent instead: the handler in
C writes it to the wakeup socket of the loop, which both processes have, and the child forgets it. So a process with a
loop that handles signals blocks all signals of the forking thread, from before the fork until the child has left the
handling (in the child) or the fork is over (in the parent). `subprocess` runs these hooks only with a `preexec_fn`;
without one it uses vfork and blocks signals itself.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, Final

_callbacks: Final[dict[Callable[[], object], None]] = {}


class _Masks(threading.local):
    """The signals that the current thread blocked before each fork under way."""

    def __init__(self) -> None:
        self.before: list[set[int]] = []


_masks: Final = _Masks()


def when_forked(callback: Callable[[], object]) -> None:
    _watch()
    _callbacks[callback] = None


def no_more(callback: Callable[[], object]) -> None:
    _callbacks.pop(callback, None)


def leave_signals() -> None:
    """In a child: leave the signal handling of the parent's loop, and let SIGTERM end this process."""
    # Parent and child share the socket.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@cache
def _watch() -> None:
    # For good: Python cannot undo it.
    os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_tell)


def _block_signals() -> None:
    # A call of its own: a handler may raise out of the second one, and the mask has changed by then.
    _masks.before.append({*signal.pthread_sigmask(signal.SIG_BLOCK, ())})
    if leave_signals in _callbacks:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _unblock_signals() -> None:
    # Empty if a handler raised before anything was blocked.
    if _masks.before:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before.pop())


def _tell() -> None:
    callbacks = list(_callbacks)
    _callbacks.clear()
    try:
        for callback in callbacks:
            callback()
    finally:
        _unblock_signals()


# The class of all files. `io.IOBase` is an abstract class, which those in C are registered with.
_FILE: Final = io.IOBase.__mro__[1]


def finish() -> None:
    with suppress(BaseException):
        _keep_operators()
        atexit._run_exitfuncs()  # as multiprocessing does
    files: list[Any] = [found for found in gc.get_objects() if issubclass(type(found), _FILE)]
    _flush(files)
    # Those in Python, such as of gzip, write an end to the file below them.
    for file in files:
        if type(file).__module__ != "_io":
            with suppress(Exception):
                file.close()
    _flush(files)


def _keep_operators() -> None:
    """Have torch not withdraw its operators from itself: they end with the process, and that takes it 30 ms."""
    finalizers: dict[weakref.finalize[..., Any], Any] = weakref.finalize._registry  # type: ignore[attr-defined]  # private
    for finalizer, info in list(finalizers.items()):
        if getattr(info.func, "__module__", None) == "torch.library":
            finalizer.atexit = False


def _flush(files: list[Any]) -> None:
    for file in files:
        with suppress(Exception):
            file.flush()
