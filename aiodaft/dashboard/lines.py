"""The output and the log records of actors for the page, as plain data. Pure."""

from __future__ import annotations

from typing import Final

from aiodaft._protocol.diagnostics.printing import cut
from aiodaft._runtime.logs.entries import Line
from aiodaft._runtime.logs.log_files import Said
from aiodaft.dashboard.graph import Plain

# Characters of one entry.
_MAX_TEXT: Final = 4 << 10


def line_of(said: Said) -> Plain:
    """A line or a record: its time, actor, urgency ("" if it was printed), and text."""
    source, entry = said
    if isinstance(entry, Line):
        return {
            "at": entry.at,
            "actor": source.shown_name,
            "pid": source.pid,
            "level": "",
            "stream": entry.stream,
            "text": cut(entry.text, _MAX_TEXT),
        }
    text = str(entry["text"])
    if entry.get("exc_text"):
        text = f"{text}\n{entry['exc_text']}"
    return {
        "at": entry["created"],
        "actor": str(entry.get("actor") or source.shown_name),
        "pid": entry["process"],
        "level": str(entry["levelname"]),
        "stream": 2,
        "text": cut(text, _MAX_TEXT),
    }
