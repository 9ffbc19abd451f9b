"""Nodes that are stopped while the kernel keeps their connections alive: they hold nothing up, and may go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from clusters import cluster_of
from silent import runtime_at, stopped
from travellers import Traveller

import aiodaft
from aiodaft.exceptions import NotDelivered, OutcomeUnknown

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(120)]

LEASE = ("--lease", "1")


async def when_there(rt: aiodaft.Runtime, name: str) -> Traveller:
    """An actor on a node that has to be reached again first."""
    while True:
        try:
            return await rt.on(node=name).spawn(Traveller)
        except (NotDelivered, OutcomeUnknown):
            await asyncio.sleep(0.01)


async def test_a_first_node_that_is_stopped_holds_up_no_name_no_spawn_and_no_call(tmp_path: Path) -> None:
    with cluster_of(tmp_path / "key", "n1", "n2", "n3", options=LEASE) as cluster:
        async with runtime_at(cluster.nodes[1], cluster) as rt:
            first, second, third = [await rt.on(node=name).spawn(Traveller) for name in ("n1", "n2", "n3")]
            await rt.name(await rt.on(node="n3").spawn(Traveller), "named")
            assert await second.ask(first, 1) == 2
            with stopped(cluster.nodes[0].process.pid):
                asked = rt.lookup("named", Traveller), rt.on(node="n1").spawn(Traveller)
                for outcome in await asyncio.gather(*asked, return_exceptions=True):
                    assert isinstance(outcome, aiodaft.exceptions.PeerLost)
                    assert "has not answered for more than 0.8 s" in str(outcome)
                placed = [await rt.spawn(Traveller) for _ in range(3)]
                assert {(await rt.info(actor)).node for actor in placed} == {"n2", "n3"}
                # Its workers are not stopped.
                assert await second.ask(third, 1) == await third.ask(second, 1) == await second.ask(first, 1) == 2
            again = await when_there(rt, "n1")
            assert await again.ask(third, 1) == 2
            while True:
                try:
                    assert await (await rt.lookup("named", Traveller)).increment(1) == 2
                    break
                except (NotDelivered, OutcomeUnknown):
                    await asyncio.sleep(0.01)


async def test_calls_to_a_first_machine_that_is_stopped_fail(tmp_path: Path) -> None:
    with cluster_of(tmp_path / "key", "n1", "n2", options=LEASE) as cluster:
        async with runtime_at(cluster.nodes[0], cluster) as rt:
            first, second = [await rt.on(node=name).spawn(Traveller) for name in ("n1", "n2")]
            assert await second.ask(first, 1) == 2
            with stopped(cluster.nodes[0].process.pid, await first.pid()):
                calls = [first.increment(1), second.ask(first, 1)]
                for call in calls:
                    with pytest.raises(aiodaft.exceptions.PeerLost):
                        await call
                assert await second.increment(1) == 2
            assert await (await when_there(rt, "n1")).ask(second, 1) == 2


async def test_a_node_that_is_stopped_for_a_moment_loses_nothing(tmp_path: Path) -> None:
    with cluster_of(tmp_path / "key", "n1", "n2") as cluster:
        async with aiodaft.Runtime(cluster.nodes[1].address, key_file=cluster.key_file) as rt:
            first = await rt.on(node="n1").spawn(Traveller)
            await rt.name(first, "first")
            async with asyncio.TaskGroup() as tasks:
                with stopped(cluster.nodes[0].process.pid):
                    names = tasks.create_task(rt.names())
                    assert await first.increment(1) == 2
            assert names.result() == ("first",)


async def test_a_stopped_node_holds_up_only_what_the_command_says_of_it(tmp_path: Path) -> None:
    with cluster_of(tmp_path / "key", "n1", "n2") as cluster:
        first, second = cluster.nodes
        async with aiodaft.Runtime(second.address, key_file=cluster.key_file) as rt:
            await rt.on(node="n2").spawn(Traveller)
            for node, asked in ((second, first), (first, second)):
                with stopped(node.process.pid):
                    shown = await asyncio.to_thread(cluster.run, "ps", asked.address)
                said = shown.stdout.splitlines()
                assert said[1 + [line.split()[0] for line in said].index(node.name)].strip() == "does not answer"
                assert shown.returncode == (node is first)
                assert ("the coordinator does not answer" in shown.stderr) == (node is first)
            assert "Traveller-1" in shown.stdout
