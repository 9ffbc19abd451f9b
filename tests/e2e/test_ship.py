"""Code that only the program has comes to the machines of its actors, and goes with it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import Any

import pytest
import shipping
from clusters import Cluster, cluster_of, start_fork_servers
from parents import Parent
from shipping import only_here, write_code
from supervised import AT_ONCE

import aiodaft
from aiodaft import Restart

pytestmark = pytest.mark.timeout(120)


class Takes(aiodaft.Actor):
    def __init__(self, value: object) -> None:
        self.value = value


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which the nodes unpack code."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("unpacked")
        patch.setenv("TMPDIR", str(folder))
        # It is read once.
        patch.setattr("tempfile.tempdir", None)
        yield folder


@pytest.fixture(scope="module")
def cluster(temporary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_of(tmp_path_factory.mktemp("ship") / "key", "n1", "n2") as made:
        start_fork_servers(made)
        yield made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_code(tmp_path / "src", "first")


def runtime(cluster: Cluster, **options: Any) -> aiodaft.Runtime:
    return aiodaft.Runtime(cluster.address, key_file=cluster.key_file, **options)


def unpacked(temporary: Path) -> list[Path]:
    """The folders with code that lie on the machines."""
    return list(map(Path, glob(f"{temporary}/aiodaft-code-*/*")))


async def gone(temporary: Path) -> None:
    """Wait until no code lies there."""
    while unpacked(temporary):
        await asyncio.sleep(0.01)


@contextmanager
def program(folder: Path, *nodes: str, **variables: str) -> Generator[tuple[subprocess.Popen[str], Any]]:
    """A program that ships a folder, and its words about its actors."""
    process = subprocess.Popen(
        [sys.executable, shipping.__file__, str(folder), *nodes],
        env={**os.environ, **variables}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())


async def test_a_module_that_no_node_has_is_shipped_to_those_that_need_it_and_removed_with_the_program(
    cluster: Cluster, temporary: Path, source: Path
) -> None:
    with only_here(source) as module:
        async with runtime(cluster) as rt:
            await rt.ship(source)
            assert unpacked(temporary) == []
            first, second = [await rt.on(node=name).spawn(module.Shipped) for name in ("n1", "n2")]
            (version, at), (_, other) = await first.version(), await second.version()
            folders = unpacked(temporary)
            assert version == "first"
            assert {Path(at).parent, Path(other).parent} == set(folders)
            assert (await first.path())[0] == str(Path(at).parent)
            for folder in (*folders, *(folder.parent for folder in folders)):
                assert folder.stat().st_mode & 0o777 == 0o700
            await rt.stop(first)
            # As long as the program lives, it may be needed again.
            assert set(unpacked(temporary)) == set(folders)
        await gone(temporary)


async def test_it_is_sent_to_each_node_once_also_to_one_that_joins_later(source: Path, tmp_path: Path) -> None:
    size = 300_000
    (source / "data.bin").write_bytes(os.urandom(size))
    with only_here(source) as module, cluster_of(tmp_path / "key", "n1", "n2") as cluster:
        async with runtime(cluster) as rt:
            await rt.ship(source)
            for nodes in (1, 2):
                await rt.on(node=f"n{nodes}").group(4, module.Shipped)
                await rt.on(node=f"n{nodes}").spawn(module.Shipped)
                # The same content again changes nothing.
                await rt.ship(source)
                assert nodes * size <= rt.traffic().payload_sent < nodes * size + 10_000
            cluster.add("n3")
            later = await rt.on(node="n3", wait=20).spawn(module.Shipped)
            assert (await later.version())[0] == "first"
            assert rt.traffic().payload_sent < 3 * size + 10_000


async def test_two_programs_with_other_versions_of_a_module_do_not_see_each_others(
    cluster: Cluster, source: Path, tmp_path: Path
) -> None:
    second = write_code(tmp_path / "other", "second")
    with (
        program(source, "n1", "n2", **cluster.environment) as (_, one),
        program(second, "n1", "n2", **cluster.environment) as (_, two),
        program(source, "n1", **cluster.environment) as (_, three),
    ):
        assert [version for version, _ in one] == ["first", "first"]
        assert [version for version, _ in two] == ["second", "second"]
        # The same content lies there once.
        assert three == one[:1]


async def test_code_that_is_shipped_again_is_for_new_actors(cluster: Cluster, temporary: Path, source: Path) -> None:
    with only_here(source) as module:
        async with runtime(cluster) as rt:
            await rt.ship(source)
            restart = Restart(backoff=AT_ONCE)
            first = await rt.on(node="n1", restart=restart).spawn(module.Shipped)
            before = await first.version()
            (source / "helpers" / "version.py").write_text("VERSION = 'second'\n")
            await rt.ship(source / ".." / "src")
            second = await rt.on(node="n1").spawn(module.Shipped)
            assert (await second.version())[0] == "second"
            assert len([entry for entry in await second.path() if str(temporary) in entry]) == 1
            # An actor that is made again has the same code.
            os.kill(await first.pid(), signal.SIGKILL)
            while (await rt.info(first)).epoch == 0:
                await asyncio.sleep(0)
            assert await first.version() == before


async def test_actors_that_actors_spawn_have_it_too(cluster: Cluster, temporary: Path, source: Path) -> None:
    with only_here(source) as module:
        async with runtime(cluster) as rt:
            await rt.ship(source)
            actor = await rt.on(node="n1").spawn(module.Shipped)
            mine = await actor.version()
            version, at = await actor.version_on("n2")
            assert (version, Path(at).parent.parent.parent) == ("first", temporary)
            assert mine == await actor.version_on("n1") != (version, at)
            with pytest.raises(RuntimeError, match="an actor ships no code"):
                await actor.ship()


async def test_an_actor_that_outlives_its_program_keeps_it(cluster: Cluster, temporary: Path, source: Path) -> None:
    with only_here(source) as module:
        async with runtime(cluster) as rt:
            await rt.ship(source)
            await rt.on(node="n1", lifetime="cluster", name="kept").spawn(module.Shipped)
            other = await rt.on(node="n2").spawn(module.Shipped)
            _, at = await other.version()
        while Path(at).parent.exists():
            await asyncio.sleep(0.01)
        async with runtime(cluster) as rt:
            kept = await rt.lookup("kept", module.Shipped)
            _, at = await kept.version()
            assert [Path(at).parent] == unpacked(temporary)
            # Its children have it from its node.
            assert (await kept.version_on("n2"))[0] == "first"
            await rt.stop(kept)
            await gone(temporary)


async def test_nothing_is_left_of_a_program_that_is_killed(cluster: Cluster, temporary: Path, source: Path) -> None:
    with program(source, "n1", "n2", **cluster.environment) as (process, _):
        assert len(unpacked(temporary)) == 2
        process.kill()
        await gone(temporary)


async def test_nothing_is_left_of_a_node_that_is_killed_or_told_to_end(
    temporary: Path, source: Path, tmp_path: Path
) -> None:
    with (
        cluster_of(tmp_path / "key", "a", "b") as cluster,
        program(source, "a", "b", **cluster.environment) as (process, _),
    ):
        assert len(unpacked(temporary)) == 2
        cluster.nodes[1].process.kill()
        while len(unpacked(temporary)) > 1:
            await asyncio.sleep(0.01)
        assert cluster.nodes[0].end() == 0
        assert unpacked(temporary) == []
        process.kill()


async def test_a_module_that_a_node_does_not_have_is_named_with_the_node_and_what_to_do(
    cluster: Cluster, source: Path
) -> None:
    with only_here(source) as module:
        async with runtime(cluster) as rt:
            said = "Shipped-1 cannot be made on n2, which cannot load its class: No module named 'shipped_module'"
            with pytest.raises(aiodaft.SpawnFailed, match=f"{said}. Send the code with `await rt.ship"):
                await rt.on(node="n2").spawn(module.Shipped)
            # A module that it imports.
            await rt.ship(source / "shipped_module.py")
            with pytest.raises(aiodaft.SpawnFailed, match="on n1, which .*: No module named 'helpers'. Send the code"):
                await rt.on(node="n1").spawn(module.Shipped)
            # Arguments are needed, too; these are pickled.
            local = module.Shipped, {object()}
            with pytest.raises(aiodaft.SpawnFailed, match="on n1, which .*: No module named 'helpers'. Send the code"):
                await rt.on(node="n1").spawn(Takes, local)


async def test_a_module_that_differs_is_refused_with_both_files(cluster: Cluster, source: Path, tmp_path: Path) -> None:
    other = write_code(tmp_path / "other", "second")
    text = (source / "shipped_module.py").read_text()
    (other / "shipped_module.py").write_text(f"{text}\n# Something else.\n")
    with only_here(source) as module:
        async with runtime(cluster) as rt:
            await rt.ship(other)
            said = f"made on n1: shipped_module is .*/shipped_module.py there, which differs from {source}/"
            with pytest.raises(aiodaft.SpawnFailed, match=f"{said}.* Send that with `await rt.ship"):
                await rt.on(node="n1").spawn(module.Shipped)
            # It does not have the class at all.
            (other / "shipped_module.py").write_text("")
            await rt.ship(other)
            with pytest.raises(aiodaft.SpawnFailed, match="cannot load its class: .*no attribute 'Shipped'"):
                await rt.on(node="n1").spawn(module.Shipped)
            await rt.ship(source)
            actor = await rt.on(node="n1").spawn(module.Shipped)
            assert (await actor.version())[0] == "first"


async def test_a_file_that_is_changed_after_the_spawn_does_not_keep_an_actor_from_being_restarted(
    cluster: Cluster, source: Path
) -> None:
    with only_here(source) as module:
        async with runtime(cluster) as rt:
            await rt.ship(source)
            actor = await rt.on(node="n1", restart=Restart(backoff=AT_ONCE)).spawn(module.Shipped)
            (source / "shipped_module.py").write_text("changed")
            os.kill(await actor.pid(), signal.SIGKILL)
            while (await rt.info(actor)).epoch == 0:
                await asyncio.sleep(0)
            assert (await actor.version())[0] == "first"


@pytest.mark.parametrize("fork", [True, False])
async def test_a_runtime_of_one_machine_ships_too(
    fork: bool, temporary: Path, source: Path, nothing_left_behind: None
) -> None:
    with only_here(source) as module:
        async with aiodaft.Runtime(fork=fork) as rt:
            with pytest.raises(aiodaft.SpawnFailed, match="shipped_module"):
                await rt.spawn(module.Shipped)
            await rt.ship(source)
            actor = await rt.spawn(module.Shipped)
            version, at = await actor.version()
            assert (version, [Path(at).parent]) == ("first", unpacked(temporary))
    assert unpacked(temporary) == []


async def test_nothing_is_left_of_a_program_without_a_cluster_that_is_killed(temporary: Path, source: Path) -> None:
    with program(source) as (process, _):
        assert len(unpacked(temporary)) == 1
        process.kill()
        await gone(temporary)


async def test_what_a_machine_that_was_cut_off_left_is_removed_by_the_next_program_that_ships(
    temporary: Path, source: Path
) -> None:
    left = temporary / "aiodaft-code-left" / "1"
    left.mkdir(parents=True)
    outside = temporary / "outside"
    outside.mkdir()
    (temporary / "aiodaft-code-link").symlink_to(outside)
    with program(source):
        assert [folder.parent.name == "aiodaft-code-left" for folder in unpacked(temporary)] == [False]
    assert outside.exists()
    (temporary / "aiodaft-code-link").unlink()


async def test_a_package_and_a_module_are_shipped_under_their_names(cluster: Cluster, source: Path) -> None:
    with only_here(source) as module:
        async with runtime(cluster) as rt:
            await rt.ship(str(source / "helpers"))
            await rt.ship(source / "shipped_module.py")
            actor = await rt.on(node="n1").spawn(module.Shipped)
            assert (await actor.version())[0] == "first"


async def test_what_an_actor_spawns_imports_what_its_program_has_shipped(cluster: Cluster, source: Path) -> None:
    with only_here(source):
        async with runtime(cluster) as rt:
            await rt.ship(source)
            parent = await rt.on(node="n1").spawn(Parent)
            child = await parent.bear_of("shipped_module", "Shipped", node="n2")
            assert (await child.version())[0] == "first"
            with pytest.raises(RuntimeError, match="an actor ships no code"):
                await parent.ship(str(source))


async def test_what_does_not_exist_and_a_codec_without_code_are_refused(cluster: Cluster, source: Path) -> None:
    async with runtime(cluster) as rt:
        with pytest.raises(FileNotFoundError, match="not_there"):
            await rt.ship(source / "not_there")
    async with runtime(cluster, codec="msgpack") as rt:
        with pytest.raises(ValueError, match="sends no code: install it on every machine"):
            await rt.ship(source)
    with pytest.raises(aiodaft.exceptions.RuntimeClosed):
        await rt.ship(source)
