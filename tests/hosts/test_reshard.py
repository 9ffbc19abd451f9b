"""Shards move between hosts: exact, each byte over the network once, and not at all within a host."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
from host_clusters import HostCluster, cluster_on, network_bytes, use_all
from network_namespaces import network
from sharded import Rank, assert_has, tp, whole_tensors

from aiodaft import Refs
from aiodaft.resharding import Sharding, reshard

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(120), pytest.mark.asyncio(loop_factories=["uvloop"])]

SHAPE = (1536, 1024)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostCluster]:
    with network("one", "two") as net, cluster_on(net, tmp_path_factory.mktemp("cluster") / "key") as made:
        asyncio.run(use_all(made))
        yield made


@pytest.mark.parametrize("dim", [0, 1])
async def test_the_network_carries_what_another_host_has_and_no_more(cluster: HostCluster, dim: int) -> None:
    """Rows to rows, and rows to columns: parts without gaps, and with gaps where they arrive."""
    one, two = cluster.net.hosts
    source, destination = tp(4, SHAPE), tp(3, SHAPE, dim)
    plan = reshard(source, destination)
    whole = whole_tensors({"w": Sharding(shape=SHAPE, dtype=torch.float32)})
    with cluster.controllers_on(one):
        async with cluster.runtime(one) as rt:
            # Ranks 0 and 1 of the source are on one host, and all others on the other one.
            far, near = await rt.on(node="one").group(2, Rank), await rt.on(node="two").group(2, Rank)
            new = await rt.on(node="two").group(3, Rank)
            await far.each(Rank.copy, [source.shard(whole, rank) for rank in (0, 1)])
            await near.each(Rank.copy, [source.shard(whole, rank) for rank in (2, 3)])
            for how in (Rank.lend, Rank.give):
                shards = Refs([*far.all(how), *near.all(how)])
                await Refs([*shards]).gather().ready()
                before = network_bytes(two)
                moved = await plan.move(shards, to=new)
                for ref in moved:
                    await ref.ready()
                carried = network_bytes(two) - before
                from_far = sum(plan.sent[:2])
                assert from_far <= carried < 1.2 * from_far
                await assert_has(new, destination, whole, moved)
