"""The file of a coordinator has all that was answered, whenever its process is killed; other files are refused."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from transport_probes import no_more_threads

from aiodaft._protocol.coordination.records import Change, Kind, Member, NamedActor
from aiodaft._protocol.coordination.registry import Stored
from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft._runtime.coordination.coordinator import Coordinator, NotStored, StoreFailed
from aiodaft._runtime.coordination.sqlite_store import RegistryFile, SqliteStore
from aiodaft.exceptions import CoordinatorUnavailable, CorruptState

WRITER = Path(__file__).parent.parent / "support" / "registry_writer.py"


def named(name: str, number: int = 16) -> NamedActor:
    return NamedActor(name, PeerId("controller-1"), ActorId(number), "Model-1", ("m.Model", "a.Actor"))


def put(record: NamedActor | Member) -> Change:
    return Change(1, Kind.NAME if isinstance(record, NamedActor) else Kind.MEMBER, record.name, record)


def write_some(path: Path, names: int = 50) -> None:
    file = RegistryFile(path)
    file.open()
    # Another user could lock a file that it may read.
    assert path.stat().st_mode & 0o777 == 0o600
    file.commit([put(named(f"x{number}")) for number in range(names)])
    file.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


async def test_a_restarted_coordinator_has_names_nodes_and_epochs_again(path: Path) -> None:
    first = Coordinator(SqliteStore(path))
    await first.open()
    joined = await first.join(Member("n", PeerId("node-1@n"), "tcp://10.0.0.1:1", {"a": "b"}, {"cpus": 2.0}), ())
    x = await first.register(named("x"))
    y = await first.register(named("y", 17))
    await first.release("controller-1", 17)
    members = await first.members()
    await first.aclose()
    await first.aclose()
    second = Coordinator(SqliteStore(path))
    await second.open()
    assert await second.names("") == (x,)
    assert await second.members() == members
    assert await second.keepalive(joined.epoch, {}) > 0
    assert (await second.register(named("y"))).epoch > y.epoch
    await second.aclose()


def test_a_term_is_never_used_again_even_with_a_file_from_a_backup(path: Path) -> None:
    file = RegistryFile(path, lambda: 1000.5)
    assert [file.open().term for _ in range(3)] == [1000, 1001, 1002]
    file.close()
    old = path.read_bytes()
    later = RegistryFile(path, lambda: 2000.0)
    assert later.open().term == 2000
    later.close()
    path.write_bytes(old)
    back = RegistryFile(path, lambda: 2001.0)
    assert back.open() == Stored(2001)
    back.close()


def test_a_file_has_one_user(path: Path) -> None:
    one, other = RegistryFile(path), RegistryFile(path)
    one.open()
    with pytest.raises(StoreFailed, match=r"state\.db: database is locked"):
        other.open()
    one.commit([put(named("x"))])
    one.close()
    assert [record.name for record in other.open().records] == ["x"]
    other.close()


async def test_a_coordinator_whose_file_is_in_use_does_not_start(path: Path) -> None:
    file = RegistryFile(path)
    file.open()
    coordinator = Coordinator(SqliteStore(path))
    with pytest.raises(CoordinatorUnavailable, match="database is locked"):
        await coordinator.open()
    file.close()
    await coordinator.open()
    await coordinator.aclose()


async def test_a_file_that_cannot_be_made_is_an_error_at_once(tmp_path: Path) -> None:
    coordinator = Coordinator(SqliteStore(tmp_path / "missing" / "state.db"))
    with pytest.raises(CoordinatorUnavailable, match="unable to open database file"):
        await coordinator.open()
    await coordinator.aclose()


@pytest.mark.parametrize("content", [b"no database", b"\x00" * 4096, b"SQLite format 3\x00" + b"\xff" * 8000])
def test_another_file_is_refused_and_left_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(CorruptState, match=r"state\.db does not hold the names of a cluster"):
        RegistryFile(path).open()
    assert path.read_bytes() == content


def test_what_does_not_fit_on_a_full_disk_is_not_stored_and_the_file_stays_open(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def note(*args: Any, **options: Any) -> sqlite3.Connection:
        made.append(connect(*args, **options))
        return made[-1]

    monkeypatch.setattr(sqlite3, "connect", note)
    file = RegistryFile(path)
    file.open()
    file.commit([put(named("x"))])
    (pages,) = made[0].execute("PRAGMA page_count").fetchone()
    made[0].execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(NotStored, match="database or disk is full"):
        file.commit([put(named(f"y{number}")) for number in range(100)])
    file.commit([put(named("z"))])
    assert [record.name for record in file.open().records] == ["x", "z"]
    file.close()


async def test_without_a_thread_nothing_is_stored(path: Path) -> None:
    store = SqliteStore(path)
    with no_more_threads(), pytest.raises(NotStored, match="gets no further thread"):
        await store.open()
    await store.open()
    await store.aclose()


def test_the_database_of_another_program_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE records (kind, key, record)")
        database.commit()
    with pytest.raises(CorruptState, match="it is the database of another program"):
        RegistryFile(path).open()


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("PRAGMA user_version = 2", "it is of version 2"),
        ("UPDATE records SET record = '{' WHERE key = 'x7'", "the record of b'x7'"),
        ("UPDATE records SET record = '{}' WHERE key = 'x7'", "no record of a name"),
        ("UPDATE records SET kind = 9 WHERE key = 'x7'", "9 is not a valid Kind"),
        ("UPDATE records SET key = 'y' WHERE key = 'x7'", "the record of b'y' is that of 'x7'"),
        ("DELETE FROM coordinator", "instead of one"),
        ("UPDATE coordinator SET term = 'x'", "instead of one"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(path: Path, statement: str, why: str) -> None:
    write_some(path)
    with closing(sqlite3.connect(path)) as database:
        database.execute(statement)
        database.commit()
    with pytest.raises(CorruptState, match=why):
        RegistryFile(path).open()


def test_a_damaged_file_is_refused_or_complete_and_never_empty(path: Path) -> None:
    write_some(path, 400)
    whole = path.read_bytes()
    rng, refused = random.Random(1), 0
    for _ in range(60):
        damaged = bytearray(whole)
        at = rng.randrange(len(whole))
        if rng.random() < 0.3:
            del damaged[at:]
        else:
            damaged[at : at + 64] = rng.randbytes(64)
        path.write_bytes(damaged)
        file = RegistryFile(path)
        try:
            records = file.open().records
        except CorruptState:
            refused += 1
            continue
        finally:
            file.close()
        assert len(damaged) == 0 or len(records) == 400
    assert refused > 30


def test_what_could_not_be_written_is_not_there(path: Path) -> None:
    write_some(path)
    file = RegistryFile(path)
    file.open()
    with closing(sqlite3.connect(":memory:")) as other:
        limit = other.execute("PRAGMA page_size").fetchone()[0]
    long = Change(1, Kind.NAME, "long", NamedActor("long", PeerId("p"), ActorId(1), "x" * limit, ()))
    broken = Change(1, Kind.NAME, "\ud800", named("x"))
    with pytest.raises(UnicodeEncodeError):
        file.commit([long, broken])
    file.commit([put(named("y"))])
    names = {record.name for record in file.open().records}
    assert {"x0", "y"} <= names
    assert "long" not in names
    file.close()
    with pytest.raises(StoreFailed, match="is closed"):
        file.commit([put(named("z"))])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("points", [40, pytest.param(200, marks=pytest.mark.soak)])
def test_a_process_that_is_killed_at_many_points_leaves_a_whole_file(path: Path, points: int) -> None:
    found = subprocess.run(
        [sys.executable, WRITER, path, str(points), "1"], capture_output=True, text=True, timeout=110, check=False
    )
    assert found.returncode == 0, found.stderr
    kills, within, before = map(int, found.stdout.split())
    assert kills == points
    # Some came between a commit and its acknowledgement, and some before the file was open.
    assert within > 0
    assert before > 0
