"""The entries that a process of actors writes, on their way to a display."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from aiodaft._protocol.diagnostics.printing import Member, member_of
from aiodaft._protocol.ids import PeerId


class Source(NamedTuple):
    """A process that writes.

    Attributes:
        owner: The process of the actor that owns its actors; "" if the program does.
    """

    process: PeerId
    label: str
    names: str = ""
    pid: int = 0
    node: str = ""
    owner: str = ""

    @property
    def shown_name(self) -> str:
        """The names of its actors; before it has any, the actor that it was started for."""
        return self.names or self.label

    @property
    def title(self) -> str:
        return f"{self.shown_name} pid={self.pid}"

    @property
    def member(self) -> Member | None:
        """The place of its only actor in a group; None if that is in none, or there are several actors."""
        return member_of(self.shown_name)


class Line(NamedTuple):
    """A line of standard output (1) or standard error (2), as it looks now.

    Attributes:
        at: When it was read, in seconds since the epoch.
    """

    stream: int
    text: str
    at: float
    complete: bool = True
    is_bar: bool = False


class Life(NamedTuple):
    """The process has begun (True) or ended (False) to write."""

    begins: bool


# A record is one that `RecordSender` has sent.
Entry: TypeAlias = Line | Life | Mapping[str, Any]
Written: TypeAlias = tuple[Source, Sequence[Entry]]


class Display(Protocol):
    """Shows the entries of a process, or sends them to the process that does. Safe in any thread."""

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
