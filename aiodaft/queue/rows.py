"""The fields of each row of a queue, and the consumers that have taken it. Pure.

For each consumer, a row goes through these states:

    State    | event                         | next
    PARTIAL  | its last wanted field comes   | READY
    READY    | `take`                        | TAKEN
    TAKEN    | `acknowledge`                 | OVER
    TAKEN    | `give_back`                   | READY
    any      | `clear`, `lose`               | (forgotten)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count as numbers
from itertools import islice
from typing import TypeAlias

# Rows that are ready, the oldest first, and how many are wanted: which are given now? Without any, `take` waits.
Sampler: TypeAlias = Callable[[Sequence[int], int], Iterable[int]]


def oldest(ready: Sequence[int], count: int) -> Sequence[int]:
    """A sampler: the oldest rows, once there are as many as are wanted."""
    return ready[:count] if len(ready) >= count else ()


def at_once(ready: Sequence[int], count: int) -> Sequence[int]:
    """A sampler: the oldest rows, without waiting for as many as are wanted."""
    return ready[:count]


@dataclass(slots=True)
class _View:
    fields: frozenset[str]
    sampler: Sampler
    partial: set[int] = field(default_factory=set)
    ready: dict[int, None] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)


class Rows:
    """The rows of a queue, by number; numbers are never used again.

    Args:
        consumers: For each consumer, the fields that it needs and its sampler.
        capacity: Rows that are not cleared, at most.
        storages: Row n is in storage n modulo this number.
    """

    def __init__(
        self, consumers: Mapping[str, tuple[Iterable[str], Sampler]], capacity: int, storages: int = 1
    ) -> None:
        self.capacity = capacity
        self.storages = set(range(storages))
        self._modulus = storages
        self.is_finished = False
        self._views = {name: _View(frozenset(fields), sampler) for name, (fields, sampler) in consumers.items()}
        self._fields: dict[int, set[str]] = {}
        self._next = 0

    @property
    def count(self) -> int:
        return len(self._fields)

    def fields_of(self, consumer: str) -> frozenset[str]:
        """Raises ValueError: there is no such consumer."""
        if consumer not in self._views:
            raise ValueError(f"the queue has no consumer {consumer!r}, only {', '.join(map(repr, self._views))}")
        return self._views[consumer].fields

    def has_room(self, count: int) -> bool:
        return len(self._fields) + count <= self.capacity

    def add(self, count: int) -> list[int]:
        """Add rows without fields, at least one, to storages that are not lost. Returns their numbers.

        Raises:
            ValueError: The queue is finished.
        """
        if self.is_finished:
            raise ValueError("no row can be added: the queue is finished")
        rows = list(islice((row for row in numbers(self._next) if self._storage_of(row) in self.storages), count))
        self._next = rows[-1] + 1
        for row in rows:
            self._fields[row] = set()
            for view in self._views.values():
                view.partial.add(row)
        return rows

    def wrote(self, rows: Iterable[int], fields: Iterable[str]) -> None:
        """Fields of rows are stored. Rows that were cleared meanwhile are left out."""
        for row in rows:
            if row in self._fields:
                self._fields[row].update(fields)
                for view in self._views.values():
                    if row in view.partial and view.fields <= self._fields[row]:
                        view.partial.remove(row)
                        view.ready[row] = None

    def without_fields(self, rows: Iterable[int]) -> list[int]:
        return [row for row in rows if self._fields.get(row) == set()]

    def take(self, consumer: str, lease: int, count: int) -> list[int] | None:
        """Take rows that are ready; each is given once. None: wait. No rows: there will be none any more.

        Raises:
            ValueError: The sampler chose a row twice, one that is not ready, or more rows than are wanted.
        """
        view = self._views[consumer]
        if self.is_finished:
            count = min(count, len(view.partial) + len(view.ready))
            if not count:
                # Those that others have taken may be given back.
                return None if any(other != lease for other in view.taken.values()) else []
        ready = sorted(view.ready)
        chosen = list(view.sampler(ready, count))
        if len(set(chosen)) < len(chosen) or len(chosen) > count or not view.ready.keys() >= set(chosen):
            raise ValueError(f"the sampler of {consumer!r} chose {chosen} for {count} of the rows {ready}")
        for row in chosen:
            del view.ready[row]
            view.taken[row] = lease
        return chosen or None

    def acknowledge(self, consumer: str, lease: int, rows: Iterable[int]) -> None:
        """A consumer is done with rows. Rows that were cleared meanwhile are left out."""
        view = self._views[consumer]
        for row in rows:
            if view.taken.get(row) == lease:
                del view.taken[row]

    def give_back(self, consumer: str, lease: int, but: Iterable[int] = ()) -> None:
        """The rows that were taken under a lease, and are not acknowledged, are ready again; `but` stays taken."""
        view, kept = self._views[consumer], set(but)
        for row in [row for row, other in view.taken.items() if other == lease and row not in kept]:
            del view.taken[row]
            view.ready[row] = None

    def lose(self, storage: int) -> None:
        """A storage is gone: forget its rows, and add no further ones there. Idempotent."""
        self.storages.discard(storage)
        self.clear([row for row in self._fields if self._storage_of(row) == storage])

    def _storage_of(self, row: int) -> int:
        return row % self._modulus

    def clear(self, rows: Iterable[int]) -> None:
        for row in rows:
            if self._fields.pop(row, None) is not None:
                for view in self._views.values():
                    view.partial.discard(row)
                    view.ready.pop(row, None)
                    view.taken.pop(row, None)
