"""The stores by their names, and the one in a file, by SQLite: for one coordinator at a time, on a local disk.

A commit is in the file when the coordinator answers, also if it is killed then. A loss of power may take the last ones;
but never a term, which every later epoch is greater than.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from aiodaft._protocol.coordination.records import Change, Kind, Record, plain_of, record_of
from aiodaft._protocol.coordination.registry import Stored
from aiodaft._runtime.coordination.coordinator import NotStored, Store, StoreFailed
from aiodaft._runtime.platform.tasks import private
from aiodaft._runtime.platform.threads import HelperThread
from aiodaft.exceptions import CorruptState, ResourceExhausted

T = TypeVar("T")

# Marks the file as ours ("adft"), and the version of its content.
_APPLICATION: Final = 0x61646674
_VERSION: Final = 1
_SCHEMA: Final = """
    CREATE TABLE coordinator (term INTEGER NOT NULL);
    CREATE TABLE records (kind INTEGER, key TEXT, record TEXT NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID;
    INSERT INTO coordinator VALUES (0);
"""
# Pages of the log before they go into the file: a step of some milliseconds.
_CHECKPOINT: Final = 200
# As bytes: damaged text would be an error of another kind.
_EVERYTHING: Final = "SELECT kind, CAST(key AS BLOB), CAST(record AS BLOB) FROM records"
_DAMAGED: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


class RegistryFile:
    """The file, as one thread uses it. `wall_clock`: seconds since 1970."""

    def __init__(self, path: Path, wall_clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._wall_clock = wall_clock
        self._database: sqlite3.Connection | None = None

    def open(self) -> Stored:
        """Open the file, or make it.

        Raises:
            StoreFailed: It cannot be opened or written, or another process has it open.
            CorruptState: It is damaged, or something else.
        """
        self.close()
        with suppress(OSError):
            # A stranger that can read it could lock it.
            os.close(private(os.fspath(self._path), os.O_CREAT | os.O_EXCL))
        try:
            self._database = database = sqlite3.connect(self._path, timeout=0, isolation_level=None)
            self._lock(database)
            self._check(database)
            stored = Stored(self._next_term(database), self._read(database))
            database.execute("PRAGMA synchronous = NORMAL")
        except sqlite3.Error as error:
            self.close()
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED:
                raise self._corrupt(str(error)) from error
            raise StoreFailed(f"{self._path}: {error}") from error
        except CorruptState:
            self.close()
            raise
        return stored

    def commit(self, changes: Sequence[Change]) -> None:
        """Store changes, all or none.

        Raises:
            StoreFailed: They may not be stored.
            NotStored: They are not, because the disk is full. The file stays open.
        """
        if self._database is None:
            raise StoreFailed(f"{self._path} is closed")
        gone = [(int(change.kind), change.key) for change in changes if change.record is None]
        there = [
            (int(change.kind), change.key, json.dumps(plain_of(change.record)))
            for change in changes
            if change.record is not None
        ]
        try:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                self._database.executemany("DELETE FROM records WHERE kind = ? AND key = ?", gone)
                self._database.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", there)
                self._database.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    self._database.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            is_full = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL and not self._database.in_transaction
            raise (NotStored if is_full else StoreFailed)(f"{self._path}: {error}") from error

    def close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()

    @staticmethod
    def _lock(database: sqlite3.Connection) -> None:
        # In this mode the first transaction takes the file for as long as it is open.
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT}")
        database.execute("PRAGMA synchronous = FULL")
        database.execute("BEGIN EXCLUSIVE")
        database.execute("COMMIT")

    def _check(self, database: sqlite3.Connection) -> None:
        if _ask(database, "PRAGMA page_count") <= 1 and not _ask(database, "SELECT count(*) FROM sqlite_master"):
            database.executescript(
                f"BEGIN; {_SCHEMA} PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {_VERSION}; COMMIT;"
            )
        if _ask(database, "PRAGMA application_id") != _APPLICATION:
            raise self._corrupt("it is the database of another program")
        if (version := _ask(database, "PRAGMA user_version")) != _VERSION:
            raise self._corrupt(f"it is of version {version}; this program reads version {_VERSION}")
        if (found := _ask(database, "PRAGMA integrity_check")) != "ok":
            raise self._corrupt(str(found))

    def _read(self, database: sqlite3.Connection) -> tuple[Record, ...]:
        records: list[Record] = []
        with closing(database.execute(_EVERYTHING)) as rows:
            for kind, key, text in rows:
                try:
                    record = record_of(Kind(kind), json.loads(text))
                except (ValueError, TypeError) as error:
                    raise self._corrupt(f"the record of {key!r}: {error}") from error
                if record.name.encode() != key:
                    raise self._corrupt(f"the record of {key!r} is that of {record.name!r}")
                records.append(record)
        return tuple(records)

    def _next_term(self, database: sqlite3.Connection) -> int:
        terms = database.execute("SELECT term FROM coordinator").fetchall()
        if len(terms) != 1 or not isinstance(terms[0][0], int):
            raise self._corrupt(f"it has the terms {terms!r:.100} instead of one")
        # A file that was copied back from a backup may have an old term.
        term = max(terms[0][0] + 1, int(self._wall_clock()))
        database.execute("UPDATE coordinator SET term = ?", (term,))
        return term

    def _corrupt(self, why: str) -> CorruptState:
        return CorruptState(
            f"{self._path} does not hold the names of a cluster: {why}. It was left as it is; start without it, or "
            "with another file, and the nodes bring their names back"
        )


def _ask(database: sqlite3.Connection, question: str) -> Any:
    return database.execute(question).fetchone()[0]


class SqliteStore:
    """A thread does the work: a checkpoint takes milliseconds."""

    def __init__(self, path: Path) -> None:
        self._file = RegistryFile(path)
        self._thread: HelperThread | None = None

    async def open(self) -> Stored:
        return await self._run(self._file.open)

    async def commit(self, changes: Sequence[Change]) -> None:
        if changes:
            await self._run(lambda: self._file.commit(changes))

    async def lost(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def aclose(self) -> None:
        if self._thread is not None:
            await self._run(self._file.close)
            await self._thread.aclose()
            self._thread = None

    async def _run(self, function: Callable[[], T]) -> T:
        if self._thread is None:
            self._thread = HelperThread("aiodaft coordinator's file", asyncio.get_running_loop())
        try:
            return await self._thread.run(function)
        except ResourceExhausted as error:
            raise NotStored(str(error)) from error


_ETCD: Final = "etcd://"
_ETCD_PORT: Final = 2379


def store_at(state: str) -> Store:
    """The store that `state` names: a file, or "etcd://HOST[:PORT][,HOST[:PORT]...][/PREFIX]".

    Raises:
        ValueError: It names none.
        ImportError: aetcd is not installed.
    """
    if not state.startswith(_ETCD):
        if "://" in state or not state:
            raise ValueError(f"{state!r} is neither a file nor etcd://HOST:PORT")
        return SqliteStore(Path(state))
    where, _, prefix = state.removeprefix(_ETCD).partition("/")
    addresses = []
    for member in where.split(","):
        parts = urlsplit(f"//{member}")
        if not parts.hostname or parts.username or parts.query or parts.fragment:
            raise ValueError(f"{member!r} in {state!r} is not HOST:PORT")
        addresses.append((parts.hostname, parts.port or _ETCD_PORT))
    try:
        from aiodaft._runtime.coordination.etcd_store import Address, EtcdStore  # noqa: PLC0415 - aetcd is optional
    except ImportError as error:
        raise ImportError(f"{state} needs aetcd: pip install 'aiodaft[etcd]'") from error
    members = [Address(host, port) for host, port in addresses]
    return EtcdStore(members, f"{prefix.strip('/') or 'aiodaft'}/")
