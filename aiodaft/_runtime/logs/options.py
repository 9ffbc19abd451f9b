"""The output and the log records of actors, and their way to a display: `Runtime(logs=...)`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from aiodaft._protocol.diagnostics.printing import Member, member_of
from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.numbers import is_number
from aiodaft._runtime.platform.tasks import current_terms, trace_of


class Source(NamedTuple):
    """A process that writes; `owner`: the process of the actor that owns its actors."""

    process: PeerId
    label: str
    names: str = ""
    pid: int = 0
    node: str = ""
    owner: str = ""

    @property
    def shown_name(self) -> str:
        return self.names or self.label

    @property
    def title(self) -> str:
        return f"{self.shown_name} pid={self.pid}"

    @property
    def member(self) -> Member | None:
        return member_of(self.shown_name)


class Line(NamedTuple):
    """A line of standard output (1) or standard error (2), as it looks now; `at`: seconds since the epoch."""

    stream: int
    text: str
    at: float
    complete: bool = True
    is_bar: bool = False


class Life(NamedTuple):
    begins: bool


Entry: TypeAlias = Line | Life | Mapping[str, Any]
Written: TypeAlias = tuple[Source, Sequence[Entry]]


class Display(Protocol):
    def write(self, source: Source, entries: Sequence[Entry]) -> None: ...


def log_record(sent: Mapping[str, Any], source: Source) -> logging.LogRecord:
    actor = sent.get("actor") or source.shown_name
    found = member_of(actor)
    record = logging.makeLogRecord({
        "method": None,
        "rank": None if found is None else found.rank,
        "node": source.node,
        "processName": actor,
        **sent,
        "actor": actor,
    })
    record.msg = f"({actor} pid={record.process}) {sent['text']}"
    return record


@dataclass(frozen=True, slots=True)
class Logs:
    """Options for the output and the log records of actors, which a runtime always shows.

    Args:
        folder: A folder for a file per actor, with the time before each line. It has the name of the actor, such as
            `Model-1.log`, or `Trainer-1.3.log` for rank 3; a restarted actor goes on writing to its file. The folder is
            on the machine of the program, also for actors on other machines.
        json: Whether each line that aiodaft writes, to the terminal and to these files, is a JSON object. Give
            `JsonFormatter` to handlers of your own, to have the same there.
        merge: Seconds that a line of a member of a group waits for the other ranks to write the same. Then it is shown
            once, with the ranks. 0 shows each line at once.

    Raises:
        ValueError: `merge` is negative, or no number.
    """

    folder: str | os.PathLike[str] | None = None
    json: bool = False
    merge: float = 0.2

    def __post_init__(self) -> None:
        if not is_number(self.merge):
            raise ValueError(f"merge={self.merge!r}: seconds are needed, or 0 to show each line at once")


Levels: TypeAlias = Mapping[str, int]


def levels_here() -> dict[str, int]:
    # A copy: any thread may make loggers.
    loggers = list(logging.root.manager.loggerDict.items())
    levels = {name: one.level for name, one in loggers if isinstance(one, logging.Logger) and one.level}
    return {"": logging.root.level, **levels}


def changes(before: Levels, now: Levels) -> dict[str, int]:
    removed = dict.fromkeys(before.keys() - now.keys(), logging.NOTSET)
    return {**removed, **{name: level for name, level in now.items() if before.get(name) != level}}


def set_levels(levels: Levels) -> None:
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


class LevelWatch:
    """Notices that the program has changed levels, which `logging` tells nobody."""

    def __init__(self, on_change: Callable[[dict[str, int]], object]) -> None:
        self._on_change = on_change
        self._known = levels_here()

    def look(self) -> None:
        now = levels_here()
        if now != self._known:
            changed, self._known = changes(self._known, now), now
            self._on_change(changed)


STANDARD: Final = {*logging.makeLogRecord({}).__dict__, "message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formats a record, of an actor or of the program, as one line with a JSON object.

    It has `time` (UTC), `level`, `logger`, `message`, `pid`, `thread`, `file`, `line` and `function`; of an error
    `error`, the traceback; and the `extra` of the record. Records of actors have `actor`, `method`, `node`
    and `rank`, too, where there is one. Inside of `aiodaft.telemetry.trace_context()`, they have `trace_id` and
    `span_id`.
    """

    def format(self, record: logging.LogRecord) -> str:
        given = {name: value for name, value in record.__dict__.items() if name not in STANDARD and value is not None}
        text = given.pop("text", None) if "actor" in given else None
        found = {
            "time": json_time(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage() if text is None else text,
            "pid": record.process,
            "thread": record.threadName,
            "file": record.pathname,
            "line": record.lineno,
            "function": record.funcName,
        }
        if text is None:
            found.update(trace_ids())
        error = record.exc_text or (self.formatException(record.exc_info) if record.exc_info else None)
        found.update({"error": error} if error else {})
        found.update({"stack": record.stack_info} if record.stack_info else {})
        return json_line({**found, **{name: value for name, value in given.items() if name not in found}})


def trace_ids() -> dict[str, str]:
    trace = trace_of(current_terms.get())
    return {} if trace is None else {"trace_id": trace.trace_id, "span_id": trace.span_id}


def json_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def json_line(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, ensure_ascii=False, default=str)
