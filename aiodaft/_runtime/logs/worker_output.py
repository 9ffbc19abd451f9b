"""Reads the output and the log records of workers, and keeps the last lines of each for exit reports.

A thread reads them, so that a busy loop, as in a notebook cell that computes, stalls no actor that prints.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from aiodaft._protocol.diagnostics.printing import MAX_LINE, Printed, Sieve
from aiodaft._runtime.logs.console import Console
from aiodaft._runtime.logs.entries import Display, Entry, Life, Line, Source
from aiodaft._runtime.platform.capabilities import Sockets
from aiodaft_transport.system import start_thread

_READ_SIZE: Final = 64 << 10
_PIPE_SIZE: Final = 1 << 20
_KEPT_LINES: Final = 20


class WorkerOutput:
    """Standard output and error of one worker."""

    def __init__(self, reading: dict[int, int], source: Source, display: Display) -> None:
        self._source = source
        # The descriptor of each stream until the worker closes it; reading needs the lock.
        self._reading = reading
        self._lock = threading.Lock()
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)
        self._printed = {stream: Printed() for stream in reading}
        self._sieve = Sieve()
        self._display = display
        self._unwritten: deque[Entry] = deque([Life(begins=True)])
        # Keeps the order of lines that several threads pass on.
        self._passing = threading.Lock()

    def rename(self, names: str, pid: int) -> None:
        self._source = self._source._replace(names=names, pid=pid)

    @property
    def last_lines(self) -> tuple[str, ...]:
        self.catch_up()
        return tuple(self._last)

    def catch_up(self) -> None:
        """Read the available output: the thread may be behind, by at most the size of the pipe."""
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

        Args:
            display: Shows its output. Default: the console.

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
            # Pipes that cannot have this size keep their own.
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
