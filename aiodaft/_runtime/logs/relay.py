"""The output of actors on its way from a node to the program on another machine that shows it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final

from aiodaft._runtime.logs.console import Console
from aiodaft._runtime.logs.entries import Display, Entry, Life, Source, Written
from aiodaft._runtime.process import Process
from aiodaft.exceptions import DaftError

logger = logging.getLogger("aiodaft")

# Entries that wait for the program at most, and that are sent in one message.
_MAX_WAITING: Final = 20_000
_BATCH: Final = 1_000


class Relay:
    """Sends entries to a program, one batch at a time: entries that it cannot take in time are counted and left out.

    Args:
        send: Sends a batch; done when the program has shown it.
        instead: Shows entries that cannot be sent, because the program is gone.
    """

    def __init__(self, process: Process, send: Callable[[list[Written]], Awaitable[object]], instead: Display) -> None:
        self._process = process
        self._send = send
        self._instead = instead
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Source, Entry]] = deque()
        self._dropped = 0
        self._sending = False
        # Set while nothing waits.
        self._idle = asyncio.Event()
        self._idle.set()

    def write(self, source: Source, entries: Sequence[Entry]) -> None:
        with self._lock:
            for entry in entries:
                if len(self._waiting) < _MAX_WAITING or isinstance(entry, Life):
                    self._waiting.append((source, entry))
                else:
                    self._dropped += 1
        self._process.call_soon(self._begin)

    async def wait_idle(self) -> None:
        """Wait until the program has shown all entries from before this call."""
        self._begin()
        await self._idle.wait()

    def _begin(self) -> None:
        if self._waiting and not self._sending and self._process.closed is None:
            self._sending = True
            self._idle.clear()
            self._process.tasks.create_task(self._send_all(), name="send the output of actors")

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                batch = self._next()
                try:
                    await self._send(batch)
                except DaftError:
                    for source, entries in batch:
                        self._instead.write(source, entries)
        finally:
            self._sending = False
            self._idle.set()

    def _next(self) -> list[Written]:
        with self._lock:
            taken = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
            dropped, self._dropped = self._dropped, 0
        if dropped:
            what = "%d lines of actors were left out: the program that shows them reads too slowly"
            logger.warning(what, dropped)
        return [(source, [entry for _, entry in part]) for source, part in groupby(taken, itemgetter(0))]


class ConsoleThread:
    """Runs a console in a thread of its own, for a program that reads no output of actors itself."""

    def __init__(self, process: Process, console: Console) -> None:
        self._process = process
        self._console = console
        self._thread = process.env.thread("aiodaft logs", process.loop)
        self._timer: asyncio.TimerHandle | None = None

    async def show(self, written: Sequence[Written]) -> None:
        """Show new entries of processes, and those that have waited for long enough."""

        def show() -> bool:
            for source, entries in written:
                self._console.write(source, entries)
            self._console.handle_timer()
            return self._console.get_timer() is not None

        if await self._thread.run(show) and self._timer is None:
            # The clock of the loop need not be that of the console.
            self._timer = self._process.loop.call_later(self._console.window, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._process.closed is None:
            self._process.tasks.create_task(self.show(()), name="show the output of actors")

    async def aclose(self) -> None:
        if self._thread.ident is not None:
            await self._thread.run(self._console.close)
        self.abandon()

    def abandon(self) -> None:
        """The same without a running loop. Blocks."""
        if self._timer is not None:
            self._timer.cancel()
        self._thread.abandon()
        self._console.close()
