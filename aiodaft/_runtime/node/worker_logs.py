"""What workers print: passed on with the actor's name, and the last lines kept as evidence.

A thread of its own reads, so that a busy loop (a notebook hosted actor that computes) stalls no actor that prints.
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

from aiodaft._protocol.printing import MAX_LINE, Printed, Screen
from aiodaft._runtime.platform.sockets import Sockets

_READ_SIZE: Final = 64 << 10
_PIPE_SIZE: Final = 1 << 20
_KEPT_LINES: Final = 20


class WorkerOutput:
    """Standard output and error of one worker."""

    def __init__(self, reading: dict[int, int], screen: Screen) -> None:
        # Changed when actors move in; set before the worker can print.
        self.name = ""
        # Where each stream is read, until the worker has closed it; whoever reads has the lock.
        self._reading = reading
        self._lock = threading.Lock()
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)
        self._printed = {stream: Printed() for stream in reading}
        self._screen = screen
        # What is still to be passed on: a stream, a line, whether it is complete, and whether it is a progress bar.
        self._unwritten: deque[tuple[int, str, bool, bool]] = deque()

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines that were printed on standard error up to now."""
        # The thread may not have come to them yet; what is there is no more than a pipe holds.
        for _ in range(_PIPE_SIZE // _READ_SIZE):
            if not self.read(2):
                break
        return tuple(self._last)

    def read(self, stream: int) -> bytes | None:
        """Take in what was printed: some of it, nothing at the end, None if there is no more yet. Any thread."""
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
        """Print what was taken in; takes as long as whoever reads that."""
        # A program whose own output is gone must not lose its actors over it.
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
        """Read a stream no more."""
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
        # Both streams are one terminal, usually.
        self._screen = Screen()

    def open(self) -> tuple[WorkerOutput, int, int]:
        """Pipes for a new worker: where its output is seen, and the two ends to write to, which the caller closes.

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
        """Pass on what is there; False once the worker has closed its end, and so this one is closed."""
        data = output.read(stream)
        output.pass_on()
        if data == b"":
            self._selector.unregister(fd)
            output.close(stream)
        return data != b""
