"""Programs that use three hosts with a node each; the cost of a fault of a moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator

import pytest
from far_actors import Far
from host_clusters import HostCluster, cluster_on, network_bytes, on_host_three, spawn_on, use_all
from network_namespaces import network

import aiodaft
from aiodaft.exceptions import OutcomeUnknown

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_factories=["uvloop"])]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostCluster]:
    key_file = tmp_path_factory.mktemp("cluster") / "key"
    # Those of `test_cluster_faults.py` use the other version of IP.
    with network("one", "two", "three") as net, cluster_on(net, key_file, ipv6=True) as made:
        asyncio.run(use_all(made))
        yield made


rt = on_host_three


async def test_a_program_uses_actors_on_three_hosts_and_they_each_other(
    rt: aiodaft.Runtime, cluster: HostCluster
) -> None:
    actors = [await spawn_on(rt, host) for host in cluster.net.hosts]
    assert [(await actor.where())[0] for actor in actors] == ["one", "two", "three"]
    first, second, third = actors
    # A ref goes from each host to the next.
    assert await third.tell(second.tell(first.tell(7))) == 7
    for caller in actors:
        for number, callee in enumerate(actors):
            if callee is not caller:
                assert await caller.relay(callee, number) == number
    assert [await actor.heard() for actor in actors] == [[7, 0, 0], [7, 1, 1], [7, 2, 2]]


async def test_controllers_on_different_hosts_share_named_actors(rt: aiodaft.Runtime, cluster: HostCluster) -> None:
    one, two, three = cluster.net.hosts
    await rt.name(await spawn_on(rt, two), "shared")
    with cluster.controllers_on(one):
        async with cluster.runtime(one) as other:
            found = await other.lookup("shared", Far)
            mine = await spawn_on(other, three)
            assert await mine.relay(found, 1) == 1
            assert await found.tell(2) == 2
    assert await (await rt.lookup("shared", Far)).heard() == [1, 2]


async def test_a_thousand_calls_cost_the_coordinators_host_nothing(rt: aiodaft.Runtime, cluster: HostCluster) -> None:
    one, two, _ = cluster.net.hosts
    actor = await spawn_on(rt, two)
    await actor.tell(0)
    before, calls_before = network_bytes(one), network_bytes(two)
    for number in range(1000):
        await actor.tell(number)
    # Leases, which have to do with time and not with calls.
    assert network_bytes(one) - before < 20_000
    assert network_bytes(two) - calls_before > 100_000


async def test_d54_a_short_partition_loses_nothing(rt: aiodaft.Runtime, cluster: HostCluster) -> None:
    net = cluster.net
    one, two, _ = net.hosts
    first, second = await spawn_on(rt, one), await spawn_on(rt, two)
    waiting = second.wait()
    net.partition(two)
    calls: list[Awaitable[object]] = [second.tell(0), first.relay(second, 1)]
    assert await first.tell(5) == 5
    net.heal()
    assert [await call for call in calls] == [0, 1]
    assert sorted(await second.heard()) == [0, 1]
    assert not waiting.done()


async def test_d58_resets_fail_the_calls_in_flight_and_the_next_ones_work(
    rt: aiodaft.Runtime, cluster: HostCluster
) -> None:
    one, two, three = cluster.net.hosts
    first, second = await spawn_on(rt, one), await spawn_on(rt, two)
    sent = answered = unknown = 0
    for number in range(8):
        calls = [second.tell(sent + offset) for offset in range(5)]
        sent += len(calls)
        if number % 2:
            await asyncio.sleep(0)
        three.reset_connections(two)
        for call in calls:
            try:
                await call
                answered += 1
            except OutcomeUnknown:
                unknown += 1
    assert answered + unknown == sent
    assert unknown > 0
    heard = await second.heard()
    assert len(set(heard)) == len(heard) >= answered
    one.reset_connections(two)
    assert await first.relay(second, -1) == -1


async def test_a_value_is_lost_with_the_connection_between_its_producer_and_its_owner(
    rt: aiodaft.Runtime, cluster: HostCluster
) -> None:
    one, two, three = cluster.net.hosts
    first, second = await spawn_on(rt, one), await spawn_on(rt, two)
    value, waiting = second.make(1 << 20), second.wait()
    await value.ready()
    three.reset_connections(two)
    with pytest.raises(OutcomeUnknown):
        await waiting
    # Over another connection.
    assert await second.tell(1) == 1
    with pytest.raises(aiodaft.exceptions.PeerLost) as told:
        await first.length(value)
    assert "the connection to" in str(told.value)
    with pytest.raises(aiodaft.exceptions.PeerLost):
        await value
