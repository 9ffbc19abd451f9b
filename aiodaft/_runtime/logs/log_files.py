"""One file per actor."""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from io import FileIO
from itertools import chain, count
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias

from aiodaft._protocol.diagnostics.printing import member_of
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.logs.options import JsonFormatter, Line, Source, json_line, json_time, log_record
from aiodaft._runtime.platform.tasks import log_error, private

logger = logging.getLogger("aiodaft")

_MAX_OPEN: Final = 64
_STREAMS: Final = {1: "stdout", 2: "stderr"}
_json: Final = JsonFormatter()
_text: Final = logging.Formatter("%(asctime)s pid=%(process)d %(levelname)s %(name)s: %(text)s")


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
            text, name = (_json if self._json else _text).format(record), str(record.__dict__["actor"])
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
_MAX_WAITING: Final = 10_000

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
            if len(self._waiting) < _MAX_WAITING:
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
