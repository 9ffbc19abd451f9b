"""Placement on several nodes, each a process of its own, here on one machine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from clusters import Cluster, attached, cluster_of, start_fork_servers
from inside import awaited
from travellers import Traveller

import aiodaft
from aiodaft import Actor, method

pytestmark = pytest.mark.timeout(120)


class Shard(Actor, gpus=1):
    """Has a GPU."""

    @method
    async def ping(self) -> int:
        return 1


class Onlooker(Actor):
    """Looks at the cluster from inside."""

    @method
    async def free(self) -> dict[str, float]:
        """The free CPUs of each node."""
        return {node.name: node.free["cpus"] for node in await aiodaft.current_runtime().nodes(patience=30)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes with 8 CPUs each; n2 and n3 have four GPUs."""
    with cluster_of(tmp_path_factory.mktemp("cluster") / "key", "n1") as made:
        made.add("n2", "--gpus", "4", "--label", "zone=a")
        made.add("n3", "--gpus", "4", "--label", "zone=b")
        start_fork_servers(made)
        yield made


rt = attached


async def nodes_of(rt: aiodaft.Runtime, actors: Iterable[object]) -> list[str]:
    return [(await rt.info(actor)).node for actor in actors]


async def test_labels_and_the_places_of_others_choose_the_node(rt: aiodaft.Runtime) -> None:
    first = await rt.on(labels={"zone": "b"}).spawn(Traveller)
    near = await rt.on(near=first, cpus=1).spawn(Traveller)
    apart = await rt.on(apart_from=[first, near], gpus=1).spawn(Traveller)
    assert await nodes_of(rt, (first, near, apart)) == ["n3", "n3", "n2"]
    with pytest.raises(aiodaft.exceptions.InsufficientResources) as caught:
        await rt.on(labels={"zone": "a"}, apart_from=apart).spawn(Traveller)
    assert str(caught.value).endswith("but no node has that: n1: no label 'zone'; n2: Traveller-3 there; n3: zone='b'")


async def test_a_program_and_its_actors_see_what_each_node_has(rt: aiodaft.Runtime, cluster: Cluster) -> None:
    await rt.on(node="n2", cpus=2, gpus=0.5).spawn(Traveller)
    first, second, third = await rt.nodes(patience=30)
    cpus, total = {"cpus": 8, "gpus": 0}, {"cpus": 8, "gpus": 4}
    one, two = cluster.nodes[0].address, cluster.nodes[1].address
    assert first == aiodaft.state.NodeInfo("n1", {}, "ready", cpus, cpus, 0, one)
    assert second == aiodaft.state.NodeInfo("n2", {"zone": "a"}, "ready", total, {"cpus": 6, "gpus": 3.5}, 1, two)
    assert (third.name, third.labels, third.free) == ("n3", {"zone": "b"}, total)
    onlooker = await rt.on(node="n3", cpus=1).spawn(Onlooker)
    assert await onlooker.free() == {"n1": 8, "n2": 6, "n3": 7}


async def test_actors_are_packed_or_spread(rt: aiodaft.Runtime) -> None:
    # Nodes with GPUs are left to those that need some.
    assert await nodes_of(rt, await rt.on(cpus=1).group(3, Traveller)) == ["n1"] * 3
    packed = [await rt.spawn(Shard) for _ in range(3)]
    assert await nodes_of(rt, packed) == ["n2"] * 3
    spread = await rt.on(spread=True).group(4, Shard)
    assert sorted(await nodes_of(rt, spread)) == ["n2", "n3", "n3", "n3"]


async def test_a_gang_is_on_several_nodes_or_on_none(rt: aiodaft.Runtime) -> None:
    async with rt.group(8, Shard) as shards:
        assert await nodes_of(rt, shards) == ["n2"] * 4 + ["n3"] * 4
        assert await shards.all(Shard.ping) == [1] * 8
    with pytest.raises(aiodaft.exceptions.InsufficientResources) as caught:
        await rt.group(9, Shard)
    assert str(caught.value) == (
        "each of the 9 actors Shard-2 needs gpus=1, but there is room for 8: n2: room for 4; n3: room for 4; "
        "n1: 0 whole gpus free of 0"
    )
    assert len(await rt.group(8, Shard)) == 8


async def test_a_mesh_has_slices_of_several_nodes(rt: aiodaft.Runtime) -> None:
    async with rt.mesh(hosts=2, gpus=2) as mesh:
        assert [(one.node, one.gpus) for one in mesh] == [("n2", (0, 1)), ("n3", (0, 1))]
        second = await mesh[1].group(2, Shard)
        first = await mesh.group(2, Shard)
        assert await nodes_of(rt, [*first, *second]) == ["n2"] * 2 + ["n3"] * 2
        with pytest.raises(
            aiodaft.exceptions.InsufficientResources, match="n2: 0 whole gpus free of 2; n3: 0 whole gpus free of 2"
        ):
            await mesh.spawn(Shard)
        others = await rt.group(4, Shard)
        assert [(await rt.info(shard)).gpus for shard in others] == [(2,), (3,), (2,), (3,)]
    with pytest.raises(
        aiodaft.exceptions.InsufficientResources,
        match="mesh of 3 x 1 GPUs needs 3 nodes with gpus=1 each, but only 2 nodes have",
    ):
        await rt.mesh(hosts=3, gpus=1)


async def test_what_another_runtime_has_taken_is_learned(cluster: Cluster, rt: aiodaft.Runtime) -> None:
    async with aiodaft.Runtime(cluster.address, key_file=cluster.key_file) as other:
        await rt.spawn(Shard)
        mesh = await other.mesh(hosts=1, gpus=3)
        assert mesh[0].node == "n2"
        # This runtime still sees room on n2.
        assert await nodes_of(rt, [await rt.spawn(Shard)]) == ["n3"]
        with pytest.raises(aiodaft.exceptions.InsufficientResources, match="there is room for 3"):
            await rt.group(4, Shard)
        waiting = asyncio.get_running_loop().create_task(awaited(rt.on(wait=40).group(4, Shard)))
        await other.on(labels={"zone": "b"}).spawn(Shard)
    # The end of the other runtime frees its slices and the GPUs of its actors.
    assert sorted(await nodes_of(rt, await waiting)) == ["n2", "n2", "n2", "n3"]


async def test_a_wait_ends_when_a_node_joins(cluster: Cluster, rt: aiodaft.Runtime) -> None:
    with pytest.raises(aiodaft.exceptions.InsufficientResources, match="there is no node 'n4'; there is n1, n2 and n3"):
        await rt.on(node="n4").spawn(Traveller)
    waiting = asyncio.get_running_loop().create_task(awaited(rt.on(node="n4", wait=40).spawn(Traveller)))
    joined = await asyncio.to_thread(cluster.add, "n4")
    traveller = await waiting
    assert await nodes_of(rt, [traveller]) == ["n4"]
    await rt.stop(traveller)
    with joined.process:
        assert await asyncio.to_thread(joined.end) == 0


@pytest.mark.timeout(180)
async def test_supervised_actors_of_a_lost_node_come_back_where_there_is_room(tmp_path: Path) -> None:
    with cluster_of(tmp_path / "key", "n1", "n2", "n3", options=("--lease", "2")) as cluster:
        async with aiodaft.Runtime(cluster.address, key_file=cluster.key_file, unhandled="log") as rt:
            first = await rt.on(node="n1").spawn(Traveller)
            place = rt.on(restart=aiodaft.Restart(intensity=3), cpus=8, apart_from=first)
            there = await place.spawn(Traveller)
            assert (await rt.info(there)).node == "n2"
            guest = await rt.on(restart="permanent", with_=there).spawn(Traveller)
            cluster.nodes[1].process.kill()
            while not ((await rt.info(there)).restarts and (await rt.info(guest)).restarts):
                await asyncio.sleep(0.01)
            info = await rt.info(there)
            assert info.node == "n3"
            assert await there.pid() == await guest.pid() == info.pid
            assert await there.increment(1) == 2
            # There is only n1 left, where it must not be.
            cluster.nodes[2].process.kill()
            with pytest.raises(aiodaft.exceptions.RestartLimitReached) as caught:
                while True:
                    with suppress(aiodaft.exceptions.PeerLost):
                        await there.increment(1)
                    await asyncio.sleep(0.01)
            assert "n1: Traveller-1 there" in str(caught.value.__cause__)
