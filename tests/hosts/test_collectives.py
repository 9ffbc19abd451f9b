"""Collectives between hosts: no memory is shared, and all members have the bits of local torch."""

from __future__ import annotations

import asyncio
from functools import reduce
from pathlib import Path

import pytest
import torch
from collective_actors import Member, made
from host_clusters import cluster_on
from network_namespaces import network
from torch import Tensor

import aiodaft
from aiodaft import Ref
from aiodaft._protocol.groups.collective import MEDIUM, SMALL
from aiodaft._runtime.groups.collectives import Members

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(120), pytest.mark.asyncio(loop_factories=["uvloop"])]


def values(members: list[Member], *shape: int) -> list[Ref[Tensor]]:
    return [member.make(seed, *shape) for seed, member in enumerate(members)]


def total(count: int, *shape: int) -> Tensor:
    return reduce(torch.add, [made(seed, *shape) for seed in range(count)])


def all_equal(results: list[Tensor], expected: Tensor) -> bool:
    return all(torch.equal(result, expected) for result in results)


async def test_members_on_two_hosts_have_the_same_bits_as_local_torch(tmp_path: Path) -> None:
    with network("one", "two") as net, cluster_on(net, tmp_path / "key") as cluster:
        one = net.hosts[0]
        with cluster.controllers_on(one):
            async with cluster.runtime(one) as rt:
                # In turns on both hosts.
                members = [await rt.on(node=host.name).spawn(Member) for host in net.hosts * 2]
                for nbytes in (4, SMALL, MEDIUM, MEDIUM + 4):
                    for count in (2, 4):
                        refs = values(members[:count], nbytes // 4)
                        # The algorithm is chosen by the size of the existing values.
                        await asyncio.gather(*(ref.ready() for ref in refs))
                        assert not Members(refs).one_memory
                        assert all_equal(await aiodaft.all_reduce(refs), total(count, nbytes // 4))
                await members[1].count_questions()
                (copy,) = aiodaft.broadcast(members[0].make(0, MEDIUM // 4), members[1:2])
                # It gets 1 MiB unasked.
                await copy.ready()
                assert await members[1].count_questions() == 0
                assert all_equal(await aiodaft.all_reduce(values(members, MEDIUM)), total(4, MEDIUM))
                parts = await aiodaft.reduce_scatter(values(members, 1001, 7))
                assert torch.equal(torch.cat(parts), total(4, 1001, 7))
                assert all_equal(await aiodaft.broadcast(members[0].make(3, MEDIUM), members), made(3, MEDIUM))
