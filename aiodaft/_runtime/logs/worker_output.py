"""Sends and reads the output and the log records of workers, and keeps the last lines of each for exit reports.

A thread reads them, so that a busy loop, as in a notebook cell that computes, stalls no actor that prints.
"""

from __future__ import annotations

import fcntl
import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from typing import Any, Final

from aiodaft._protocol.diagnostics.printing import MAX_LINE, Printed, Sieve, cut, frames_of
from aiodaft._runtime.logs.console import Console
from aiodaft._runtime.logs.options import STANDARD, Display, Entry, Levels, Life, Line, Source, set_levels
from aiodaft._runtime.platform.capabilities import Sockets
from aiodaft_transport.system import start_thread

_READ_SIZE: Final = 64 << 10
_PIPE_SIZE: Final = 1 << 20
_KEPT_LINES: Final = 20


class WorkerOutput:
    def __init__(self, reading: dict[int, int], source: Source, display: Display) -> None:
        self._source = source
        # The descriptor of each stream until the worker closes it.
        self._reading = reading
        self._lock = threading.Lock()
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)
        self._printed = {stream: Printed() for stream in reading}
        self._sieve = Sieve()
        self._display = display
        self._unwritten: deque[Entry] = deque([Life(begins=True)])
        self._passing = threading.Lock()

    def rename(self, names: str, pid: int) -> None:
        self._source = self._source._replace(names=names, pid=pid)

    @property
    def last_lines(self) -> tuple[str, ...]:
        self.catch_up()
        return tuple(self._last)

    def catch_up(self) -> None:
        for stream in (1, 2):
            for _ in range(_PIPE_SIZE // _READ_SIZE):
                if not self.read(stream):
                    break

    def read(self, stream: int) -> bytes | None:
        with self._lock:
            if stream not in self._reading:
                return b""
            try:
                data = os.read(self._reading[stream], _READ_SIZE)
            except BlockingIOError:
                return None
            if stream == 2:
                for part in self._sieve.take(data):
                    if isinstance(part, bytes):
                        self._take(stream, part)
                    else:
                        self._take_record(part)
                if not data:
                    self._take(stream, data)
            else:
                self._take(stream, data)
            printed = self._printed[stream]
            if printed.line:
                self._unwritten.append(Line(stream, printed.line, time.time(), complete=False, is_bar=printed.is_bar))
            return data

    def _take(self, stream: int, data: bytes) -> None:
        lines = self._printed[stream].take(data)
        if stream == 2:
            self._last.extend(line[:MAX_LINE] for line in lines)
        self._unwritten.extend(Line(stream, line, time.time()) for line in lines)

    def _take_record(self, record: Mapping[str, Any]) -> None:
        if not {"name", "levelno", "levelname", "text", "exc_text"} <= record.keys():
            return
        said = f"{record['levelname']}:{record['name']}:{record['text']}\n{record['exc_text'] or ''}"
        self._last.extend(line[:MAX_LINE] for line in said.rstrip("\n").split("\n"))
        self._unwritten.append(record)

    def pass_on(self) -> None:
        with self._passing:
            entries: list[Entry] = []
            with suppress(IndexError):
                while True:
                    entries.append(self._unwritten.popleft())
            if entries:
                self._display.write(self._source, entries)

    def close(self, stream: int) -> None:
        with self._lock:
            os.close(self._reading.pop(stream))
            if not self._reading:
                self._unwritten.append(Life(begins=False))


class OutputReader:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_end = socket.socketpair()
        self._wakeup.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._thread: threading.Thread | None = None
        self._closing = False
        self._lock = threading.Lock()
        self._new: list[tuple[int, tuple[WorkerOutput, int]]] = []

    def open(self, source: Source, display: Display | None = None) -> tuple[WorkerOutput, int, int]:
        """Pipes for a new worker: its output, and the two ends to write to, which the caller closes.

        Raises:
            OSError: There are no descriptors left, or there is no thread to read them.
        """
        if self._thread is None:
            self._thread = start_thread(self._read_all, name="aiodaft logs")
        reading: dict[int, int] = {}
        ends: list[int] = []
        for stream in (1, 2):
            try:
                reading[stream], writing = os.pipe()
            except OSError:
                Sockets().close_all([*reading.values(), *ends])
                raise
            with suppress(OSError, AttributeError):
                fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
            os.set_blocking(reading[stream], False)
            ends.append(writing)
        output = WorkerOutput(reading, source, display or self._console)
        with self._lock:
            self._new += [(fd, (output, stream)) for stream, fd in reading.items()]
        self._wakeup_end.send(b"\0")
        return output, ends[0], ends[1]

    def close(self) -> None:
        self._closing = True
        if self._thread is not None:
            self._wakeup_end.send(b"\0")
            self._thread.join()
            self._thread = None
        else:
            self._selector.close()
        self._wakeup.close()
        self._wakeup_end.close()
        self._console.close()

    def _read_all(self) -> None:
        while True:
            due = self._console.get_timer()
            ready = self._selector.select(None if due is None else max(0.0, due - time.monotonic()))
            if any(key.fileobj is self._wakeup for key, _ in ready):
                self._wakeup.recv(4096)
                self._take_new()
                ready = self._selector.select(0)
            for key, _ in ready:
                if key.data is not None:
                    self._read(key.fd, *key.data)
            self._console.handle_timer()
            if self._closing:
                break
        self._take_new()
        for key in list(self._selector.get_map().values()):
            if key.data is not None and self._read(key.fd, *key.data):
                output, stream = key.data
                output.close(stream)
        self._selector.close()

    def _take_new(self) -> None:
        with self._lock:
            new, self._new = self._new, []
        for fd, data in new:
            self._selector.register(fd, selectors.EVENT_READ, data)
            output, _ = data
            # The ranks of a group are known before one of them prints.
            output.pass_on()

    def _read(self, fd: int, output: WorkerOutput, stream: int) -> bool:
        data = output.read(stream)
        if data == b"":
            self._selector.unregister(fd)
            output.close(stream)
        output.pass_on()
        return data != b""


logger = logging.getLogger("aiodaft")

_SENT: Final = (
    "name", "levelno", "levelname", "pathname", "filename", "module", "lineno", "funcName", "created", "msecs",
    "thread", "threadName", "process", "stack_info",
)  # fmt: skip
_MAX_TEXT: Final = 16 << 10
_MAX_EXTRAS: Final = 32
_formatter: Final = logging.Formatter()

Who = Callable[[], Mapping[str, Any]]


# A record is written at once, so a process that is killed loses none. It is never waited for: if the program reads too
# slowly, records are counted and left out.
class RecordSender(logging.Handler):
    """Writes records as frames into the standard error of this process, through a descriptor that does not block.

    Args:
        who: Called for each record; gives further attributes.
    """

    def __init__(self, fd: int, who: Who) -> None:
        super().__init__()
        self._fd = fd
        self._who = who
        self._number = 0
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

    Users call the same function: those call it from within the module `logging`.
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
