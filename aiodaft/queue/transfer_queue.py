"""The queue as producers and consumers use it, and its actors: the metadata of its rows, and their values."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from aiodaft.actor import Actor
from aiodaft.exceptions import ActorDied, RuntimeClosed
from aiodaft.methods import method
from aiodaft.queue.rows import Rows, Sampler, oldest
from aiodaft.scope import Scope


class Storage(Actor):
    """Has the values of the rows whose number has one remainder modulo the number of storages.

    Args:
        storages: Storages of the queue.
    """

    def __init__(self, storages: int) -> None:
        self._storages = storages
        self._rows: dict[int, dict[str, Any]] = {}
        # All rows below a number, and some from there on, divided by `storages`: a late value must not stay for ever.
        self._cleared_below = 0
        self._cleared: set[int] = set()

    @method
    async def write(self, rows: list[int], fields: dict[str, list[Any]]) -> None:
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
        self._changed = asyncio.Event()
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
        self._rows.is_finished = True
        self._change()

    @method
    async def count(self) -> int:
        return self._rows.count


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wants:
    """The rows that a consumer wants.

    Attributes:
        fields: It gets the rows that have all of these.
        sampler: Chooses among them, in the process of the metadata actor; see `Sampler`. `take` raises its errors.
    """

    fields: Sequence[str]
    sampler: Sampler = oldest


@dataclass(frozen=True, slots=True)
class Batch:
    """Some rows. Without rows it is false: no row will come any more.

    Attributes:
        rows: Their numbers.
        fields: For each field, the values of all rows.
    """

    rows: list[int]
    fields: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class TransferQueue:
    """A queue. Pass it to producers and consumers; see `open_queue`.

    Its methods raise `ActorDied` if the metadata actor or a storage that they need has died. The rows of a storage are
    lost with it: once a method has raised this, no consumer is given them, and further rows go to the other storages.

    Attributes:
        metadata: The actor that knows which row has which field.
        storages: The actors that have the values; row n is in storage n modulo their number.
    """

    metadata: Metadata
    storages: tuple[Storage, ...]

    async def put(self, fields: Mapping[str, Sequence[Any]]) -> list[int]:
        """Add rows: for each field, the values of all rows. A value may be a `Ref`: it goes straight to its storage.

        Waits while the queue is full; producers get room in the order in which they asked.

        Returns:
            The numbers of the rows.

        Raises:
            ValueError: The fields have no rows, or different numbers of rows; they are more than the capacity of the
                queue; or the queue is finished.

        Cancellation: no row is added, or all are.
        """
        lengths = {len(values) for values in fields.values()}
        if len(lengths) != 1 or 0 in lengths:
            counts = ", ".join(f"{name!r}: {len(values)}" for name, values in fields.items())
            raise ValueError(f"put() takes fields with the same positive number of values, not {{{counts}}}")
        added: list[int] = []
        # The loop goes on when the rows have fields. If it is left before, the rows are cleared.
        async for rows in self.metadata.reserve(lengths.pop()):
            await self.write(rows, fields)
            added = rows
        return added

    async def write(self, rows: Sequence[int], fields: Mapping[str, Sequence[Any]]) -> None:
        """Add fields to rows; see `put`. Values that are there already are replaced. Rows that were cleared are left
        out.

        Raises:
            ValueError: A field has another number of values than there are rows.

        Cancellation: the fields are written or not.
        """
        for name, values in fields.items():
            if len(values) != len(rows):
                raise ValueError(f"write() got {len(values)} values of {name!r} for {len(rows)} rows")
        parts = self._parts(rows)
        await asyncio.gather(
            *(
                self._asked(
                    index,
                    here := [rows[place] for place in places],
                    [],
                    self.storages[index].write(
                        here, {name: [values[place] for place in places] for name, values in fields.items()}
                    ),
                )
                for index, places in parts.items()
            )
        )
        await self.metadata.wrote(list(rows), list(fields))

    async def clear(self, rows: Iterable[int]) -> None:
        """Forget rows, for all consumers: their values are freed, and there is room for others. Idempotent.

        Cancellation: some rows may be left.
        """
        cleared = list(rows)
        await self.metadata.clear(cleared)
        await asyncio.gather(
            *(
                self._clear(index, [cleared[place] for place in places])
                for index, places in self._parts(cleared).items()
            )
        )

    async def _clear(self, index: int, rows: list[int]) -> None:
        # With their storage, the values are gone, too.
        with suppress(ActorDied):
            await self.storages[index].clear(rows)

    async def finish(self) -> None:
        """No rows will be added: consumers get the rows that are left, and then an empty batch. Idempotent."""
        await self.metadata.finish()

    @asynccontextmanager
    async def consumer(self, name: str) -> AsyncGenerator[Consumer, None]:
        """Consume rows, as one of any number of processes that share the rows of the consumer of this name.

        When the block ends, or the process dies, the rows that were taken and not acknowledged are given again.

        Raises:
            ValueError: The queue has no such consumer.
        """
        async with self.metadata.lease(name) as leases:
            lease, fields = await anext(leases)
            yield Consumer(self, lease, fields)

    async def _asked(self, index: int, rows: list[int], fields: list[str], answer: Awaitable[T]) -> T:
        """The answer of a storage. If it has died, or lacks fields of rows, the metadata actor hears of it first."""
        try:
            return await answer
        except (ActorDied, LookupError):
            await self.metadata.missed(index, rows, fields)
            raise

    def _parts(self, rows: Sequence[int]) -> dict[int, list[int]]:
        parts: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            parts.setdefault(row % len(self.storages), []).append(place)
        return parts


class Consumer:
    def __init__(self, queue: TransferQueue, lease: int, fields: list[str]) -> None:
        self._queue = queue
        self._lease = lease
        self._fields = fields
        self._rows: set[int] = set()

    async def take(self, count: int) -> Batch:
        """Take at most so many rows that have the fields; waits until the sampler chooses some.

        Each row is given once, and again only if it was not acknowledged. An empty batch means that the queue is
        finished, and no other process of this consumer has rows that it has not acknowledged.

        Raises:
            ValueError: The count is not positive, or the sampler chose rows that are not ready.
            LookupError: A row was cleared meanwhile; the others are given again.
            ActorDied: A storage with some of the rows has died; the others are given again.

        Cancellation: no row is lost. One take at a time.
        """
        if count < 1:
            raise ValueError(f"take() takes a positive number of rows, not {count}")
        queue = self._queue
        try:
            rows = await queue.metadata.take(self._lease, count)
            values: dict[str, list[Any]] = {name: [None] * len(rows) for name in self._fields}
            parts = queue._parts(rows)
            found = await asyncio.gather(
                *(
                    queue._asked(
                        index,
                        here := [rows[place] for place in places],
                        self._fields,
                        queue.storages[index].read(here, self._fields),
                    )
                    for index, places in parts.items()
                )
            )
        except BaseException:
            # The rows that were taken may be unknown here.
            with suppress(RuntimeClosed):
                queue.metadata.keep_only.tell(self._lease, sorted(self._rows))
            raise
        for places, part in zip(parts.values(), found, strict=True):
            for name, column in part.items():
                for place, value in zip(places, column, strict=True):
                    values[name][place] = value
        self._rows.update(rows)
        return Batch(rows, values)

    async def acknowledge(self, batch: Batch) -> None:
        """The rows of a batch are done with, and will not be given again to this consumer. Idempotent."""
        self._rows.difference_update(batch.rows)
        await self._queue.metadata.acknowledge(self._lease, batch.rows)


@asynccontextmanager
async def open_queue(
    scope: Scope, consumers: Mapping[str, Wants | Sequence[str]], *, capacity: int = 1024, storages: int = 1
) -> AsyncGenerator[TransferQueue, None]:
    """Open a queue, the actors of which end with the block.

    Args:
        scope: A runtime or scope for the actors.
        consumers: The wants of each consumer; a list of fields stands for `Wants(fields)`.
        capacity: Rows that are not cleared, at most. Each further `put` waits.
        storages: The number of actors with the values.

    Raises:
        ValueError: The capacity or the number of storages is not positive.
    """
    for name, number in (("capacity", capacity), ("storages", storages)):
        if number < 1:
            raise ValueError(f"{name} is a positive number, not {number}")
    wanted = {name: wants if isinstance(wants, Wants) else Wants(wants) for name, wants in consumers.items()}
    plain = {name: (list(wants.fields), wants.sampler) for name, wants in wanted.items()}
    async with scope.group(storages, Storage, storages) as group:
        members = tuple(group)
        async with scope.spawn(Metadata, plain, capacity, members) as metadata:
            yield TransferQueue(metadata, members)
