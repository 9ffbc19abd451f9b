"""Sends the log records of an actor's process to the program that it belongs to, over its standard error.

A record is written at once, so a process that is killed loses none. It is never waited for: if the program reads too
slowly, records are counted and left out.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final

from aiodaft._protocol.diagnostics.printing import cut, frames_of
from aiodaft._runtime.logs.options import STANDARD, Levels, set_levels

logger = logging.getLogger("aiodaft")

# The parts of a record that the program gets, besides its text and its `extra`.
_SENT: Final = (
    "name", "levelno", "levelname", "pathname", "filename", "module", "lineno", "funcName", "created", "msecs",
    "thread", "threadName", "process", "stack_info",
)  # fmt: skip
_MAX_TEXT: Final = 16 << 10
_MAX_EXTRAS: Final = 32
_formatter: Final = logging.Formatter()

# Says whose records these are: the actor that the running code belongs to, and so on.
Who = Callable[[], Mapping[str, Any]]


class RecordSender(logging.Handler):
    """Writes records as frames into the standard error of this process, and never waits.

    Args:
        fd: A descriptor of standard error that does not block.
        who: Called for each record; gives further attributes.
    """

    def __init__(self, fd: int, who: Who) -> None:
        super().__init__()
        self._fd = fd
        self._who = who
        self._number = 0
        # Records for which there was no room since the last one that was sent.
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        if any(map(_prints, logging.root.handlers)):
            # The actor has configured its logging, and the program sees what that prints.
            return
        try:
            sent = _plain(record, self._who())
            if self._dropped:
                sent["dropped"] = self._dropped
            self._number += 1
            frames = frames_of(sent, record.process or 0, self._number)
        except Exception:  # noqa: BLE001 - as all handlers do
            self.handleError(record)
            return
        try:
            for frame in frames:
                os.write(self._fd, frame)
        except BlockingIOError:
            self._dropped += 1
        except OSError:
            # The program is gone, and so is this process soon.
            pass
        else:
            self._dropped = 0


def _prints(handler: logging.Handler) -> bool:
    streams = sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__
    return isinstance(handler, logging.StreamHandler) and any(handler.stream is stream for stream in streams)


def _plain(record: logging.LogRecord, who: Mapping[str, Any]) -> dict[str, Any]:
    extras = [(name, value) for name, value in record.__dict__.items() if name not in STANDARD]
    sent = {
        name: _text(value) if isinstance(value, str) else value
        for name, value in extras[:_MAX_EXTRAS]
        if isinstance(value, str | int | float | None)
    }
    sent.update((name, getattr(record, name, None)) for name in _SENT)
    sent["text"] = _text(record.getMessage().rstrip("\n"))
    trace = record.exc_text or (_formatter.formatException(record.exc_info) if record.exc_info else None)
    sent["exc_text"] = trace and _text(trace)
    sent.update(who)
    return sent


def _text(text: str) -> str:
    return cut(text, _MAX_TEXT).encode("utf-8", "backslashreplace").decode()


def send_records(levels: Levels, who: Who) -> None:
    """In a new process of actors: send logs, warnings and errors that no code catches to the program.

    The handler belongs to a parent of the root logger, so that the root logger has none: `logging.basicConfig` works in
    an actor as in any program.
    """
    root = logging.root
    # Those of modules that the fork server has loaded: they are at the root of the program, too.
    root.handlers.clear()
    program = logging.Logger("the program of this actor")
    program.addHandler(RecordSender(_open_stderr(), who))
    root.parent = program
    _configure_at_wish_only()
    set_levels(levels)
    logging.captureWarnings(capture=True)
    sys.unraisablehook = _log_unraisable
    threading.excepthook = _log_thread_error


def _configure_at_wish_only() -> None:
    """Have `logging.info` and the like not configure the root logger, as they do where it has no handler.

    They and users call the same function of the module `logging`: they alone from within it.
    """
    configure = logging.basicConfig

    @wraps(configure)
    def configure_if_wished(**options: Any) -> None:
        if sys._getframe(1).f_globals is not vars(logging):
            configure(**options)

    logging.basicConfig = configure_if_wished


def _open_stderr() -> int:
    try:
        # Not a duplicate, which would make all writes to standard error non-blocking.
        return os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return os.dup(2)


def _log_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    error = unraisable.exc_value
    info = None if error is None else (unraisable.exc_type, error, unraisable.exc_traceback)
    logger.error("%s: %r", unraisable.err_msg or "exception ignored in", unraisable.object, exc_info=info)


def _log_thread_error(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is None or issubclass(args.exc_type, SystemExit):
        return
    name = args.thread.name if args.thread is not None else "a thread"
    logger.error(
        "the thread %r ended with an error", name, exc_info=(args.exc_type, args.exc_value, args.exc_traceback)
    )
