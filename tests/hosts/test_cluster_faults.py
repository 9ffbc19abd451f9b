"""The rest of programs on three hosts when a host, or the network between them, fails for longer than TCP waits."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Iterator
from pathlib import Path

import pytest
from host_clusters import HostCluster, cluster_on, is_lost, network_bytes, on_host_three, spawn_on, spawn_when_there
from leaks import is_alive, resident
from network_namespaces import network

import aiodaft
from aiodaft.exceptions import DaftError, OutcomeUnknown

# Bytes of a value that takes its time.
BIG = 64 << 20

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(120), pytest.mark.asyncio(loop_factories=["uvloop"])]


@pytest.fixture
def cluster(nothing_left_behind: None, tmp_path: Path) -> Iterator[HostCluster]:
    with network("one", "two", "three") as net, cluster_on(net, tmp_path / "key") as made:
        yield made


rt = on_host_three


async def test_d54_a_partition_fails_calls_on_both_sides_and_the_node_comes_back(
    rt: aiodaft.Runtime, cluster: HostCluster
) -> None:
    net = cluster.net
    one, two, _ = net.hosts
    first, second = await spawn_on(rt, one), await spawn_on(rt, two)
    _, pid = await second.where()
    await second.relay(first, 0)
    # One that waits, one that is sent now, and one between others.
    calls: list[Awaitable[object]] = [second.wait(), first.wait_for(second)]
    net.partition(two)
    calls += [second.tell(1), first.relay(second, 2)]
    for call in calls:
        assert await is_lost(call)
    assert await first.tell(3) == 3
    net.heal()
    again = await spawn_when_there(rt, two)
    assert await first.relay(again, 4) == 4
    assert await again.relay(first, 5) == 5
    assert await first.heard() == [0, 3, 5]
    # It lives if its owner was back before its node gave the owner up.
    try:
        assert await second.tell(6) == 6
    except OutcomeUnknown:
        while is_alive(pid):
            await asyncio.sleep(0.01)


async def test_d54_a_coordinator_that_is_cut_off_costs_calls_between_other_hosts_nothing(
    rt: aiodaft.Runtime, cluster: HostCluster
) -> None:
    net = cluster.net
    one, two, three = net.hosts
    second, third = await spawn_on(rt, two), await spawn_on(rt, three)
    await second.relay(third, 0)
    waiting = [second.wait(), third.wait_for(second)]
    net.partition(one)
    # The coordinator gives up the others, and tells them when it can.
    while len(cluster.nodes_as_seen_by(one)) > 1:
        assert await second.relay(third, 1) == 1
    net.heal()
    while len(cluster.nodes_as_seen_by(one)) < 3:
        assert await second.relay(third, 2) == 2
    assert await (await spawn_when_there(rt, one)).relay(third, 3) == 3
    for number in range(1000):
        assert await second.tell(number) == number
    assert not any(call.done() for call in waiting)


async def test_d55_a_partition_in_the_middle_of_a_transfer_fails_it_at_both_consumers(
    rt: aiodaft.Runtime, cluster: HostCluster
) -> None:
    net = cluster.net
    one, two, three = net.hosts
    first, second, third = [await spawn_on(rt, host) for host in (one, two, three)]
    value = second.make(BIG)
    # It needs half a minute for that.
    net.limit(two, 20_000_000)
    before = network_bytes(two)
    transfers = [first.length(value), third.length(value)]
    while network_bytes(two) < before + BIG // 16:
        await asyncio.sleep(0.01)
    net.partition(two)
    for transfer in transfers:
        with pytest.raises(DaftError):
            await transfer
    assert await first.tell(1) == 1
    net.heal()
    again = await spawn_when_there(rt, two)
    assert await first.length(again.make(BIG)) == BIG


async def test_d63_a_slow_network_with_a_large_payload_starves_no_call_and_no_lease(
    rt: aiodaft.Runtime, cluster: HostCluster
) -> None:
    net = cluster.net
    one, two, _ = net.hosts
    first, second, third = [await spawn_on(rt, host) for host in (one, two, two)]
    net.limit(two, 5_000_000)
    # It needs ten seconds, longer than a lease.
    length, calls = second.length(first.make(BIG // 10)), 0
    while not length.done():
        assert await third.tell(calls) == calls
        calls += 1
    assert await length == BIG // 10
    assert calls > 1


async def test_d66_a_consumer_that_is_stopped_costs_its_producer_no_memory_and_others_nothing(
    rt: aiodaft.Runtime, cluster: HostCluster
) -> None:
    producer, stopped, other = [await spawn_on(rt, host) for host in cluster.net.hosts]
    (_, producer_pid), (_, stopped_pid) = await producer.where(), await stopped.where()
    value = producer.make(BIG // 2)
    assert await other.length(value) == BIG // 2
    before = resident(producer_pid)
    os.kill(stopped_pid, signal.SIGSTOP)
    lengths = [stopped.length(value) for _ in range(20)]
    for number in range(300):
        assert await producer.tell(number) == await other.tell(number)
    assert await other.length(producer.make(BIG // 4)) == BIG // 4
    assert resident(producer_pid) < before + BIG // 2
    os.kill(stopped_pid, signal.SIGCONT)
    assert [await length for length in lengths] == [BIG // 2] * 20


@pytest.mark.parametrize("away", [True, False], ids=["to it", "from it"])
async def test_d56_a_one_way_drop_fails_calls_on_both_sides(
    rt: aiodaft.Runtime, cluster: HostCluster, away: bool
) -> None:
    net = cluster.net
    one, two, three = net.hosts
    first, second = await spawn_on(rt, one), await spawn_on(rt, two)
    await second.relay(first, 0)
    calls = [second.wait(), first.wait_for(second), second.wait_for(first)]
    for other in (one, three):
        net.drop(*((other, two) if away else (two, other)))
    for call in [*calls, second.tell(1), first.relay(second, 1)]:
        assert await is_lost(call)
    net.heal()
    assert await first.relay(await spawn_when_there(rt, two), 4) == 4


async def test_d57_lost_packets_lose_no_call_and_no_order(rt: aiodaft.Runtime, cluster: HostCluster) -> None:
    net = cluster.net
    first, second = await spawn_on(rt, net.hosts[0]), await spawn_on(rt, net.hosts[1])
    # Of so many packets, one connection or another is given up if more than a tenth is lost each way.
    net.lose(10)
    calls = [second.tell(number) for number in range(300)]
    relayed = [first.relay(second, number) for number in range(1000, 1030)]
    assert [await call for call in calls] == [*range(300)]
    assert [await call for call in relayed] == [*range(1000, 1030)]
    net.heal()
    heard = await second.heard()
    assert [number for number in heard if number < 1000] == [*range(300)]
    assert [number for number in heard if number >= 1000] == [*range(1000, 1030)]


async def test_d58_resets_under_load_leave_no_call_waiting_and_every_actor_alive(
    rt: aiodaft.Runtime, cluster: HostCluster
) -> None:
    actors = [await spawn_on(rt, host) for host in cluster.net.hosts]
    over = asyncio.Event()
    outcomes = Counter[str]()

    async def use(rng: random.Random) -> None:
        while not over.is_set():
            one, other = rng.sample(actors, 2)
            relays = rng.random() < 0.7
            try:
                await (one.relay(other, 1) if relays else one.length(other.make(1 << 20)))
                outcomes["answered"] += 1
            except (OutcomeUnknown, aiodaft.CallCancelled):
                # The owner lets go of an argument if its connection to the consumer breaks.
                outcomes["unknown"] += 1

    async with asyncio.TaskGroup() as tasks:
        for seed in range(6):
            tasks.create_task(use(random.Random(seed)))
        rng = random.Random(58)
        for _ in range(60):
            await asyncio.sleep(rng.random() / 4)
            one, other = rng.sample(cluster.net.hosts, 2)
            one.reset_connections(other)
        over.set()
    assert min(outcomes["answered"], outcomes["unknown"]) > 10
    for actor in actors:
        while True:
            # The connection may be the one that was reset last.
            try:
                await actor.where()
            except aiodaft.exceptions.PeerLost:
                continue
            break


async def test_d59_a_host_that_vanishes_and_comes_back_with_its_address_is_another_one(
    rt: aiodaft.Runtime, cluster: HostCluster
) -> None:
    net = cluster.net
    one, two, _ = net.hosts
    first, second = await spawn_on(rt, one), await spawn_on(rt, two)
    calls = [second.wait(), first.wait_for(second)]
    net.unplug(two)
    two.end_processes()
    net.plug(two)
    node = cluster.launch(two)
    assert node.stdout is not None
    while not node.stdout.readline():
        # Its name belongs to the one that vanished until that one's lease ends.
        node = cluster.launch(two)
        assert node.stdout is not None
    for call in [*calls, second.tell(1)]:
        assert await is_lost(call)
    again = await spawn_when_there(rt, two)
    assert await first.relay(again, 1) == 1
    with pytest.raises(OutcomeUnknown):
        await second.tell(2)
    assert await again.heard() == [1]


async def test_d60_a_host_that_is_stopped_fails_calls_although_its_kernel_answers(
    rt: aiodaft.Runtime, cluster: HostCluster
) -> None:
    net = cluster.net
    one, two, _ = net.hosts
    first, second = await spawn_on(rt, one), await spawn_on(rt, two)
    # From worker to worker, too, there is a connection that TCP has no reason to end.
    assert await first.relay(second, 0) == 0
    calls = [second.wait(), first.wait_for(second)]
    two.send_signal(signal.SIGSTOP)
    for call in [*calls, second.tell(1), first.relay(second, 2)]:
        assert await is_lost(call)
    assert await first.tell(3) == 3
    two.send_signal(signal.SIGCONT)
    assert await first.relay(await spawn_when_there(rt, two), 4) == 4


async def test_d60_a_host_that_stops_for_a_moment_loses_nothing(rt: aiodaft.Runtime, cluster: HostCluster) -> None:
    two = cluster.net.hosts[1]
    actor = await spawn_on(rt, two)
    two.send_signal(signal.SIGSTOP)
    call = actor.tell(1)
    await asyncio.sleep(2)
    two.send_signal(signal.SIGCONT)
    assert await call == 1


async def test_d54_a_controller_that_is_cut_off_fails_its_calls_and_its_actors_end(cluster: HostCluster) -> None:
    net = cluster.net
    one, two, three = net.hosts
    with cluster.controllers_on(three):
        async with cluster.runtime(two, unhandled="log") as rt:
            actor = await spawn_on(rt, one)
            _, pid = await actor.where()
            net.partition(three)
            assert await is_lost(actor.wait())
            while is_alive(pid):
                await asyncio.sleep(0.01)
            net.heal()
