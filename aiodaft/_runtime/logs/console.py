"""Shows the output and logs of actors: on the terminal of the program, by its handlers, and in a file per actor."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, TextIO

from aiodaft._protocol.diagnostics.printing import Member, Merged, Merging, Screen, member_of, ranks_text
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.logs.log_files import LogFiles, Recent, Said, json_of
from aiodaft._runtime.logs.options import Display, Entry, JsonFormatter, Life, Line, Logs, Source, Written, log_record
from aiodaft._runtime.platform.tasks import log_error
from aiodaft._runtime.process import Process
from aiodaft.exceptions import DaftError


def own_bars_are_shown() -> bool:
    bars = _bars()
    if bars is None:
        return False
    with bars.get_lock():
        return any(bar.fp in (sys.stdout, sys.stderr) for bar in bars._instances)


def aside_from_bars(target: TextIO) -> AbstractContextManager[object]:
    bars = _bars()
    return nullcontext() if bars is None else bars.external_write_mode(target)


def _bars() -> Any:
    """None: there are no bars. The first bar makes the lock of all, which starts a process from Python 3.14 on."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return bars if bars is not None and bars._instances else None


logger = logging.getLogger("aiodaft")

_text: Final = logging.Formatter("%(levelname)s:%(name)s:%(text)s")
_json: Final = JsonFormatter()


class Console:
    """The sink of the output and the records of actors. Safe in any thread; blocks while the terminal does.

    Lines of members of groups may have to wait for those of others: call `handle_timer` when `get_timer` says so.
    """

    def __init__(self, options: Logs) -> None:
        self.window = options.merge
        self.recent = Recent()
        self._json = options.json
        self._files = None if options.folder is None else LogFiles(options.folder, json=options.json)
        self._merging = Merging(options.merge, self._show_merged)
        self._screen = Screen()
        self._partial: set[tuple[PeerId, int]] = set()
        self._texts: list[tuple[int, str]] = []
        self._lock = threading.Lock()

    def write(self, source: Source, entries: Sequence[Entry]) -> None:
        with self._lock:
            for entry in entries:
                self._take(source, entry)
            self._print()

    def get_timer(self) -> float | None:
        return self._merging.get_timer()

    def handle_timer(self) -> None:
        with self._lock:
            self._merging.handle_timer(time.monotonic())
            self._print()

    def close(self) -> None:
        with self._lock:
            self._merging.flush()
            self._print()
            if self._files is not None:
                self._files.close()

    def _take(self, source: Source, entry: Entry) -> None:
        if isinstance(entry, Life):
            member = source.member
            if member is not None:
                (self._merging.join if entry.begins else self._merging.leave)(member)
            self._partial -= {(source.process, 1), (source.process, 2)}
            return
        if not isinstance(entry, Line) or entry.complete:
            self.recent.add(Said(source, entry))
            if self._files is not None:
                self._files.write(source, entry)
        if isinstance(entry, Line):
            self._take_line(source, entry)
            return
        if entry.get("dropped"):
            what = "%d log records of %s were left out: it logs faster than this program reads"
            logger.warning(what, entry["dropped"], source.title)
        key = entry["name"], entry["levelno"], entry["text"], entry["exc_text"]
        self._merge(member_of(str(entry.get("actor"))) or source.member, 2, key, source, entry)

    def _take_line(self, source: Source, line: Line) -> None:
        if self._json and not line.complete:
            return
        where, member = (source.process, line.stream), source.member
        if line.complete and where not in self._partial:
            self._merge(member, line.stream, line.text, source, line)
            return
        (self._partial.discard if line.complete else self._partial.add)(where)
        if member is not None:
            self._merging.flush(member.group)
        self._show(source, line, source.title)

    def _merge(self, member: Member | None, stream: int, key: Hashable, source: Source, entry: Entry) -> None:
        if member is None or not self.window:
            self._show_merged(Merged((source, entry), "", ()))
        else:
            self._merging.take(member, stream, key, (source, entry), time.monotonic())

    def _show_merged(self, merged: Merged[tuple[Source, Entry]]) -> None:
        (source, entry), group, ranks = merged
        several = "" if len(ranks) < 2 else f"{group} x{len(ranks)} ranks {ranks_text(ranks)}"
        if isinstance(entry, Line):
            named = source._replace(names=group) if several else source
            self._show(named, entry, several or source.title, ranks)
        elif isinstance(entry, Mapping):
            record = log_record(entry, source)
            if several:
                record.msg = f"({several}) {entry['text']}"
                record.__dict__.update(actor=group, rank=None, ranks=list(ranks))
            self._log(record, source, several or f"{record.__dict__['actor']} pid={record.process}")

    def _show(self, source: Source, line: Line, title: str, ranks: Sequence[int] = ()) -> None:
        if self._json:
            self._texts.append((line.stream, json_of(source, line, ranks) + "\n"))
            return
        text, stream = f"({title}) {line.text}", line.stream
        if line.complete or not own_bars_are_shown():
            self._write_line((source.process, stream), stream, text, complete=line.complete, is_bar=line.is_bar)

    def _write_line(
        self, writer: Hashable, stream: int, text: str, *, complete: bool = True, is_bar: bool = False
    ) -> None:
        self._texts += self._screen.show(writer, stream, text, time.monotonic(), complete=complete, is_bar=is_bar)

    def _log(self, record: logging.LogRecord, source: Source, title: str) -> None:
        target = logging.getLogger(record.name)
        if not target.isEnabledFor(record.levelno):
            return
        if target.hasHandlers():
            self._texts += self._screen.leave()
            self._print()
            try:
                target.handle(record)
            except Exception as error:  # noqa: BLE001 - a filter of the program may raise anything
                log_error("a log record of an actor could not be handled", error)
        elif self._json:
            self._texts.append((2, _json.format(record) + "\n"))
        else:
            for text in _text.format(record).split("\n"):
                self._write_line((source.process, "records"), 2, f"({title}) {text}")

    def _print(self) -> None:
        # Without an output of its own, the program goes on.
        texts, self._texts = self._texts, []
        with suppress(OSError, ValueError, AttributeError):
            for stream, parts in groupby(texts, itemgetter(0)):
                target, text = (sys.stdout if stream == 1 else sys.stderr), "".join(text for _, text in parts)
                encoding = target.encoding or "utf-8"
                with aside_from_bars(target):
                    target.write(text.encode(encoding, "backslashreplace").decode(encoding))
                    target.flush()


_MAX_WAITING: Final = 20_000
_BATCH: Final = 1_000


class Relay:
    """Sends entries to a program, one batch at a time; those that it cannot take in time are counted and left out."""

    def __init__(self, process: Process, send: Callable[[list[Written]], Awaitable[object]], instead: Display) -> None:
        self._process = process
        self._send = send
        self._instead = instead
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Source, Entry]] = deque()
        self._dropped = 0
        self._sending = False
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
    def __init__(self, process: Process, console: Console) -> None:
        self._process = process
        self._console = console
        self._thread = process.env.thread("aiodaft logs", process.loop)
        self._timer: asyncio.TimerHandle | None = None

    async def show(self, written: Sequence[Written]) -> None:
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
        if self._timer is not None:
            self._timer.cancel()
        self._thread.abandon()
        self._console.close()
