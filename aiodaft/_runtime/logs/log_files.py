"""One file per actor."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from io import FileIO
from typing import Any, Final

from aiodaft._runtime.logs.entries import Line, Source, log_record
from aiodaft._runtime.logs.json_lines import JsonFormatter, json_line, json_time
from aiodaft._runtime.platform.error_log import log_error
from aiodaft._runtime.platform.private_file import private

logger = logging.getLogger("aiodaft")

# Files that are kept open. Others are opened for a line.
_MAX_OPEN: Final = 64
_STREAMS: Final = {1: "stdout", 2: "stderr"}
_json: Final = JsonFormatter()
_text: Final = logging.Formatter("%(asctime)s pid=%(process)d %(levelname)s %(name)s: %(text)s")


def json_of(source: Source, entry: Line | Mapping[str, Any], ranks: Sequence[int] = ()) -> str:
    """A line or a record as a JSON object; `ranks`: all that have written the line, if there are several."""
    if not isinstance(entry, Line):
        return _json.format(log_record(entry, source))
    member = source.member
    several: dict[str, Any] = {"ranks": list(ranks)} if len(ranks) > 1 else {}
    rank = {} if several or member is None else {"rank": member.rank}
    what = {"time": json_time(entry.at), "stream": _STREAMS[entry.stream], "message": entry.text}
    where = {"actor": source.shown_name, "node": source.node, "pid": source.pid}
    return json_line({**what, **where, **rank, **several})


class LogFiles:
    """The files of the actors in a folder.

    Raises:
        OSError: The folder cannot be made.
    """

    def __init__(self, folder: str | os.PathLike[str], *, json: bool) -> None:
        self._folder = os.fspath(folder)
        os.makedirs(self._folder, 0o700, exist_ok=True)
        self._json = json
        # Those that were written to last, at the end.
        self._open: dict[str, FileIO] = {}
        # Files of which the last line could not be written, or only in part; and how many lines are missing.
        self._failing: set[str] = set()
        self._torn: set[str] = set()
        self._missing = 0

    def write(self, source: Source, entry: Line | Mapping[str, Any]) -> None:
        """Add a complete line or a record. One that cannot be written is counted and left out."""
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
        """Close all files. Idempotent."""
        while self._open:
            self._open.popitem()[1].close()
        if self._missing:
            self._tell_missing("are closed")


def file_name(actor: str) -> str:
    """The name of an actor's file: without characters that shells expand."""
    plain = actor.replace("[", ".").replace("]", "")
    return re.sub(r"[^\w.@+-]", "_", plain) + ".log"
