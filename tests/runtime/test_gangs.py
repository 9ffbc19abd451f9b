"""Gangs, meshes and waiting for room, in a simulation of a runtime on one machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest
from inside import resources_of
from simulated.simulation import Simulation

import aiodaft
from aiodaft import Actor, method

PROGRAM = Callable[[aiodaft.Runtime], Coroutine[Any, Any, None]]


class Shard(Actor, gpus=1):
    """Fails if it is told to."""

    def __init__(self, failure: str = "") -> None:
        if failure:
            raise ValueError(failure)

    @method
    async def ping(self) -> int:
        return 1

    @method
    async def fail(self) -> None:
        raise ValueError("nobody sees this")


class Light(Actor):
    """Needs nothing."""

    @method
    async def ping(self) -> int:
        return 1


def simulate(program: PROGRAM, seed: int = 1, **options: Any) -> Simulation:
    """Run a program on a machine with four GPUs and four CPUs, all of which must be free again at its end."""
    simulation = Simulation(seed)

    async def main() -> None:
        async with simulation.runtime(**{"gpus": 4, "cpus": 4, **options}) as rt:
            everything = (await resources_of(rt))[1]
            await program(rt)
            async with rt.scope():
                pass
            assert (await resources_of(rt))[1] == everything

    simulation.run(main())
    assert simulation.problems == []
    return simulation


async def free_gpus(rt: aiodaft.Runtime) -> float:
    return (await resources_of(rt))[1]["gpus"]


# Gangs.


def test_a_gang_of_any_size_is_refused_before_its_members_are_counted_out() -> None:
    async def program(rt: aiodaft.Runtime) -> None:
        with pytest.raises(aiodaft.exceptions.InsufficientResources) as caught:
            await rt.on(cpus=1).group(10**9, Light)
        assert "each of the 1000000000 actors Light-1 needs cpus=1, but there is room for 4" in str(caught.value)
        # As many as there may be are placed one by one.
        async with rt.on(cpus=0.01).group(65, Light) as group:
            assert len(group) == 65

    simulate(program)


def test_a_gang_that_does_not_fit_starts_no_process() -> None:
    async def program(rt: aiodaft.Runtime) -> None:
        async with rt.group(2, Shard) as first:
            pids = {(await rt.info(shard)).pid or 0 for shard in first}
            with pytest.raises(aiodaft.exceptions.InsufficientResources) as caught:
                await rt.group(3, Shard)
            assert str(caught.value) == (
                "2 of 3 such actors fit: Shard-2[2] needs gpus=1, but this node has 4, of which 2 free: "
                "Shard-1[0] has 1, Shard-1[1] has 1"
            )
            assert caught.value.executed is False
            assert await free_gpus(rt) == 2
            async with rt.spawn(Shard) as next_one:
                # Pids are given in turn: no process was started in between.
                assert (await rt.info(next_one)).pid == max(pids) + 1
            await first.resize(4)
            with pytest.raises(aiodaft.exceptions.InsufficientResources, match="0 free"):
                await first.resize(5)
            assert len(first) == 4

    simulate(program)


def test_a_gang_of_which_one_cannot_be_made_gives_everything_back() -> None:
    async def program(rt: aiodaft.Runtime) -> None:
        with pytest.raises(ValueError, match="it is broken"):
            await rt.group(4, Shard, "it is broken")
        assert await free_gpus(rt) == 4

    simulate(program)


@pytest.mark.parametrize("pause", [0.0, 0.001])
@pytest.mark.parametrize("moment", range(0, 40, 2))
def test_a_gang_that_is_cancelled_at_any_moment_gives_everything_back(moment: int, pause: float) -> None:
    async def spawn(rt: aiodaft.Runtime) -> aiodaft.Group[Shard]:
        return await rt.group(3, Shard)

    async def program(rt: aiodaft.Runtime) -> None:
        spawning = asyncio.get_running_loop().create_task(spawn(rt))
        for _ in range(moment):
            await asyncio.sleep(pause)
        spawning.cancel()
        with suppress(asyncio.CancelledError):
            await rt.stop(await spawning)
        assert await free_gpus(rt) == 4

    simulate(program, seed=moment)


@pytest.mark.parametrize("moment", range(24))
def test_a_gang_that_is_made_while_its_scope_closes_gives_everything_back(moment: int) -> None:
    async def spawn(scope: aiodaft.Scope) -> aiodaft.Group[Shard]:
        return await scope.group(3, Shard)

    async def program(rt: aiodaft.Runtime) -> None:
        async with rt.scope() as scope:
            spawning = asyncio.get_running_loop().create_task(spawn(scope))
            for _ in range(moment):
                await asyncio.sleep(0)
        with suppress(aiodaft.exceptions.RuntimeClosed, aiodaft.CallCancelled):
            await spawning
        assert await free_gpus(rt) == 4

    simulate(program, seed=moment)


def test_a_gang_in_the_process_of_another_actor_is_reserved_as_a_whole() -> None:
    async def program(rt: aiodaft.Runtime) -> None:
        async with rt.on(cpus=1).spawn(Light) as host:
            with pytest.raises(
                aiodaft.exceptions.InsufficientResources, match=r"3 of 4 such actors fit: Light-2\[3\] needs cpus=1"
            ):
                await rt.on(with_=host, cpus=1).group(4, Light)
            async with rt.on(with_=host, cpus=1).group(3, Light) as guests:
                assert {(await rt.info(guest)).pid for guest in guests} == {(await rt.info(host)).pid}

    simulate(program)


# Waiting.


def test_a_spawn_waits_for_room_only_if_it_is_asked_to() -> None:
    async def program(rt: aiodaft.Runtime) -> None:
        loop = asyncio.get_running_loop()
        first = await rt.on(gpus=3).spawn(Shard)
        with pytest.raises(aiodaft.exceptions.InsufficientResources, match="of which 1 free: Shard-1 has 3$"):
            await rt.on(gpus=2).spawn(Shard)
        started = loop.time()
        with pytest.raises(aiodaft.exceptions.InsufficientResources, match=r"Shard-1 has 3 \(waited 5 s\)$"):
            await rt.on(gpus=2, wait=5).spawn(Shard)
        assert 5 <= loop.time() - started < 6
        with pytest.raises(aiodaft.exceptions.InsufficientResources, match="needs gpus=5, but this node has 4"):
            await rt.on(gpus=5, wait=1000).spawn(Shard)

        async def stop_later() -> None:
            await asyncio.sleep(5)
            await rt.stop(first)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stop_later())
            group = await rt.on(wait=1000).group(4, Shard)
        assert loop.time() - started < 20
        await rt.stop(group)

    simulate(program)


@pytest.mark.parametrize("what", ["spawn", "group", "mesh"])
def test_the_end_of_its_scope_ends_a_wait(what: str) -> None:
    async def program(rt: aiodaft.Runtime) -> None:
        loop = asyncio.get_running_loop()
        async with rt.group(4, Shard):
            async with rt.scope() as scope:
                place = scope.on(wait=1000)
                ways: dict[str, Callable[[], aiodaft.typing.Spawned[Any]]] = {
                    "spawn": lambda: place.spawn(Shard),
                    "group": lambda: place.group(2, Shard),
                    "mesh": lambda: place.mesh(1, gpus=2),
                }

                async def wait() -> None:
                    await ways[what]()

                waiting = loop.create_task(wait())
                await asyncio.sleep(1)
                before = loop.time()
            assert loop.time() - before < 10
            with pytest.raises(aiodaft.exceptions.RuntimeClosed, match="its scope is closed"):
                await waiting

    simulate(program)


def test_a_cancelled_wait_takes_nothing_later() -> None:
    async def program(rt: aiodaft.Runtime) -> None:
        async with rt.group(4, Shard):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await rt.on(wait=1000).spawn(Shard)
        await asyncio.sleep(1)
        assert await free_gpus(rt) == 4

    simulate(program)


def test_the_end_of_a_runtime_ends_a_wait() -> None:
    simulation = Simulation(1)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with simulation.runtime(gpus=1) as rt:
            await rt.spawn(Shard)

            async def wait() -> None:
                await rt.on(wait=1000).spawn(Shard)

            waiting = loop.create_task(wait())
            await asyncio.sleep(1)
        with pytest.raises(aiodaft.exceptions.RuntimeClosed):
            await waiting

    simulation.run(main())
    assert simulation.problems == []


# Meshes.


def test_a_mesh_reserves_its_slices_until_it_is_stopped() -> None:
    async def program(rt: aiodaft.Runtime) -> None:
        async with rt.spawn(Shard):
            mesh = await rt.mesh(hosts=1, gpus=2)
            assert mesh[0].gpus == (1, 2)
            assert [one.gpus for one in mesh] == [(1, 2)]
            assert len(mesh) == 1
            assert await free_gpus(rt) == 1
            assert repr(mesh) == f"<Mesh of {mesh[0].node} with 2 GPUs>"
            shards = await mesh[0].group(2, Shard)
            assert [(await rt.info(shard)).gpus for shard in shards] == [(1,), (2,)]
            assert (await rt.info(shards[0])).node == mesh.slices[0].node
            with pytest.raises(
                aiodaft.exceptions.InsufficientResources, match="this slice of mesh of 1 x 2 GPUs has 2, of which 0"
            ):
                await mesh.spawn(Shard)
            # Actors take a resource that the slice does not have from its node.
            light = await mesh[0].on(cpus=4, gpus=0).spawn(Shard)
            assert (await resources_of(rt))[1] == {"cpus": 0, "gpus": 1}
            await rt.stop(mesh)
            await rt.stop(mesh)
            assert await free_gpus(rt) == 3
            for gone in (*shards, light):
                with pytest.raises(aiodaft.ActorDied):
                    await gone.ping()
            with pytest.raises(aiodaft.exceptions.RuntimeClosed, match="its scope is closed"):
                await mesh.group(2, Shard)

    simulate(program)


def test_a_mesh_ends_with_its_block_or_its_scope() -> None:
    async def program(rt: aiodaft.Runtime) -> None:
        async with rt.on(cpus=1).mesh(hosts=1, gpus=4) as mesh:
            await mesh.group(4, Shard)
            await mesh.on(cpus=0.5, gpus=0).group(2, Light)
            with pytest.raises(aiodaft.exceptions.InsufficientResources, match="of which 0 free"):
                await mesh.on(cpus=0.5, gpus=0).spawn(Light)
        assert await free_gpus(rt) == 4
        async with rt.scope() as scope:
            mesh = await scope.mesh(1, gpus=4)
            await mesh[0].on(restart="permanent").group(4, Shard)
        assert await free_gpus(rt) == 4

    simulate(program)


def test_an_actor_that_is_restarted_on_a_slice_keeps_its_gpu() -> None:
    simulation = Simulation(1)

    async def main() -> None:
        async with simulation.runtime(gpus=2) as rt, rt.mesh(1, gpus=2) as mesh:
            shard = await mesh.on(restart="permanent").spawn(Shard)
            [worker] = simulation.workers
            simulation.kill(worker)
            with pytest.raises(
                aiodaft.exceptions.InsufficientResources, match="this slice .* of which 1 free: Shard-1 has 1"
            ):
                await mesh.on(gpus=2).spawn(Shard)
            while not (info := await rt.info(shard)).restarts:
                await asyncio.sleep(0.01)
            assert (info.gpus, info.restarts) == ((0,), 1)

    simulation.run(main())
    assert simulation.problems == []


def test_what_a_mesh_cannot_be_is_an_error_at_once() -> None:
    async def program(rt: aiodaft.Runtime) -> None:
        with pytest.raises(
            aiodaft.exceptions.InsufficientResources, match=r"^mesh of 1 x 5 GPUs needs gpus=5, but this node has 4"
        ):
            await rt.mesh(1, gpus=5)
        with pytest.raises(
            aiodaft.exceptions.InsufficientResources,
            match=r"mesh of 2 x 2 GPUs needs 2 nodes with gpus=2 each, but only 1 node has that: .*: room for 1",
        ):
            await rt.on(wait=1000).mesh(2, gpus=2)
        async with rt.mesh(1, gpus=4) as mesh:
            with pytest.raises(ValueError, match="not made of slices"):
                mesh.mesh(1)
        place = rt.on(gpus=1)
        with pytest.raises(ValueError, match=r"on\(gpus=\.\.\.\) is for actors, not for a mesh"):
            place.mesh(1, gpus=1)
        for hosts, gpus, named in (
            (0, 1, "hosts=0"),
            (True, 1, "hosts=True"),
            (1, -1, "gpus=-1"),
            (1, 0.5, "gpus=0.5"),
        ):
            with pytest.raises(ValueError, match=f"^{named}: a mesh needs"):
                rt.mesh(hosts, gpus)  # type: ignore[arg-type]

    simulate(program)


@pytest.mark.parametrize("moment", range(0, 12, 2))
def test_a_mesh_that_is_cancelled_at_any_moment_is_released(moment: int) -> None:
    async def reserve(rt: aiodaft.Runtime) -> aiodaft.typing.Mesh:
        return await rt.mesh(1, gpus=3)

    async def program(rt: aiodaft.Runtime) -> None:
        reserving = asyncio.get_running_loop().create_task(reserve(rt))
        for _ in range(moment):
            await asyncio.sleep(0)
        reserving.cancel()
        with suppress(asyncio.CancelledError):
            await rt.stop(await reserving)
        assert await free_gpus(rt) == 4

    simulate(program, seed=moment)


def test_errors_that_no_code_sees_on_a_mesh_are_those_of_the_scope_around_it() -> None:
    async def program(rt: aiodaft.Runtime) -> None:
        with pytest.raises(ExceptionGroup) as caught:
            async with rt.scope() as scope, scope.mesh(1, gpus=1) as mesh:
                shard = await mesh.spawn(Shard)
                shard.fail()
                await asyncio.sleep(1000)
        assert [str(error) for error in caught.value.exceptions] == ["nobody sees this"]
        with pytest.raises(ExceptionGroup) as caught:
            async with rt.scope() as scope:
                mesh = await scope.mesh(1, gpus=1)
                failed = (await mesh.spawn(Shard)).fail()
                await failed.ready()
        assert [str(error) for error in caught.value.exceptions] == ["nobody sees this"]

    simulate(program)


# Labels, and places of others.


def test_labels_of_the_machine_are_compared() -> None:
    async def program(rt: aiodaft.Runtime) -> None:
        async with rt.on(labels={"zone": "a"}).spawn(Light) as light:
            assert await light.ping() == 1
        with pytest.raises(
            aiodaft.exceptions.InsufficientResources,
            match=r"^Light-2 needs labels={'zone': 'b'}, but no node has that: .*: zone='a'$",
        ):
            await rt.on(labels={"zone": "b"}, wait=1000).spawn(Light)

    simulate(program, labels={"zone": "a", "disk": "ssd"})


def test_an_actor_is_near_to_others_or_apart_from_them() -> None:
    async def program(rt: aiodaft.Runtime) -> None:
        other = await rt.spawn(Light)
        group = await rt.on(restart="permanent").group(2, Light)
        service: Any = await rt.spawn(dict)
        for near in (other, group, [other, *group], service):
            async with rt.on(near=near).spawn(Light) as light:
                assert await light.ping() == 1
        with pytest.raises(
            aiodaft.exceptions.InsufficientResources, match=r"needs a node apart from Light-1 \(on .*: Light-1 there"
        ):
            await rt.on(apart_from=other).spawn(Light)
        with pytest.raises(aiodaft.exceptions.InsufficientResources, match=r": Light-2\[0\] and Light-2\[1\] there"):
            await rt.on(apart_from=group).group(2, Light)
        await rt.kill(other)
        await rt.stop(group)
        # They are nowhere any more.
        async with rt.on(apart_from=[other, *group]).spawn(Light) as light:
            assert await light.ping() == 1
        with pytest.raises(aiodaft.ActorDied, match="was to be near to Light-1, which is gone") as caught:
            await rt.on(near=other).spawn(Light)
        assert caught.value.executed is False

    simulate(program)


def test_spread_actors_fill_the_only_node() -> None:
    async def program(rt: aiodaft.Runtime) -> None:
        async with rt.on(spread=True).group(4, Shard) as shards:
            assert await shards.all(Shard.ping) == [1] * 4

    simulate(program)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"node": 7}, TypeError, "^node=7"),
        ({"labels": "zone"}, TypeError, "^labels='zone': a dict is needed"),
        ({"labels": {"zone": 1}}, TypeError, "^labels: 'zone': 1 is not a string"),
        ({"near": "a"}, TypeError, "^near: expected an actor's handle, got str"),
        ({"apart_from": [1]}, TypeError, "^apart_from: expected an actor's handle, got int"),
        ({"with_": "a"}, TypeError, "^with_: expected an actor's handle, got str"),
        ({"spread": 1}, TypeError, "^spread=1: True or False"),
        ({"wait": "1"}, TypeError, "^wait='1': a number"),
        ({"wait": True}, TypeError, "^wait=True: a number"),
        ({"wait": -1}, ValueError, "^wait=-1: a number"),
        ({"wait": float("nan")}, ValueError, "^wait=nan: a number"),
        ({"wait": float("inf")}, ValueError, "^wait=inf: a number"),
    ],
)
def test_arguments_are_checked_where_they_are_given(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        aiodaft.Runtime(preload=()).on(**options)


def test_labels_of_a_runtime_are_strings() -> None:
    with pytest.raises(TypeError, match="^labels: 'zone': 1 is not a string"):
        aiodaft.Runtime(preload=(), labels={"zone": 1})  # type: ignore[dict-item]


def test_an_actor_in_the_process_of_another_has_no_other_constraints() -> None:
    async def program(rt: aiodaft.Runtime) -> None:
        async with rt.spawn(Light) as light:
            for options in ({"node": "x"}, {"labels": {"a": "b"}}, {"near": light}, {"spread": True}):
                with pytest.raises(ValueError, match=f"^{next(iter(options))} cannot be combined with with_"):
                    rt.on(with_=light, **options)

    simulate(program)
