"""The actors of a queue: one that knows which row has which field, and those that have the values."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from aiodaft.actor import Actor
from aiodaft.exceptions import ActorDied
from aiodaft.methods import method

from .rows import Rows, Sampler


class Storage(Actor):
    """Has the values of the rows whose number has one remainder modulo the number of storages.

    Args:
        storages: Storages of the queue.
    """

    def __init__(self, storages: int) -> None:
        self._storages = storages
        self._rows: dict[int, dict[str, Any]] = {}
        # Cleared rows, divided by `storages`: all below a number, and some from there on. A value that comes late must
        # not stay for ever.
        self._cleared_below = 0
        self._cleared: set[int] = set()

    @method
    async def write(self, rows: list[int], fields: dict[str, list[Any]]) -> None:
        """Store fields: for each, the values of all rows. Rows that were cleared are left out."""
        for place, row in enumerate(rows):
            index = row // self._storages
            if index >= self._cleared_below and index not in self._cleared:
                self._rows.setdefault(row, {}).update((name, values[place]) for name, values in fields.items())

    @method
    async def read(self, rows: list[int], fields: list[str]) -> dict[str, list[Any]]:
        """The fields of rows: for each, the values of all rows.

        Raises:
            LookupError: A row was cleared, or lost in a restart of this actor.
        """
        if lacking := self._lacking(rows, fields):
            raise LookupError(f"the rows {lacking} of the queue were cleared, or lost when their storage was restarted")
        return {name: [self._rows[row][name] for row in rows] for name in fields}

    @method
    async def lacking(self, rows: list[int], fields: list[str]) -> list[int]:
        """The rows among these that are not here, or lack one of these fields."""
        return self._lacking(rows, fields)

    def _lacking(self, rows: list[int], fields: list[str]) -> list[int]:
        wanted = set(fields)
        return [row for row in rows if row not in self._rows or not wanted <= self._rows[row].keys()]

    @method
    async def clear(self, rows: list[int]) -> None:
        for row in rows:
            self._rows.pop(row, None)
            index = row // self._storages
            if index >= self._cleared_below:
                self._cleared.add(index)
        while self._cleared_below in self._cleared:
            self._cleared.remove(self._cleared_below)
            self._cleared_below += 1

    @method
    async def count(self) -> int:
        return len(self._rows)


class Metadata(Actor):
    """Knows the fields of each row, and gives rows to consumers. No value comes here.

    Args:
        consumers: For each consumer, the fields that it needs and its sampler.
        capacity: Rows that are not cleared, at most.
        storages: The actors with the values.
    """

    def __init__(
        self, consumers: Mapping[str, tuple[Iterable[str], Sampler]], capacity: int, storages: Sequence[Storage]
    ) -> None:
        self._rows = Rows(consumers, capacity, len(storages))
        self._storages = storages
        self._leases = count(1)
        self._consumers: dict[int, str] = {}
        # Waiting calls look again when this is set; each gets a new one.
        self._changed = asyncio.Event()
        # Producers that wait for room, in their order.
        self._producers: deque[object] = deque()

    async def _wait_changed(self) -> None:
        self._check_storages()
        await self._changed.wait()

    def _check_storages(self) -> None:
        if not self._rows.storages:
            raise ActorDied("all storages of the queue have died, and its rows with them")

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @method
    async def reserve(self, count: int) -> AsyncIterator[list[int]]:
        """Give the numbers of new rows, when there is room, and wait until they have fields.

        Rows without fields are cleared if this is cancelled before: the producer gave up, or died.

        Raises:
            ValueError: There is never room for so many, or the queue is finished.
            ActorDied: No storage is left.
        """
        if count > self._rows.capacity:
            raise ValueError(f"{count} rows are more than the queue has room for, which is {self._rows.capacity}")
        turn, rows = object(), list[int]()
        self._producers.append(turn)
        try:
            while self._producers[0] is not turn or not self._rows.has_room(count):
                await self._wait_changed()
            self._check_storages()
            rows = self._rows.add(count)
        finally:
            self._producers.remove(turn)
            self._change()
        try:
            yield rows
            while self._rows.without_fields(rows):
                await self._changed.wait()
        finally:
            if lost := self._rows.without_fields(rows):
                self._rows.clear(lost)
                for index in self._rows.storages:
                    self._storages[index].clear.tell(lost)
                self._change()

    @method
    async def wrote(self, rows: list[int], fields: list[str]) -> None:
        self._rows.wrote(rows, fields)
        self._change()

    @method
    async def lease(self, consumer: str) -> AsyncIterator[tuple[int, list[str]]]:
        """Give a number to take rows with, and the fields. At the end, unacknowledged rows are given to others.

        Raises:
            ValueError: The queue has no such consumer.
        """
        fields, lease = sorted(self._rows.fields_of(consumer)), next(self._leases)
        self._consumers[lease] = consumer
        try:
            yield lease, fields
            await asyncio.Event().wait()
        finally:
            del self._consumers[lease]
            self._rows.give_back(consumer, lease)
            self._change()

    @method
    async def take(self, lease: int, count: int) -> list[int]:
        """Wait for rows that the sampler chooses; none if there will be none any more.

        Raises:
            ActorDied: No storage is left.
        """
        while (rows := self._rows.take(self._consumers[lease], lease, count)) is None:
            await self._wait_changed()
        return rows

    @method
    async def missed(self, storage: int, rows: list[int], fields: list[str]) -> None:
        """A storage has died, or lacks rows that it should have: forget the lost rows, for all consumers."""
        try:
            self._rows.clear(await self._storages[storage].lacking(rows, fields))
        except ActorDied:
            self._rows.lose(storage)
        self._change()

    @method
    async def acknowledge(self, lease: int, rows: list[int]) -> None:
        self._rows.acknowledge(self._consumers[lease], lease, rows)
        self._change()

    @method
    async def keep_only(self, lease: int, rows: list[int]) -> None:
        """Of the rows that were taken, the consumer has these; others may have the rest."""
        consumer = self._consumers.get(lease)
        if consumer is not None:
            self._rows.give_back(consumer, lease, but=rows)
            self._change()

    @method
    async def clear(self, rows: list[int]) -> None:
        self._rows.clear(rows)
        self._change()

    @method
    async def finish(self) -> None:
        """No rows will be added."""
        self._rows.is_finished = True
        self._change()

    @method
    async def count(self) -> int:
        return self._rows.count
