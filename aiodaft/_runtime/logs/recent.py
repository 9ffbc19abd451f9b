"""The last lines and records of actors, and new ones for followers: the source of `aiodaft logs`."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from itertools import chain, count
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias

from aiodaft._protocol.diagnostics.merging import member_of
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.logs.entries import Line, Source
from aiodaft._runtime.logs.log_files import json_of

# Entries that are kept of a process, and of all; and those that wait for a follower.
_MAX_OF_PROCESS: Final = 100
_MAX_KEPT: Final = 20_000
_MAX_WAITING: Final = 10_000

Shown: TypeAlias = Line | Mapping[str, Any]


class Said(NamedTuple):
    """A complete line or a record, and the process that it is from."""

    source: Source
    entry: Shown

    def is_of(self, name: str) -> bool:
        """Whether it is of the actor, or of a member of the group, with this name in errors."""
        source, entry = self
        actor = None if isinstance(entry, Line) else entry.get("actor")
        names = [str(actor)] if actor else [source.label, *source.names.split("+")]
        members = filter(None, map(member_of, names))
        return name in names or name in {member.group for member in members}

    def as_json(self) -> str:
        return json_of(*self)


class Follower:
    """Gets the entries of actors, from some moment on. Safe in any thread."""

    def __init__(self, on_news: Callable[[], object]) -> None:
        self._on_news = on_news
        self._lock = threading.Lock()
        self._waiting: list[Said] = []
        self._dropped = 0

    def add(self, said: Said) -> None:
        """Take one more, if there is room."""
        with self._lock:
            if len(self._waiting) < _MAX_WAITING:
                self._waiting.append(said)
            else:
                self._dropped += 1
            if len(self._waiting) == 1:
                self._on_news()

    def take(self) -> tuple[list[Said], int]:
        """The entries that have come since the last time, and the number of entries for which there was no room."""
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
        """The last entries that came after the one with a number, with their numbers; -1 is before all."""
        found: list[tuple[int, Said]] = []
        with self._lock:
            for kept in reversed(self._kept.values()):
                if kept[-1][0] <= number:
                    # Neither have the others written since.
                    break
                found += [entry for entry in kept if entry[0] > number]
        return sorted(found, key=itemgetter(0))[-most:]

    def follow(self, on_news: Callable[[], object]) -> tuple[list[Said], Follower]:
        """The entries that are kept, in order, and a follower, which gets all later ones until `leave`.

        Args:
            on_news: Called in any thread when there is something to take again.
        """
        follower = Follower(on_news)
        with self._lock:
            self._followers.append(follower)
            kept = sorted(chain.from_iterable(self._kept.values()), key=itemgetter(0))
        return [said for _, said in kept], follower

    def leave(self, follower: Follower) -> None:
        with self._lock:
            self._followers.remove(follower)
