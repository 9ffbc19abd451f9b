"""The output of workers: printed with the actor's name, and its last lines kept for exit reports.

A thread reads it, so that a busy loop, as in a notebook cell that computes, stalls no actor that prints.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import socket
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from typing import Final

from aiodaft._protocol.diagnostics.printing import MAX_LINE, Printed, Screen
from aiodaft._runtime.platform.sockets import Sockets

_READ_SIZE: Final = 64 << 10
_PIPE_SIZE: Final = 1 << 20
_KEPT_LINES: Final = 20


class WorkerOutput:
    """Standard output and error of one worker."""

    def __init__(self, reading: dict[int, int], screen: Screen) -> None:
        # Set before the worker can print, and changed when an actor is added.
        self.name = ""
        # The descriptor of each stream until the worker closes it; reading needs the lock.
        self._reading = reading
        self._lock = threading.Lock()
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)
        self._printed = {stream: Printed() for stream in reading}
        self._screen = screen
        # Lines to be printed: the stream, the line, whether it is complete, and whether it is a progress bar.
        self._unwritten: deque[tuple[int, str, bool, bool]] = deque()

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines on standard error up to now."""
        # The thread may be behind, by at most the size of the pipe.
        for _ in range(_PIPE_SIZE // _READ_SIZE):
            if not self.read(2):
                break
        return tuple(self._last)

    def read(self, stream: int) -> bytes | None:
        """Read a part of a stream: empty at its end, None if there is nothing yet. Any thread."""
        with self._lock:
            if stream not in self._reading:
                return b""
            try:
                data = os.read(self._reading[stream], _READ_SIZE)
            except BlockingIOError:
                return None
            printed = self._printed[stream]
            lines = printed.take(data)
            if stream == 2:
                self._last.extend(line[:MAX_LINE] for line in lines)
            self._unwritten.extend((stream, line, True, False) for line in lines)
            if printed.line:
                self._unwritten.append((stream, printed.line, False, printed.is_bar))
            return data

    def pass_on(self) -> None:
        """Print the lines that were read; blocks while the reader of this process's output is slow."""
        # Without an output of its own, the program goes on.
        with suppress(OSError, ValueError, AttributeError):
            for stream, texts in groupby(self._shown(), itemgetter(0)):
                target = sys.stdout if stream == 1 else sys.stderr
                target.write("".join(text for _, text in texts))
                target.flush()

    def _shown(self) -> Iterator[tuple[int, str]]:
        while self._unwritten:
            stream, line, complete, is_bar = self._unwritten.popleft()
            line = f"({self.name}) {line}"
            yield from self._screen.show((self, stream), stream, line, complete=complete, is_bar=is_bar)

    def close(self, stream: int) -> None:
        """Stop reading a stream."""
        with self._lock:
            os.close(self._reading.pop(stream))


class LogPump:
    """Reads the output of all workers of one node."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_end = socket.socketpair()
        self._wakeup.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._thread: threading.Thread | None = None
        self._closing = False
        self._lock = threading.Lock()
        self._new: list[tuple[int, tuple[WorkerOutput, int]]] = []
        # One for both streams, which usually are one terminal.
        self._screen = Screen()

    def open(self) -> tuple[WorkerOutput, int, int]:
        """Pipes for a new worker: its output, and the two ends to write to, which the caller closes.

        Raises:
            OSError: There are no descriptors left.
        """
        reading: dict[int, int] = {}
        ends: list[int] = []
        for stream in (1, 2):
            try:
                reading[stream], writing = os.pipe2(os.O_CLOEXEC)
            except OSError:
                Sockets().close_all([*reading.values(), *ends])
                raise
            with suppress(OSError):
                fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
            os.set_blocking(reading[stream], False)
            ends.append(writing)
        output = WorkerOutput(reading, self._screen)
        with self._lock:
            self._new += [(fd, (output, stream)) for stream, fd in reading.items()]
        if self._thread is None:
            self._thread = threading.Thread(target=self._pump, name="aiodaft logs", daemon=True)
            self._thread.start()
        self._wakeup_end.send(b"\0")
        return output, ends[0], ends[1]

    def close(self) -> None:
        """Print what is there and end the thread."""
        self._closing = True
        if self._thread is not None:
            self._wakeup_end.send(b"\0")
            self._thread.join()
            self._thread = None
        else:
            self._selector.close()
        self._wakeup.close()
        self._wakeup_end.close()

    def _pump(self) -> None:
        while True:
            ready = self._selector.select()
            if any(key.fileobj is self._wakeup for key, _ in ready):
                self._wakeup.recv(4096)
                self._take_new()
                ready = self._selector.select(0)
            for key, _ in ready:
                if key.data is not None:
                    self._read(key.fd, *key.data)
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

    def _read(self, fd: int, output: WorkerOutput, stream: int) -> bool:
        """Print what is there; False if the worker has closed its end."""
        data = output.read(stream)
        output.pass_on()
        if data == b"":
            self._selector.unregister(fd)
            output.close(stream)
        return data != b""
