"""Watching a table: the changes after a revision, without gap or duplicate. Pure.

The coordinator remembers the last changes. A watcher asks for those after the last revision it knows; where that is too
long ago, or was another coordinator's, it gets all records instead, and its `View` finds the differences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from aiodaft._protocol.coordination.records import Change, Kind, Record

# Changes that are remembered.
_REMEMBERED: Final = 4096


@dataclass(frozen=True, slots=True)
class Batch:
    """An answer to a watcher.

    Attributes:
        revision: The last one that it covers; the watcher asks again from here.
        whole: Whether these are all records there are, instead of the changes since it asked.
        changes: The changes, oldest first.
    """

    revision: int
    whole: bool
    changes: tuple[Change, ...]


class History:
    """The last changes, oldest first."""

    def __init__(self, revision: int, remembered: int = _REMEMBERED) -> None:
        # Changes up to this one are forgotten.
        self._floor = revision
        self.revision = revision
        self._remembered = remembered
        self._changes: deque[Change] = deque()

    def append(self, changes: Iterable[Change]) -> None:
        for change in changes:
            self._changes.append(change)
            self.revision = change.revision
        while len(self._changes) > self._remembered:
            self._floor = self._changes.popleft().revision

    def since(self, revision: int, kind: Kind, prefix: str) -> Sequence[Change] | None:
        """The changes after a revision; None if they are not all known."""
        if not self._floor <= revision <= self.revision:
            return None
        found: list[Change] = []
        for change in reversed(self._changes):
            if change.revision <= revision:
                break
            if change.kind is kind and change.key.startswith(prefix):
                found.append(change)
        return found[::-1]


class View:
    """The records of a table that a watcher knows."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self.revision = 0
        self.records: dict[str, Record] = {}

    def take(self, batch: Batch) -> list[Change]:
        """Take an answer in; returns the changes that are news: each once, however often it comes."""
        if batch.whole:
            there = {change.key for change in batch.changes}
            gone = [Change(batch.revision, self._kind, key, None) for key in self.records if key not in there]
            changes = [*gone, *batch.changes]
        else:
            changes = [change for change in batch.changes if change.revision > self.revision]
        self.revision = batch.revision if batch.whole else max(self.revision, batch.revision)
        return [change for change in changes if self._is_news(change)]

    def _is_news(self, change: Change) -> bool:
        known = self.records.pop(change.key, None)
        if change.record is not None:
            self.records[change.key] = change.record
        return known != change.record
