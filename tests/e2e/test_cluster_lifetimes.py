"""The common ends of programs and actors of a cluster."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import lone_owner
import pytest
from clusters import Cluster, attached, cluster_of, two_nodes
from inside import resources_of
from leaks import ended, is_alive
from parents import Child, Parent, pid_in

import aiodaft

pytestmark = pytest.mark.timeout(120)


cluster = two_nodes
rt = attached


@contextmanager
def started(cluster: Cluster, how: str) -> Generator[subprocess.Popen[str]]:
    """A program that is killed at the end of the block."""
    arguments = [sys.executable, lone_owner.__file__, how]
    with subprocess.Popen(arguments, env=cluster.environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def program(cluster: Cluster, how: str) -> Generator[list[int]]:
    """A program that has named an actor: the pids of both."""
    with started(cluster, how) as process:
        assert process.stdout is not None
        yield list(map(int, process.stdout.readline().split()))


async def no_names(rt: aiodaft.Runtime) -> None:
    """Wait until no actor has a name."""
    while await rt.names():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("node", ["n1", "n2"])
async def test_what_an_actor_has_spawned_ends_with_it_on_every_node(rt: aiodaft.Runtime, node: str) -> None:
    parent = await rt.on(node=node, restart="temporary").spawn(Parent)
    children = [await parent.bear(node=where) for where in ("n1", "n2")]
    children += await parent.bear_group(2, spread=True)
    grandchild = await (await parent.bear_parent(node="n1")).bear(node="n2")
    await parent.name_child("child")
    assert [await one.increment() for one in (*children, grandchild)] == [1, 1, 1, 1, 1]
    assert [(await parent.look_at(child)).node for child in children[:2]] == ["n1", "n2"]
    pids = [await one.pid() for one in (*children, grandchild)]
    os.kill(await parent.pid(), signal.SIGKILL)
    await ended(*pids)
    await no_names(rt)


async def test_a_supervised_child_of_an_actor_is_made_again_and_found_by_its_name(rt: aiodaft.Runtime) -> None:
    parent = await rt.on(node="n1").spawn(Parent)
    await parent.bear(5, node="n2", restart="permanent")
    await parent.name_child("child")
    child = await rt.lookup("child", Child)
    assert await child.increment() == 6
    before = await child.pid()
    await parent.kill_child()
    await ended(before)
    while True:
        try:
            assert await child.increment() == 6
            break
        except aiodaft.ActorDied:
            await asyncio.sleep(0)
    await rt.stop(parent)
    with pytest.raises(aiodaft.DaftError):
        await child.increment()


async def test_the_loss_of_the_node_of_an_actor_ends_what_it_has_spawned_elsewhere(tmp_path: Path) -> None:
    with cluster_of(tmp_path / "key", "n1", "n2", options=("--lease", "2")) as cluster:
        async with aiodaft.Runtime(cluster.address, key_file=cluster.key_file, unhandled="log") as rt:
            parent = await rt.on(node="n2").spawn(Parent)
            child = await parent.bear(node="n1")
            pid = await child.pid()
            cluster.nodes[1].process.kill()
            await ended(pid)
            assert await (await rt.on(node="n1").spawn(Child)).increment() == 1


async def test_the_supervised_actors_of_others_are_found_and_their_names_end_with_the_owner(
    rt: aiodaft.Runtime, cluster: Cluster
) -> None:
    with program(cluster, "supervised") as (owner, worker):
        found = await rt.lookup("supervised", Child)
        assert await found.increment() == 1
        os.kill(owner, signal.SIGKILL)
        await ended(worker)
        await no_names(rt)


async def test_an_actor_with_the_lifetime_of_the_cluster_serves_others_when_its_program_is_killed(
    rt: aiodaft.Runtime, cluster: Cluster
) -> None:
    with program(cluster, "cluster") as (owner, worker):
        found = await rt.lookup("lasting", Child)
        assert await found.increment() == 6
        os.kill(owner, signal.SIGKILL)
        await ended(owner)
    # Longer than a node waits for a program that is gone: a program that comes and goes is noticed after that.
    with program(cluster, "supervised") as (other, supervised):
        os.kill(other, signal.SIGKILL)
        await ended(supervised)
    assert await found.increment() == 7
    parent = await rt.spawn(Parent)
    assert await parent.find("lasting") == 8
    shown = cluster.run("ps").stdout
    assert f"pid {worker}: Child-1, named lasting (of the cluster)" in shown
    info = await rt.info(found)
    assert (info.pid, info.names, info.node) == (worker, ("lasting",), "n2")
    with pytest.raises(aiodaft.SpawnFailed, match="cannot share the process of Child-1"):
        await rt.on(with_=found).spawn(Child)
    done = cluster.run("stop", "lasting", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"name": "lasting", "stopped": "Child-1"}
    assert not is_alive(worker)
    await no_names(rt)
    done = cluster.run("stop", "lasting")
    assert (done.returncode, "no actor is named 'lasting'" in done.stderr) == (1, True)


async def test_any_program_stops_an_actor_of_the_cluster_and_its_resources_are_free(
    rt: aiodaft.Runtime, cluster: Cluster
) -> None:
    _, before = await resources_of(rt)
    async with aiodaft.Runtime(cluster.address, key_file=cluster.key_file) as other:
        made = await other.on(node="n1", cpus=3, lifetime="cluster", name="kept").spawn(Parent)
        child = await made.bear()
        assert await child.increment() == 1
    found = await rt.lookup("kept", Parent)
    assert await found.answer() == 42
    # Its children end with it, not with the program.
    assert await found.ask_child() == 2
    _, now = await resources_of(rt)
    assert now["cpus"] == before["cpus"] - 3
    await rt.stop(found)
    assert await rt.names() == ()
    _, after = await resources_of(rt)
    assert after == before


async def test_of_many_programs_one_makes_the_actor_that_all_get(rt: aiodaft.Runtime, cluster: Cluster) -> None:
    with ExitStack() as stack:
        pids = [stack.enter_context(program(cluster, "get_or_create")) for _ in range(10)]
        assert len({worker for _, worker in pids}) == 1
        assert len({owner for owner, _ in pids}) == 10
    shared = await rt.get_or_create("shared", Child)
    assert await shared.pid() == pids[0][1]
    await rt.stop(shared)


async def test_a_program_that_is_killed_while_it_makes_an_actor_of_the_cluster_leaves_nothing(
    rt: aiodaft.Runtime, cluster: Cluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with started(cluster, str(gate)):
        pid = await pid_in(tmp_path / "gate.pid")
        with pytest.raises(aiodaft.NameNotFound):
            await rt.lookup("never", Child)
    await ended(pid)
    # The reservation ends as well.
    assert await (await rt.get_or_create("never", Child, 2)).increment() == 3


async def test_an_actor_of_the_cluster_whose_process_dies_is_gone_with_its_name(rt: aiodaft.Runtime) -> None:
    actor = await rt.on(lifetime="cluster", name="mortal").spawn(Child)
    os.kill(await actor.pid(), signal.SIGKILL)
    with pytest.raises(aiodaft.ActorDied, match="SIGKILL"):
        await actor.increment()
    await no_names(rt)


async def test_what_cannot_outlive_a_program_is_refused_before_anything_is_made(rt: aiodaft.Runtime) -> None:
    neighbour = await rt.spawn(Child)
    with pytest.raises(ValueError, match="it needs a name"):
        await rt.on(lifetime="cluster").spawn(Child)
    with pytest.raises(ValueError, match="cannot share what its program has"):
        await rt.on(lifetime="cluster", name="x", with_=neighbour).spawn(Child)
    with pytest.raises(ValueError, match="no program is left to restart it"):
        await rt.on(lifetime="cluster", name="x", restart="permanent").spawn(Child)
    async with rt.scope(restart=aiodaft.Restart()) as scope:
        with pytest.raises(ValueError, match="no program is left to restart it"):
            await scope.on(lifetime="cluster", name="x").spawn(Child)
        actor = await scope.on(lifetime="cluster", name="x", restart="temporary").spawn(Child)
    # The scope has ended.
    assert await actor.increment() == 1
    await rt.stop(actor)
    assert await rt.names() == ()


async def test_a_drain_moves_what_actors_supervise_and_waits_for_what_outlives_its_program(tmp_path: Path) -> None:
    with cluster_of(tmp_path / "key", "n1", "n2") as cluster:
        async with aiodaft.Runtime(cluster.address, key_file=cluster.key_file) as rt:
            parent = await rt.on(node="n1").spawn(Parent)
            mover = await parent.bear(5, spread=True, restart="permanent")
            assert (await parent.look_at(mover)).node == "n2"
            kept = await rt.on(node="n2", lifetime="cluster", name="kept").spawn(Child)
            assert [await one.increment() for one in (mover, kept)] == [6, 1]
            async with asyncio.TaskGroup() as tasks:
                draining = tasks.create_task(asyncio.to_thread(cluster.run, "drain", "n2"))
                while [node.state for node in await rt.nodes()] != ["ready", "draining"]:
                    await asyncio.sleep(0.01)
                assert "is being drained" in (await asyncio.to_thread(cluster.run, "ps")).stdout
                while (await parent.look_at(mover)).node != "n1":
                    await asyncio.sleep(0.01)
                # As a new incarnation.
                assert await mover.increment() == 6
                assert await kept.increment() == 2
                await asyncio.to_thread(cluster.run, "stop", "kept")
            done = draining.result()
            assert (done.returncode, done.stderr) == (0, "")
            assert "node n2 is drained" in done.stdout
