"""Log records as JSON objects, one per line."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from aiodaft._runtime.platform.context import current_terms, trace_of

# The attributes of every record.
STANDARD: Final = {*logging.makeLogRecord({}).__dict__, "message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formats a record, of an actor or of the program, as one line with a JSON object.

    It has `time` (UTC), `level`, `logger`, `message`, `pid`, `thread`, `file`, `line` and `function`; of an error
    `error`, the traceback; and the `extra` of the record. Records of actors have `actor`, `method`, `node`
    and `rank`, too, where there is one. Inside of `aiodaft.telemetry.trace_context()`, they have `trace_id` and
    `span_id`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line, without a newline."""
        given = {name: value for name, value in record.__dict__.items() if name not in STANDARD and value is not None}
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
        if text is None:
            # It was logged in this process, here and now.
            found.update(trace_ids())
        error = record.exc_text or (self.formatException(record.exc_info) if record.exc_info else None)
        found.update({"error": error} if error else {})
        found.update({"stack": record.stack_info} if record.stack_info else {})
        return json_line({**found, **{name: value for name, value in given.items() if name not in found}})


def trace_ids() -> dict[str, str]:
    """The ids of the trace that the running code is part of."""
    trace = trace_of(current_terms.get())
    return {} if trace is None else {"trace_id": trace.trace_id, "span_id": trace.span_id}


def json_time(seconds: float) -> str:
    """A time since the epoch as text."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def json_line(fields: Mapping[str, Any]) -> str:
    """A JSON object in one line; of anything that JSON does not know, the text."""
    return json.dumps(fields, ensure_ascii=False, default=str)
