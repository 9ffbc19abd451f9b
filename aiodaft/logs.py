"""What becomes of the output and the log records of actors: `Runtime(logs=...)`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

__all__ = ["JsonFormatter", "Logs"]

_STANDARD: Final = {*logging.makeLogRecord({}).__dict__, "message", "asctime", "taskName"}


@dataclass(frozen=True, slots=True)
class Logs:
    """What a runtime does with the output and the log records of its actors, besides what it always does.

    Args:
        folder: A folder for a file per actor, with the time before each line. It has the name of the actor, such as
            `Model-1.log`, or `Trainer-1.3.log` for rank 3; a restarted actor goes on writing to its file. The folder is
            on the machine of the program, whichever machines the actors are on.
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
        if not isinstance(self.merge, int | float) or not 0 <= self.merge < float("inf"):
            raise ValueError(f"merge={self.merge!r}: seconds are needed, or 0 to show each line at once")


class JsonFormatter(logging.Formatter):
    """Formats a record, of an actor or of the program, as one line with a JSON object.

    It has `time` (UTC), `level`, `logger`, `message`, `pid`, `thread`, `file`, `line` and `function`; of an error
    `error`, the traceback; and what the record was given as `extra`. Records of actors have `actor`, `method`, `node`
    and `rank`, too, where there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line, without a newline."""
        given = {name: value for name, value in record.__dict__.items() if name not in _STANDARD and value is not None}
        # That of an actor, without the actor's name in front of it.
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
        error = record.exc_text or (self.formatException(record.exc_info) if record.exc_info else None)
        found.update({"error": error} if error else {})
        found.update({"stack": record.stack_info} if record.stack_info else {})
        return json_line({**found, **{name: value for name, value in given.items() if name not in found}})


def json_time(seconds: float) -> str:
    """A time since the epoch as text."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def json_line(fields: Mapping[str, Any]) -> str:
    """A JSON object in one line; of anything that JSON does not know, the text."""
    return json.dumps(fields, ensure_ascii=False, default=str)
