"""Simulated hosts: faults of the network and of machines, as those of real ones look to programs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Protocol

import pytest
import sim_actors
from sim_actors import History, Onlooker, Subject
from simulated import Simulation
from simulated.simulation import DESK

import aiodaft
from aiodaft.exceptions import OutcomeUnknown

HOSTS = ("one", "two", "three")


class Scene(Protocol):
    def __call__(self, simulation: Simulation, rt: aiodaft.Runtime, /) -> Coroutine[Any, Any, None]: ...


def play(scene: Scene, seed: object = 1, at: str = "one", **options: Any) -> Simulation:
    simulation = Simulation(seed, hosts=HOSTS, lease=4.0, **options)
    Onlooker.history = History(simulation.loop)

    async def main() -> None:
        async with simulation.runtime(at, unhandled="log") as rt:
            await scene(simulation, rt)

    simulation.run(main())
    assert simulation.problems == []
    return simulation


async def spread(rt: aiodaft.Runtime) -> list[Subject]:
    """An actor on each host, in their order."""
    return [await rt.on(node=name).spawn(Subject) for name in HOSTS]


async def call(actor: Subject, size: int = 0) -> Any:
    return await actor.at_once(Onlooker.history.made(actor, size), size)


async def relay(actor: Subject, other: Subject) -> Any:
    return await actor.relay(Onlooker.history.made(actor), 0, other, 0.0)


async def until_back(rt: aiodaft.Runtime, name: str) -> Subject:
    """An actor on a host, as soon as that has joined again."""
    while True:
        try:
            return await rt.on(node=name).spawn(Subject)
        except aiodaft.DaftError:
            await asyncio.sleep(1)


def test_actors_on_three_hosts_call_each_other_and_exchange_values() -> None:
    async def scene(simulation: Simulation, rt: aiodaft.Runtime) -> None:
        actors = await spread(rt)
        assert [process.host for process in simulation.workers] == [*HOSTS]
        for actor in actors:
            for other in actors:
                await relay(actor, other)
            made = Onlooker.history.made(actor, 2)
            large = actor.at_once(made, 2)
            for other in actors:
                number = Onlooker.history.made(other)
                assert await other.combine(number, 0, large) == number * 7

        # Larger than a value within a message.
        boxed = actors[0].make(300_000)
        assert [await actor.length(boxed) for actor in actors] == [300_000] * 3

    simulation = play(scene)
    assert simulation.logged == []
    assert simulation.routes.packets["one", "two"] > 0


def test_a_partition_fails_calls_in_the_time_of_tcp_and_heals() -> None:
    async def scene(simulation: Simulation, rt: aiodaft.Runtime) -> None:
        first, second, _ = await spread(rt)
        await relay(first, second)
        for other in (*HOSTS, DESK):
            if other != "two":
                simulation.routes.drop("two", other)
                simulation.routes.drop(other, "two")
        begun = simulation.loop.time()
        with pytest.raises(aiodaft.exceptions.PeerLost):
            await call(second)
        assert 3 < simulation.loop.time() - begun < 15
        assert await call(first) is not None
        simulation.routes.heal()
        again = await until_back(rt, "two")
        await relay(first, again)
        await relay(again, first)

    play(scene)


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.soak) for part in range(1, 4))])
def test_a_call_gets_its_argument_although_the_connection_that_brings_it_is_reset_while_it_is_made(part: int) -> None:
    """The host that sends the argument sees that; to the one that waits for it, its own connection is still to come."""

    async def scene(simulation: Simulation, rt: aiodaft.Runtime) -> None:
        _, second, third = await spread(rt)
        for consumer, producer in ((second, third), (third, second)):
            argument = producer.at_once(Onlooker.history.made(producer, 2), 2)
            number = Onlooker.history.made(consumer)
            call = consumer.combine(number, 0, argument)
            delay = simulation.loop.rng.random() * 0.05
            simulation.loop.later(delay, simulation.routes.reset, "two", "three")
            async with asyncio.timeout(120):
                with suppress(aiodaft.exceptions.PeerLost):
                    assert await call == number * 7

    for seed in range(25 * part, 25 * (part + 1)):
        play(scene, seed)


def test_a_call_gets_its_argument_although_that_is_lost_on_its_way_before_the_call_comes() -> None:
    async def scene(simulation: Simulation, rt: aiodaft.Runtime) -> None:
        _, second, third = await spread(rt)
        await relay(third, second)
        await call(second)
        await call(third)
        # The program's messages there are delayed.
        simulation.routes.drop(DESK, "two")
        argument = third.at_once(Onlooker.history.made(third, 2), 2)
        number = Onlooker.history.made(second)
        combined = second.combine(number, 0, argument)
        await asyncio.sleep(simulation.loop.rng.random() * 3 * simulation.routes.delay)
        simulation.routes.reset("two", "three")
        is_connected = False
        while not is_connected:
            with suppress(aiodaft.exceptions.PeerLost):
                is_connected = bool(await relay(third, second))
        simulation.routes.heal()
        async with asyncio.timeout(120):
            assert await combined == number * 7

    for seed in range(15):
        play(scene, seed)


def test_a_node_that_does_not_answer_is_shown_as_silent() -> None:
    async def scene(simulation: Simulation, rt: aiodaft.Runtime) -> None:
        await spread(rt)
        for other in ("one", DESK):
            simulation.routes.drop("two", other)
        states = [(node.name, node.state, node.free) for node in await rt.nodes(patience=2)]
        free = {"cpus": 100, "gpus": 0}
        assert states == [("one", "ready", free), ("three", "ready", free), ("two", "silent", {})]
        # Once its lease is over, it is no node of the cluster.
        while len(nodes := await rt.nodes()) > 2:
            await asyncio.sleep(1)
        assert [node.name for node in nodes] == ["one", "three"]

    play(scene)


def test_what_is_sent_one_way_arrives_although_nothing_comes_back() -> None:
    async def scene(simulation: Simulation, rt: aiodaft.Runtime) -> None:
        _, second, _ = await spread(rt)
        simulation.routes.drop("two", DESK)
        number = Onlooker.history.made(second)
        with pytest.raises(aiodaft.exceptions.PeerLost):
            await second.at_once(number, 0)
        assert Onlooker.history.calls[number].began == 1

    play(scene)


def test_a_short_cut_is_only_a_delay() -> None:
    async def scene(simulation: Simulation, rt: aiodaft.Runtime) -> None:
        _, second, _ = await spread(rt)
        simulation.routes.drop(DESK, "two")
        simulation.loop.later(2.0, simulation.routes.heal)
        assert await call(second) is not None
        assert 2 <= simulation.loop.time() < 5

    play(scene)


def test_a_reset_fails_what_is_under_way_and_the_next_call_connects_again() -> None:
    async def scene(simulation: Simulation, rt: aiodaft.Runtime) -> None:
        _, second, _ = await spread(rt)
        waiting = asyncio.gather(second.nap(Onlooker.history.made(second), 0, 100.0), return_exceptions=True)
        await asyncio.sleep(1)
        simulation.routes.reset(DESK, "two")
        ((error,)) = await waiting
        assert isinstance(error, aiodaft.exceptions.PeerLost)
        assert await call(second) is not None

    play(scene)


@pytest.mark.parametrize("without_power", [True, False])
def test_a_host_that_is_gone_is_out_after_its_lease_and_comes_back(without_power: bool) -> None:
    async def scene(simulation: Simulation, rt: aiodaft.Runtime) -> None:
        _, _, third = await spread(rt)
        host = simulation.hosts["three"]
        host.unplug() if without_power else host.kill()
        assert not [process for process in simulation.workers if process.host == "three"]
        with pytest.raises(OutcomeUnknown):
            await call(third)
        with pytest.raises(aiodaft.exceptions.InsufficientResources):
            while True:
                await asyncio.sleep(1)
                try:
                    await rt.on(node="three").spawn(Subject)
                except OutcomeUnknown:
                    continue
        host.start()
        assert await call(await until_back(rt, "three")) is not None

    play(scene)


@pytest.mark.parametrize("seed", range(4))
def test_a_coordinator_that_is_started_again_costs_calls_nothing(seed: int) -> None:
    async def scene(simulation: Simulation, rt: aiodaft.Runtime) -> None:
        _, second, third = await spread(rt)
        await rt.name(second, "kept")
        await relay(second, third)
        simulation.hosts["one"].kill()
        await relay(second, third)
        simulation.loop.later(1.0, simulation.hosts["one"].start)
        await until_back(rt, "one")
        found = await rt.lookup("kept", Subject)
        assert await call(found) is not None

    play(scene, seed)


def test_the_name_of_an_actor_that_ended_while_the_coordinator_was_not_heard_is_free_once_it_is() -> None:
    async def scene(simulation: Simulation, rt: aiodaft.Runtime) -> None:
        actor = await rt.on(node="two", restart=aiodaft.Restart(intensity=0)).spawn(Subject)
        other = await rt.on(node="three").spawn(Subject)
        await rt.name(actor, "x")
        [process] = [process for process in simulation.workers if process.host == "two"]
        for ends in ((DESK, "one"), ("one", DESK)):
            simulation.routes.drop(*ends)
        with pytest.raises(aiodaft.exceptions.PeerLost):
            await rt.names()
        simulation.kill(process)
        with pytest.raises(aiodaft.ActorDied, match="SIGKILL"):
            await call(actor)
        # Longer than it takes to find that there is no way.
        await asyncio.sleep(30)
        simulation.routes.heal()
        while await names(rt) != ():
            await asyncio.sleep(1)
        await rt.name(other, "x")

    async def names(rt: aiodaft.Runtime) -> tuple[str, ...] | None:
        with suppress(aiodaft.exceptions.PeerLost):
            return await rt.names()
        return None

    play(scene, at="two")


@pytest.mark.parametrize("seed", range(4))
def test_e75_an_actor_refuses_calls_before_another_one_gets_its_name_and_ends_when_it_hears_of_that(seed: int) -> None:
    async def scene(simulation: Simulation, rt: aiodaft.Runtime) -> None:
        _, second, third = await spread(rt)
        await rt.name(second, "x")
        for ends in (("one", "two"), ("two", "one")):
            simulation.routes.drop(*ends)
        while await rt.names():
            await asyncio.sleep(0.1)
        with pytest.raises(aiodaft.exceptions.LeaseLost):
            await call(second)
        await rt.name(third, "x")
        simulation.routes.heal()
        with pytest.raises(aiodaft.ActorDied, match="its name 'x' went to another actor"):
            while True:
                with pytest.raises(aiodaft.exceptions.LeaseLost):
                    await call(second)
                await asyncio.sleep(0.1)
        assert await call(await rt.lookup("x", Subject)) is not None

    play(scene, seed)


@pytest.mark.parametrize("seed", range(4))
def test_the_news_that_the_first_node_is_gone_may_come_after_its_successor_was_found(seed: int) -> None:
    async def scene(simulation: Simulation, rt: aiodaft.Runtime) -> None:
        await spread(rt)
        simulation.hosts["one"].kill()
        simulation.hosts["one"].start()
        # A coordinator with a store has to end the lease of the node that was there before.
        while "one" in [member.name for member in rt._controller.nodes.members()]:  # noqa: SLF001 - as `aiodaft ps` does
            await asyncio.sleep(0.01)
            if simulation.loop.time() > 20:
                break
        simulation.routes.reset(DESK, "one")
        assert await call(await until_back(rt, "one")) is not None

    play(scene, seed)


@pytest.mark.parametrize("unheard", ["by the coordinator", "by all"])
def test_a_node_that_comes_back_keeps_nothing_of_an_actor_that_was_made_again_elsewhere(unheard: str) -> None:
    async def scene(simulation: Simulation, rt: aiodaft.Runtime) -> None:
        fillers = [await rt.on(node=name, cpus=100).spawn(Subject) for name in ("one", "three")]
        restart = aiodaft.Restart(backoff=aiodaft.Backoff(base=0), follow=True)
        actor = await rt.on(cpus=1, restart=restart).spawn(Subject)
        [old] = [process for process in simulation.workers if process.host == "two"]
        await rt.stop(fillers[0])
        for other in ("one",) if unheard == "by the coordinator" else ("one", "three", DESK):
            simulation.routes.drop("two", other)
            simulation.routes.drop(other, "two")
        if unheard == "by the coordinator":
            # Longer than a lease: the node is no member any more when its process ends.
            await asyncio.sleep(10)
            simulation.kill(old)
        while not any(process.host == "one" for process in simulation.workers):
            await asyncio.sleep(1)
        assert await call(actor) is not None
        simulation.routes.heal()
        while True:
            try:
                # All that it has.
                await rt.on(node="two", cpus=100, wait=30).spawn(Subject)
                break
            except (aiodaft.exceptions.PeerLost, aiodaft.ActorDied):
                await asyncio.sleep(1)
        assert not old.alive

    play(scene)


def test_a_node_that_is_gone_is_not_dialled_again_and_again() -> None:
    async def scene(simulation: Simulation, rt: aiodaft.Runtime) -> None:
        await spread(rt)
        simulation.hosts["three"].kill()
        await asyncio.sleep(1)
        before = simulation.routes.packets[DESK, "three"]
        await asyncio.sleep(1)
        assert simulation.routes.packets[DESK, "three"] - before < 10

    play(scene)


def test_a_controller_does_not_end_with_the_node_that_it_is_attached_to() -> None:
    async def scene(simulation: Simulation, rt: aiodaft.Runtime) -> None:
        async def use(other: aiodaft.Runtime) -> None:
            actor = await other.on(node="three").spawn(Subject)
            nap = actor.nap(Onlooker.history.made(actor), 0, 40.0)
            simulation.hosts["two"].unplug()
            # Longer than the lease, and than TCP waits.
            assert await nap is not None

        async with simulation.runtime("two", unhandled="log") as other:
            await use(other)

    play(scene)


def test_another_program_ends_with_its_host_and_its_actors_with_it() -> None:
    async def visit(simulation: Simulation) -> None:
        async with simulation.runtime("one", unhandled="log") as rt:
            await rt.on(node="three").spawn(Subject)
            await asyncio.sleep(1000)

    async def scene(simulation: Simulation, rt: aiodaft.Runtime) -> None:
        visitor = simulation.start("two", visit(simulation))
        await asyncio.sleep(1)
        assert [process.host for process in simulation.workers] == ["three"]
        simulation.hosts["two"].unplug()
        assert not visitor.alive
        await asyncio.sleep(20)
        assert simulation.workers == []

    play(scene)


def test_equal_seeds_are_equal_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(simulation: Simulation, rt: aiodaft.Runtime) -> None:
        first, second, _ = await spread(rt)
        simulation.disturb(kills=1, cuts=2, pauses=1, within=1.0)
        simulation.disturb_hosts(partitions=1, drops=1, resets=2, deaths=1, within=1.0)
        for _ in range(20):
            try:
                await relay(first, second)
            except aiodaft.DaftError:
                await asyncio.sleep(1)

    trace = play(scene, 5).trace
    # Wherever the modules lie.
    monkeypatch.setattr(sim_actors, "__file__", "/none")
    assert play(scene, 5).trace == trace
    assert play(scene, 6).trace != trace
