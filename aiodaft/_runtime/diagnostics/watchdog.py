"""Warns of members that are late for a collective: of a group whose members meet here, or on refs and issued here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from functools import partial
from typing import Final

from aiodaft._protocol.groups.meeting import Gathering, Usual
from aiodaft._runtime.calls.call import CallState
from aiodaft._runtime.objects.ref_state import RefState
from aiodaft._runtime.platform.tasks import logger
from aiodaft._runtime.process import Process

# Seconds between two looks, while members are awaited.
_PATIENCE: Final = 0.25


class _Values(Gathering):
    """A collective on refs: a member comes when its value exists."""

    __slots__ = ("_title", "failed", "states")

    def __init__(self, title: str, states: Sequence[RefState], usual: Usual) -> None:
        super().__init__(len(states), usual)
        self._title, self.states, self.failed = title, dict(enumerate(states)), False

    @property
    def title(self) -> str:
        return self._title

    def absent(self) -> list[str]:
        return [
            f"{rank} ({state.target.label})" if isinstance(state, CallState) else str(rank)
            for rank, state in self.states.items()
        ]


class Watchdog:
    def __init__(self, process: Process) -> None:
        self._process = process
        # Of the methods whose results are the values.
        self._usual: dict[str, Usual] = {}
        self._values: set[_Values] = set()
        self.sources: list[Callable[[], Iterable[Gathering]]] = [lambda: self._values]
        self._looking = False

    def expect(self, title: str, states: Sequence[RefState]) -> None:
        """A collective takes these values."""
        if not self._process.is_here:
            self._process.call_soon(partial(self.expect, title, states))
            return
        title = f"{title} of {states[0].label}"
        gathering = _Values(title, states, self._usual.setdefault(title, Usual()))
        self._values.add(gathering)
        for rank, state in enumerate(states):
            if state.settled:
                self._come(gathering, rank, state)
            else:
                state.watch(partial(self._come, gathering, rank))

    def _come(self, gathering: _Values, rank: int, state: RefState) -> None:
        now = self._process.env.monotonic()
        if gathering.since is None:
            gathering.since = now
            self.look_later()
        del gathering.states[rank]
        gathering.failed |= state.error is not None
        if not gathering.states:
            self._values.discard(gathering)
            if not gathering.failed:
                gathering.usual.note(now - gathering.since)

    def look_later(self) -> None:
        if not self._looking and self._process.closed is None:
            self._looking = True
            # In an empty context: the look has no deadline of a call.
            self._process.loop.call_later(_PATIENCE, self._look, context=Context())

    def _look(self) -> None:
        self._looking = False
        now = self._process.env.monotonic()
        for gathering in self._open():
            if gathering.told or gathering.since is None:
                continue
            if gathering.is_late(now):
                gathering.told = True
                logger.warning("%s", gathering.describe(now))
            else:
                self.look_later()

    def open(self) -> tuple[str, ...]:
        """The collectives that some members have not come to."""
        now = self._process.env.monotonic()
        return tuple(gathering.describe(now) for gathering in self._open() if gathering.since is not None)

    def late(self) -> tuple[str, ...]:
        """Those of them that were reported."""
        now = self._process.env.monotonic()
        return tuple(gathering.describe(now) for gathering in self._open() if gathering.told)

    def _open(self) -> list[Gathering]:
        return [gathering for source in self.sources for gathering in source()]
