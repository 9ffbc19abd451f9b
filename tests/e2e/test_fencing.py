"""Two actors never serve under one name: a node whose lease is over stops, as far as it can know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from clusters import Cluster, cluster_of
from silent import runtime_at, stopped
from travellers import Traveller

import aiodaft
from aiodaft.exceptions import NotDelivered, OutcomeUnknown

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(120)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with cluster_of(tmp_path / "key", "n1", "n2", options=("--lease", "2")) as made:
        yield made


@pytest.fixture
async def rt(cluster: Cluster) -> AsyncIterator[aiodaft.Runtime]:
    async with runtime_at(cluster.nodes[0], cluster) as made:
        yield made


async def refused(actor: Traveller) -> None:
    """Wait until an actor refuses calls because its node may have no lease."""
    with pytest.raises(aiodaft.exceptions.LeaseLost, match="another actor may have the name"):
        while True:
            assert await actor.increment(1) == 2


async def named(rt: aiodaft.Runtime, actor: Traveller, name: str) -> None:
    """Give an actor a name once it is free."""
    while True:
        try:
            return await rt.name(actor, name)
        except (NotDelivered, OutcomeUnknown):
            await asyncio.sleep(0.01)


async def test_e76_while_the_coordinator_is_silent_actors_with_names_refuse_and_others_serve(
    rt: aiodaft.Runtime, cluster: Cluster
) -> None:
    here = rt.on(node="n2")
    actor, other = await here.spawn(Traveller), await here.spawn(Traveller)
    await rt.name(actor, "x")
    with stopped(cluster.nodes[0].process.pid):
        await refused(actor)
        assert await other.increment(1) == 2
        with pytest.raises(aiodaft.exceptions.LeaseLost):
            await other.ask(actor, 1)
    while True:
        try:
            assert await other.ask(actor, 1) == 2
            break
        except aiodaft.exceptions.LeaseLost:
            await asyncio.sleep(0.01)
    found = await rt.lookup("x", Traveller)
    assert await found.pid() == await actor.pid()


async def test_e75_a_node_that_is_stopped_has_no_actor_serve_under_a_name_that_another_one_gets(
    rt: aiodaft.Runtime, cluster: Cluster
) -> None:
    actor, other = await rt.on(node="n2").spawn(Traveller), await rt.on(node="n1").spawn(Traveller)
    await rt.name(actor, "x")
    with stopped(cluster.nodes[1].process.pid):
        await refused(actor)
        await named(rt, other, "x")
        with pytest.raises(aiodaft.exceptions.LeaseLost):
            await actor.increment(1)
        assert await (await rt.lookup("x", Traveller)).pid() == await other.pid()
    # The node hears that the name is lost, and ends the actor.
    with pytest.raises(aiodaft.ActorDied, match="its name 'x' went to another actor"):
        while True:
            with pytest.raises(aiodaft.exceptions.LeaseLost):
                await actor.increment(1)
    assert await other.increment(1) == 2


async def test_a_node_ends_when_it_hears_that_another_one_has_its_place(rt: aiodaft.Runtime, cluster: Cluster) -> None:
    before = cluster.nodes[1].process
    actor = await rt.on(node="n2").spawn(Traveller)
    with stopped(before.pid):
        await asyncio.to_thread(cluster.add, "n2")
    assert await asyncio.to_thread(before.wait, 20) == 1
    with pytest.raises(OutcomeUnknown):
        await actor.increment(1)
    assert await (await rt.on(node="n2").spawn(Traveller)).increment(1) == 2
