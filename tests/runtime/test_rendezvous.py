"""The file by which the tasks of a job find each other is for their user alone, and only as long as it is of use."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import Cluster, cluster_of

from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.connections.identity import Identity, load_identity, write_key_file
from aiodaft.cli.key import new_certificate
from aiodaft.cli.run import meet, published
from aiodaft.exceptions import KeyFileError, LaunchFailed

GUEST = PeerId("node-0123456789ab@guest")
NOWHERE = "tcp://127.0.0.1:9"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_of(tmp_path_factory.mktemp("cluster") / "key", "n1") as made:
        yield made


@pytest.fixture
def identity(cluster: Cluster) -> Identity:
    return load_identity(cluster.key_file)


def folder_of(path: Path) -> list[Path]:
    return list(path.parent.iterdir())


def test_the_file_is_for_its_user_alone_and_only_there_during_the_block(tmp_path: Path, identity: Identity) -> None:
    path = tmp_path / "jobs" / "job"
    with published(path, NOWHERE, identity):
        assert path.stat().st_mode & 0o7777 == 0o600
        assert path.parent.stat().st_mode & 0o7777 == 0o700
        assert folder_of(path) == [path]
    assert folder_of(path) == []


async def test_a_task_that_comes_first_waits(tmp_path: Path, cluster: Cluster, identity: Identity) -> None:
    path = tmp_path / "jobs" / "job"
    waiting = asyncio.gather(meet(path, GUEST, 20))
    await asyncio.sleep(0)
    with published(path, cluster.address, identity):
        ((address, key),) = await waiting
    assert (address, key.packed()) == (cluster.address, identity.packed())


async def test_the_file_of_an_earlier_run_is_replaced(tmp_path: Path, cluster: Cluster, identity: Identity) -> None:
    path = tmp_path / "job"
    write_key_file(tmp_path / "other", bytes(32), *new_certificate())
    with published(path, cluster.address, load_identity(tmp_path / "other")):
        waiting = asyncio.gather(meet(path, GUEST, 20))
        await asyncio.sleep(0)
        with published(path, cluster.address, identity):
            ((_, key),) = await waiting
    assert key.packed() == identity.packed()


async def test_a_file_that_others_can_read_is_refused(tmp_path: Path, cluster: Cluster, identity: Identity) -> None:
    path = tmp_path / "job"
    with published(path, cluster.address, identity):
        path.chmod(0o640)
        with pytest.raises(LaunchFailed, match=r"rank 0 did not answer within 0.2 s .*others may read or write it"):
            await meet(path, GUEST, 0.2)


def test_what_cannot_be_written_is_an_error(tmp_path: Path, identity: Identity) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KeyFileError, match="cannot be made"), published(tmp_path / "file" / "job", NOWHERE, identity):
        pass
