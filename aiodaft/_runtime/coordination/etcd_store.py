"""A store in etcd, which has copies on several machines.

A key names the coordinator that is in charge, and each transaction is made only if it still does. So of two
coordinators on one etcd only the last that opened it can grant anything.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Final, NamedTuple, TypeVar

import aetcd  # pyright: ignore[reportMissingTypeStubs]

from aiodaft._protocol.coordination.records import Change, Kind, Record, plain_of, record_of
from aiodaft._protocol.coordination.registry import Stored
from aiodaft._runtime.coordination.coordinator import Deposed, StoreFailed
from aiodaft.exceptions import CorruptState

# A connection to an etcd cluster: to one member after the other, until one answers; and watches that outlive it.

T = TypeVar("T")

_ATTEMPT: Final = 2
_PATIENCE: Final = 6.0
_PAUSE: Final = 0.1
_OPTIONS: Final = {
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 5_000,
    "grpc.max_receive_message_length": 64 << 20,
}


class Address(NamedTuple):
    host: str
    port: int


class EtcdEvent(NamedTuple):
    revision: int
    key: bytes
    value: bytes | None


class EtcdLink:
    def __init__(self, members: Sequence[Address]) -> None:
        self._members = members
        self._current = 0
        self._client: Any = None

    async def ask(self, question: Callable[[Any], Awaitable[T]]) -> T:
        """Have a client (of aetcd) ask something, again and elsewhere if it fails.

        Raises:
            StoreFailed: No member answers.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + _PATIENCE
        while True:
            try:
                return await question(await self.client())
            except aetcd.ClientError as error:
                # The error itself cannot travel to the callers of the coordinator.
                why = str(error)
            await self.next_member()
            if loop.time() > until:
                raise StoreFailed(f"no member of etcd at {self} answers: {why}")
            await asyncio.sleep(_PAUSE)

    async def client(self) -> Any:
        if self._client is None:
            host, port = self._members[self._current]
            self._client = aetcd.Client(host, port, timeout=_ATTEMPT, options=_OPTIONS)
            await self._client.connect()
        return self._client

    async def next_member(self) -> None:
        self._current = (self._current + 1) % len(self._members)
        await self.aclose()

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def __str__(self) -> str:
        return ",".join(f"{host}:{port}" for host, port in self._members)


async def events(link: EtcdLink, prefix: bytes, since: int) -> AsyncGenerator[EtcdEvent, None]:
    """The changes of keys with a prefix after a revision, each once, also where members come and go.

    Raises:
        aetcd.RevisionCompactedError: etcd does not remember that far back.
    """
    # Events of one transaction have one revision, and the connection may break between them.
    seen: set[bytes] = set()
    first = since + 1
    while True:
        try:
            client = await link.client()
            watch = await client.watch_prefix(prefix, start_revision=first)
            async for event in watch:
                revision, key = event.kv.mod_revision, event.kv.key
                if revision > first:
                    first, seen = revision, set()
                if revision < first or key in seen:
                    continue
                seen.add(key)
                yield EtcdEvent(revision, key, None if event.kind == aetcd.EventKind.DELETE else event.kv.value)
        except aetcd.RevisionCompactedError:
            raise
        except aetcd.ClientError:
            await link.next_member()
            await asyncio.sleep(_PAUSE)


# etcd takes 128 operations in a transaction.
_AT_ONCE: Final = 100
_FOLDERS: Final = {Kind.NAME: "names/", Kind.MEMBER: "nodes/"}


class EtcdStore:
    """`prefix` begins the keys: two clusters need two prefixes."""

    def __init__(
        self, members: Sequence[Address], prefix: str = "aiodaft/", wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._link = EtcdLink(members)
        self._watch_link = EtcdLink(members)
        self._prefix = prefix
        self._wall_clock = wall_clock
        self._id = secrets.token_hex(8)
        self._owner_key = f"{prefix}coordinator".encode()
        self._mine = b""
        self._has_opened = asyncio.Event()

    async def open(self) -> Stored:
        while not await self._take_charge():
            pass
        self._has_opened.set()
        found = [await self._link.ask(self._reader(kind)) for kind in _FOLDERS]
        return Stored(json.loads(self._mine)["term"], tuple(record for records in found for record in records))

    async def _take_charge(self) -> bool:
        owner = await self._link.ask(lambda client: client.get(self._owner_key))
        term, owner_id = (0, "") if owner is None else self._owner_in(owner.value)
        if self._has_opened.is_set() and owner_id != self._id:
            raise Deposed
        term = max(term + 1, int(self._wall_clock()))
        self._mine = json.dumps({"term": term, "id": self._id}).encode()

        async def take(client: Any) -> bool:
            before = client.transactions.mod(self._owner_key) == (0 if owner is None else owner.mod_revision)
            put = client.transactions.put(self._owner_key, self._mine)
            succeeded, _ = await client.transaction([before], [put], [])
            return bool(succeeded)

        return await self._link.ask(take)

    def _owner_in(self, value: bytes) -> tuple[int, str]:
        try:
            owner = json.loads(value)
            return int(owner["term"]), str(owner["id"])
        except (ValueError, TypeError, KeyError) as error:
            raise self._corrupt(self._owner_key, error) from error

    def _reader(self, kind: Kind) -> Callable[[Any], Any]:
        folder = f"{self._prefix}{_FOLDERS[kind]}".encode()

        async def read(client: Any) -> list[Record]:
            return [self._record_in(kind, folder, found) for found in await client.get_prefix(folder)]

        return read

    def _record_in(self, kind: Kind, folder: bytes, found: Any) -> Record:
        try:
            record = record_of(kind, json.loads(found.value))
        except (ValueError, TypeError) as error:
            raise self._corrupt(found.key, error) from error
        if folder + record.name.encode() != found.key:
            raise self._corrupt(found.key, f"it is that of {record.name!r}")
        return record

    def _corrupt(self, key: bytes, why: object) -> CorruptState:
        return CorruptState(f"{key!r} in etcd at {self._link} is no part of the state of a cluster: {why}")

    async def commit(self, changes: Sequence[Change]) -> None:
        # A transaction may have a key once.
        last = {self._key_of(change): change for change in changes}
        keys = list(last)
        for start in range(0, max(1, len(keys)), _AT_ONCE):
            await self._write({key: last[key] for key in keys[start : start + _AT_ONCE]}, is_first=not start)

    async def _write(self, changes: dict[bytes, Change], *, is_first: bool) -> None:
        attempts = 0

        async def write(client: Any) -> bool:
            nonlocal attempts
            attempts += 1
            make = client.transactions
            operations = [
                make.delete(key)
                if change.record is None
                else make.put(key, json.dumps(plain_of(change.record)).encode())
                for key, change in changes.items()
            ]
            # A member answers a transaction that neither writes nor reads alone, also one that the others do not
            # reach any more.
            operations.append(make.get(self._owner_key))
            succeeded, _ = await client.transaction([make.value(self._owner_key) == self._mine], operations, [])
            return bool(succeeded)

        # Only this coordinator writes as long as it is in charge: a second write is equal.
        if not await self._link.ask(write):
            if is_first and attempts == 1:
                raise Deposed
            raise StoreFailed("another coordinator has taken over, perhaps after these changes were stored")

    def _key_of(self, change: Change) -> bytes:
        return f"{self._prefix}{_FOLDERS[change.kind]}{change.key}".encode()

    async def lost(self) -> None:
        await self._has_opened.wait()
        while not await self._is_lost():
            pass

    async def _is_lost(self) -> bool:
        try:
            owner = await self._watch_link.ask(lambda client: client.get(self._owner_key))
            if owner is None or self._owner_in(owner.value)[1] != self._id:
                return True
            async with aclosing(events(self._watch_link, self._owner_key, owner.header.revision)) as changes:
                async for event in changes:
                    if event.value is None or self._owner_in(event.value)[1] != self._id:
                        return True
        except (StoreFailed, aetcd.RevisionCompactedError):
            pass
        return False

    def __str__(self) -> str:
        return f"etcd at {self._link}, {self._prefix}"

    async def aclose(self) -> None:
        await self._link.aclose()
        await self._watch_link.aclose()
