"""A coordinator that stores in a real etcd of three members, which are killed and come back.

    python etcd_scenarios.py SCENARIO FOLDER

A program of its own: gRPC keeps threads and descriptors for as long as its process lives.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from unittest.mock import patch

import aetcd
import pytest
from etcd_cluster import EtcdCluster

from aiodaft._protocol.coordination.records import Change, Kind, Member, NamedActor
from aiodaft._protocol.coordination.registry import first_revision
from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft._runtime.coordination import etcd_store
from aiodaft._runtime.coordination.coordinator import Coordinator, Deposed, StoreFailed
from aiodaft._runtime.coordination.etcd_store import Address, EtcdEvent, EtcdLink, EtcdStore, events
from aiodaft._runtime.serialization.errors import decode_error, encode_error
from aiodaft.exceptions import CoordinatorUnavailable, CorruptState, NameTaken


def named(name: str, actor: int = 16, peer: str = "controller-1") -> NamedActor:
    return NamedActor(name, PeerId(peer), ActorId(actor), f"Model-{actor}", ("m.Model",))


def addresses_of(etcd: EtcdCluster) -> list[Address]:
    return [Address(host, port) for host, port in etcd.addresses]


def first_at(etcd: EtcdCluster, member: int) -> EtcdStore:
    """A store that asks this member first."""
    addresses = addresses_of(etcd)
    return EtcdStore([*addresses[member:], *addresses[:member]])


async def a_coordinator_goes_on_while_one_of_three_members_is_killed_and_another_takes_over(
    etcd: EtcdCluster,
) -> None:
    first = Coordinator(first_at(etcd, 0))
    await first.open()
    joined = await first.join(Member("n", PeerId("node-1@n"), "tcp://10.0.0.1:1", {"a": "b"}, {"cpus": 2.0}), ())
    made = [await first.register(named("x0"))]
    etcd.kill(0)
    made += [await first.register(named(f"x{number}")) for number in range(1, 10)]
    etcd.start(0)
    await first.release_name("x0", made[0].epoch)
    members = await first.members()
    second = Coordinator(first_at(etcd, 0))
    await second.open()
    assert list(await second.names("")) == made[1:]
    assert await second.members() == members
    assert await second.keepalive(joined.epoch, {}) > 0
    assert (await second.register(named("x0", 17))).epoch > made[-1].epoch
    with pytest.raises(CoordinatorUnavailable, match="another coordinator has taken over"):
        await first.register(named("y"))
    await first.aclose()
    await second.aclose()


async def a_coordinator_that_is_replaced_hears_of_it_at_once(etcd: EtcdCluster) -> None:
    first, second = Coordinator(first_at(etcd, 0)), Coordinator(first_at(etcd, 1))
    await first.open()
    run = asyncio.get_running_loop().create_task(first.run())
    x = await first.register(named("x"))
    async with asyncio.timeout(20):
        watching = asyncio.gather(first.watch_names("", x.revision), return_exceptions=True)
        await second.open()
        (error,) = await watching
        assert isinstance(error, CoordinatorUnavailable)
        await run
    await first.aclose()
    await second.aclose()


async def two_coordinators_on_one_etcd_never_grant_one_epoch(etcd: EtcdCluster) -> None:
    granted: list[NamedActor] = []

    async def grant(member: int) -> None:
        for term in range(12):
            coordinator = Coordinator(first_at(etcd, member))
            try:
                await coordinator.open()
                for number in range(5):
                    granted.append(await coordinator.register(named(f"c{member}.{term}.{number}")))
                    granted.append(await coordinator.register(named("x", 10 * term + member)))
                    await coordinator.release_name("x", granted[-1].epoch)
            except (CoordinatorUnavailable, NameTaken):
                pass
            finally:
                await coordinator.aclose()

    await asyncio.gather(grant(0), grant(1))
    epochs = [one.epoch for one in granted]
    assert len(epochs) == len(set(epochs)) > 0
    # Granted names are there, from either coordinator.
    last = Coordinator(first_at(etcd, 2))
    await last.open()
    assert {one.name for one in granted} - {"x"} <= {one.name for one in await last.names("")}
    await last.aclose()


async def a_coordinator_without_etcd_says_so_and_comes_back_with_it(etcd: EtcdCluster) -> None:
    coordinator = Coordinator(first_at(etcd, 0), lease=4.0)
    await coordinator.open()
    x = await coordinator.register(named("x"))
    etcd.kill_all()
    with pytest.raises(CoordinatorUnavailable, match="no member of etcd at .* answers") as caught:
        await coordinator.register(named("y"))
    assert caught.value.executed is None
    # Callers in other processes get it as its own type.
    assert type(decode_error(encode_error(caught.value))) is CoordinatorUnavailable
    with pytest.raises(CoordinatorUnavailable, match="does not answer"):
        await coordinator.lookup("x")
    for member in range(3):
        etcd.start(member)
    assert (await coordinator.register(named("z"))).epoch > x.epoch
    assert await coordinator.lookup("x") == x
    await coordinator.aclose()


async def many_changes_at_once_are_stored_in_order(etcd: EtcdCluster) -> None:
    store = first_at(etcd, 0)
    await store.open()
    many = [Change(1, Kind.NAME, f"x{number:03}", named(f"x{number:03}")) for number in range(250)]
    await store.commit(many)
    await store.commit([Change(2, Kind.NAME, one.key, None) for one in many[:249]])
    again = first_at(etcd, 1)
    assert [record.name for record in (await again.open()).records] == ["x249"]
    with pytest.raises(Deposed):
        await store.commit([])
    with pytest.raises(Deposed):
        await store.open()
    await store.aclose()
    await again.aclose()


async def a_member_that_most_others_do_not_hear_confirms_nothing(etcd: EtcdCluster) -> None:
    store = first_at(etcd, 0)
    await store.open()
    await store.commit([])
    for member in (1, 2):
        etcd.kill(member)
    with patch.object(etcd_store, "_PATIENCE", 0.5), pytest.raises(StoreFailed, match="no member of etcd"):
        await store.commit([])
    await store.aclose()


async def a_term_is_greater_than_the_time_and_than_the_last(etcd: EtcdCluster) -> None:
    stores = [EtcdStore(addresses_of(etcd), wall_clock=lambda: 1000.0) for _ in range(2)]
    stores.append(EtcdStore(addresses_of(etcd), wall_clock=lambda: 2000.0))
    assert [(await store.open()).term for store in stores] == [1000, 1001, 2000]
    assert first_revision(2000) > first_revision(1001)
    for store in stores:
        await store.aclose()


async def other_data_is_refused(etcd: EtcdCluster) -> None:
    member = (
        b'{"name": "m", "peer": "p", "address": "a", "labels": {}, "totals": {}, "free": {}, "epoch": 1, "revision": 1}'
    )
    link = EtcdLink(addresses_of(etcd))
    for folder, key, value in (
        ("a/", b"a/coordinator", b"{}"),
        ("b/", b"b/names/x", b"{"),
        ("c/", b"c/names/x", b"{}"),
        ("d/", b"d/nodes/n", member),
    ):
        await link.ask(partial(put_one, key, value))
        store = EtcdStore(addresses_of(etcd), folder)
        with pytest.raises(CorruptState, match=key.decode()):
            await store.open()
        await store.aclose()
    await link.aclose()


async def two_clusters_share_an_etcd_with_two_prefixes(etcd: EtcdCluster) -> None:
    one, other = (
        Coordinator(EtcdStore(addresses_of(etcd), "one/")),
        Coordinator(EtcdStore(addresses_of(etcd), "other/")),
    )
    for coordinator in (one, other):
        await coordinator.open()
    await one.register(named("x"))
    assert await other.names("") == ()
    for coordinator in (one, other):
        await coordinator.aclose()


async def put_one(key: bytes, value: bytes, client: aetcd.Client) -> None:
    await client.put(key, value)


async def put(link: EtcdLink, keys: Sequence[bytes]) -> None:
    """Put several keys in one transaction."""

    async def write(client: aetcd.Client) -> None:
        await client.transaction([], [client.transactions.put(key, key) for key in keys], [])

    await link.ask(write)


async def a_watch_goes_on_without_gap_or_duplicate_when_its_member_is_killed(etcd: EtcdCluster) -> None:
    addresses = addresses_of(etcd)
    writer, watcher = EtcdLink(addresses[1:]), EtcdLink(addresses)
    begin = (await writer.ask(lambda client: client.put(b"begin", b""))).header.revision
    heard: list[EtcdEvent] = []

    async def listen() -> None:
        async with aclosing(events(watcher, b"w/", begin)) as changes:
            async for event in changes:
                heard.append(event)
                if event.key == b"w/end":
                    return

    listening = asyncio.get_running_loop().create_task(listen())
    wanted: list[bytes] = []
    for number in range(30):
        keys = [b"w/%d.%d" % (number, part) for part in range(3)]
        await put(writer, keys)
        wanted += keys
        if number == 10:
            etcd.kill(0)
        elif number == 20:
            etcd.start(0)
    await writer.ask(lambda client: client.delete(b"w/3.0"))
    await put(writer, [b"w/end"])
    async with asyncio.timeout(30):
        await listening
    assert [event.key for event in heard] == [*wanted, b"w/3.0", b"w/end"]
    assert heard[-2].value is None
    assert [event.value for event in heard[:-2]] == wanted
    await writer.aclose()
    await watcher.aclose()


async def a_watch_that_begins_before_what_etcd_remembers_says_so(etcd: EtcdCluster) -> None:
    link = EtcdLink(addresses_of(etcd))
    for _ in range(3):
        last = (await link.ask(lambda client: client.put(b"w/x", b""))).header.revision
    await link.ask(lambda client: client.compact(last))
    async with asyncio.timeout(30):
        with pytest.raises(aetcd.RevisionCompactedError):
            async with aclosing(events(link, b"w/", 0)) as changes:
                async for _ in changes:
                    pass
    await link.aclose()


async def main(scenario: str, folder: Path) -> None:
    etcd = EtcdCluster(folder)
    try:
        etcd.start_all()
        link = EtcdLink(addresses_of(etcd))
        await link.ask(lambda client: client.get(b"anything"))
        await link.aclose()
        await globals()[scenario](etcd)
    finally:
        etcd.kill_all()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
