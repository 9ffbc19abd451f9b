"""What workers print: passed on line by line with the actor's name, and the last lines kept as evidence.

A thread of its own reads, so that a busy loop (a notebook cell that computes) stalls no actor that prints.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import socket
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import Final

_READ_SIZE: Final = 64 << 10
_PIPE_SIZE: Final = 1 << 20
_KEPT_LINES: Final = 20
_MAX_LINE: Final = 4 << 10


class WorkerOutput:
    """Standard output and error of one worker."""

    def __init__(self) -> None:
        # Changed when actors move in; set before the worker can print.
        self.name = ""
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)
        self._partial = {1: b"", 2: b""}
        self.closed = threading.Event()
        self._open_streams = 2

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines on standard error."""
        return tuple(self._last)

    def feed(self, stream: int, data: bytes) -> None:
        """The worker printed something."""
        *lines, rest = (self._partial[stream] + data).split(b"\n")
        if len(rest) > _MAX_LINE:
            lines.append(rest)
            rest = b""
        self._partial[stream] = rest
        self._emit(stream, lines)

    def finish(self, stream: int) -> None:
        """The worker closed a stream, most likely by ending."""
        rest, self._partial[stream] = self._partial[stream], b""
        self._emit(stream, [rest] if rest else [])
        self._open_streams -= 1
        if not self._open_streams:
            self.closed.set()

    def _emit(self, stream: int, lines: list[bytes]) -> None:
        texts = [line.decode("utf-8", "backslashreplace").rstrip("\r") for line in lines]
        if stream == 2:
            self._last.extend(text[:_MAX_LINE] for text in texts)
        target = sys.stdout if stream == 1 else sys.stderr
        # A program whose own output is gone must not lose its actors over it.
        with suppress(OSError, ValueError, AttributeError):
            target.write("".join(f"({self.name}) {text}\n" for text in texts))
            target.flush()


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

    def open(self) -> tuple[WorkerOutput, int, int]:
        """Pipes for a new worker: where its output is seen, and the two ends to write to, which the caller closes."""
        output = WorkerOutput()
        ends: list[int] = []
        for stream in (1, 2):
            reading, writing = os.pipe2(os.O_CLOEXEC)
            with suppress(OSError):
                fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
            os.set_blocking(reading, False)
            ends.append(writing)
            with self._lock:
                self._new.append((reading, (output, stream)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._pump, name="aiodaft logs", daemon=True)
            self._thread.start()
        self._wakeup_end.send(b"\0")
        return output, ends[0], ends[1]

    def close(self) -> None:
        """Pass on what is there and stop reading. Blocks until that is done, which takes no time."""
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
        for key in list(self._selector.get_map().values()):
            if key.data is not None and self._read(key.fd, *key.data):
                os.close(key.fd)
        self._selector.close()

    def _take_new(self) -> None:
        with self._lock:
            new, self._new = self._new, []
        for fd, data in new:
            self._selector.register(fd, selectors.EVENT_READ, data)

    def _read(self, fd: int, output: WorkerOutput, stream: int) -> bool:
        """Pass on what is there; False once the worker has closed its end, and so this one is closed."""
        try:
            data = os.read(fd, _READ_SIZE)
        except BlockingIOError:
            return True
        if data:
            output.feed(stream, data)
            return True
        output.finish(stream)
        self._selector.unregister(fd)
        os.close(fd)
        return False
