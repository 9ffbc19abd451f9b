"""Shows the output and logs of actors: on the terminal, by handlers, in a file per actor; keeps the last of each."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime
from io import FileIO
from itertools import chain, count, groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple, TextIO, TypeAlias

from aiodaft._protocol.diagnostics.printing import Member, Merged, Merging, Screen, member_of, ranks_text
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.logs.options import (
    Display,
    Entry,
    JsonFormatter,
    Life,
    Line,
    Logs,
    Source,
    Written,
    json_line,
    json_time,
    log_record,
)
from aiodaft._runtime.platform.tasks import log_error, private
from aiodaft._runtime.process import Process
from aiodaft.exceptions import DaftError

logger = logging.getLogger("aiodaft")

_MAX_OPEN: Final = 64
_STREAMS: Final = {1: "stdout", 2: "stderr"}
_json: Final = JsonFormatter()
_dated: Final = logging.Formatter("%(asctime)s pid=%(process)d %(levelname)s %(name)s: %(text)s")


def json_of(source: Source, entry: Line | Mapping[str, Any], ranks: Sequence[int] = ()) -> str:
    """A line or a record as a JSON object; `ranks`: all that have written the line."""
    if not isinstance(entry, Line):
        return _json.format(log_record(entry, source))
    member = source.member
    several: dict[str, Any] = {"ranks": list(ranks)} if len(ranks) > 1 else {}
    rank = {} if several or member is None else {"rank": member.rank}
    what = {"time": json_time(entry.at), "stream": _STREAMS[entry.stream], "message": entry.text}
    where = {"actor": source.shown_name, "node": source.node, "pid": source.pid}
    return json_line({**what, **where, **rank, **several})


class LogFiles:
    def __init__(self, folder: str | os.PathLike[str], *, json: bool) -> None:
        self._folder = os.fspath(folder)
        os.makedirs(self._folder, 0o700, exist_ok=True)
        self._json = json
        self._open: dict[str, FileIO] = {}
        # Files of which the last line could not be written, or only in part; and how many lines are missing.
        self._failing: set[str] = set()
        self._torn: set[str] = set()
        self._missing = 0

    def write(self, source: Source, entry: Line | Mapping[str, Any]) -> None:
        if isinstance(entry, Line):
            text, name = self._line(source, entry), source.label
        else:
            record = log_record(entry, source)
            text, name = (_json if self._json else _dated).format(record), str(record.__dict__["actor"])
            name = source.label if "+" in name else name
        name = name if not source.owner else f"{name}@{source.owner}"
        try:
            self._append(name, f"{text}\n".encode("utf-8", "backslashreplace"))
        except OSError as error:
            if not self._failing:
                log_error(
                    "files with the logs of actors cannot be written; lines are left out until they can be", error
                )
            self._failing.add(name)
            self._missing += 1
        else:
            self._failing.discard(name)
            if self._missing and not self._failing:
                self._tell_missing("can be written again")

    def _append(self, name: str, line: bytes) -> None:
        data = b"\n" + line if name in self._torn else line
        if self._file(name).write(data) < len(data):
            self._torn.add(name)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._torn.discard(name)

    def _tell_missing(self, what: str) -> None:
        logger.warning(
            "the log files in %s %s; %d lines of actors are missing there", self._folder, what, self._missing
        )
        self._missing = 0

    def _line(self, source: Source, line: Line) -> str:
        if self._json:
            return json_of(source, line)
        at = datetime.fromtimestamp(line.at)
        time = f"{at:%Y-%m-%d %H:%M:%S},{at.microsecond // 1000:03d}"
        return f"{time} pid={source.pid} {_STREAMS[line.stream]}: {line.text}"

    def _file(self, actor: str) -> FileIO:
        file = self._open.pop(actor, None)
        if file is None:
            while len(self._open) >= _MAX_OPEN:
                self._open.pop(next(iter(self._open))).close()
            path = os.path.join(self._folder, file_name(actor))
            # Without a buffer: a line that does not fit on a full disk must not wait in one.
            file = FileIO(path, "a", opener=private)
        self._open[actor] = file
        return file

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()
        if self._missing:
            self._tell_missing("are closed")


def file_name(actor: str) -> str:
    plain = actor.replace("[", ".").replace("]", "")
    return re.sub(r"[^\w.@+-]", "_", plain) + ".log"


_MAX_OF_PROCESS: Final = 100
_MAX_KEPT: Final = 20_000
_MAX_FOLLOWED: Final = 10_000

Shown: TypeAlias = Line | Mapping[str, Any]


class Said(NamedTuple):
    source: Source
    entry: Shown

    def is_of(self, name: str) -> bool:
        source, entry = self
        actor = None if isinstance(entry, Line) else entry.get("actor")
        names = [str(actor)] if actor else [source.label, *source.names.split("+")]
        members = filter(None, map(member_of, names))
        return name in names or name in {member.group for member in members}

    def as_json(self) -> str:
        return json_of(*self)


class Follower:
    """Gets later entries of actors. Safe in any thread."""

    def __init__(self, on_news: Callable[[], object]) -> None:
        self._on_news = on_news
        self._lock = threading.Lock()
        self._waiting: list[Said] = []
        self._dropped = 0

    def add(self, said: Said) -> None:
        with self._lock:
            if len(self._waiting) < _MAX_FOLLOWED:
                self._waiting.append(said)
            else:
                self._dropped += 1
            if len(self._waiting) == 1:
                self._on_news()

    def take(self) -> tuple[list[Said], int]:
        with self._lock:
            taken, self._waiting = self._waiting, []
            dropped, self._dropped = self._dropped, 0
        return taken, dropped


class Recent:
    """The last entries of the actors of a program. Safe in any thread."""

    def __init__(self) -> None:
        # By process, with the order in which they came; the process that has written last is the last one.
        self._kept: OrderedDict[PeerId, deque[tuple[int, Said]]] = OrderedDict()
        self._numbers = count()
        self._count = 0
        self._followers: list[Follower] = []
        self._lock = threading.Lock()

    def add(self, said: Said) -> None:
        process = said.source.process
        with self._lock:
            kept = self._kept.setdefault(process, deque(maxlen=_MAX_OF_PROCESS))
            self._kept.move_to_end(process)
            self._count += len(kept) < _MAX_OF_PROCESS
            kept.append((next(self._numbers), said))
            if self._count > _MAX_KEPT:
                _, silent = self._kept.popitem(last=False)
                self._count -= len(silent)
            for follower in self._followers:
                follower.add(said)

    def after(self, number: int, most: int) -> list[tuple[int, Said]]:
        """-1 is before all."""
        found: list[tuple[int, Said]] = []
        with self._lock:
            for kept in reversed(self._kept.values()):
                if kept[-1][0] <= number:
                    # Neither have the others written since.
                    break
                found += [entry for entry in kept if entry[0] > number]
        return sorted(found, key=itemgetter(0))[-most:]

    def follow(self, on_news: Callable[[], object]) -> tuple[list[Said], Follower]:
        """The entries that are kept, in order, and a follower of all later ones; `on_news`: called in any thread."""
        follower = Follower(on_news)
        with self._lock:
            self._followers.append(follower)
            kept = sorted(chain.from_iterable(self._kept.values()), key=itemgetter(0))
        return [said for _, said in kept], follower

    def leave(self, follower: Follower) -> None:
        with self._lock:
            self._followers.remove(follower)


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


_text: Final = logging.Formatter("%(levelname)s:%(name)s:%(text)s")


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
