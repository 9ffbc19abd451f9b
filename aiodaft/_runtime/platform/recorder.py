"""Keeps the events of a process while a trace is recorded."""

from __future__ import annotations

from collections.abc import Callable

from aiodaft._protocol.diagnostics.trace import Event


class Recorder:
    """The first events of a process, as many as there is room for. Safe in any thread.

    Args:
        now: The clock of its events.
        limit: The number of events that are kept; later ones are only counted.
        before: Another recorder, which goes on meanwhile.
    """

    def __init__(self, now: Callable[[], float], limit: int, before: Recorder | None = None) -> None:
        self.now = now
        self.events: list[Event] = []
        self.dropped = 0
        self.before = before
        self._limit = limit

    def add(self, event: Event) -> None:
        """Keep an event, if there is room."""
        if self.before is not None:
            self.before.add(event)
        if len(self.events) < self._limit:
            self.events.append(event)
        else:
            self.dropped += 1
