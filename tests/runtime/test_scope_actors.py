"""The actors of a scope, in a simulation: the owned, the given back, the stopped and the times of that."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from inside import resources_of
from simulated.simulation import Simulation

import aiodaft
from aiodaft import Actor, method


class Desk(Actor, cpus=1):
    """Notes when it leaves."""

    left: list[str] = []  # noqa: RUF012 - shared by all

    def __init__(self, name: str = "") -> None:
        self.name = name
        if name == "fail":
            raise ValueError("it cannot be made")

    async def __aenter__(self) -> Desk:
        return self

    async def __aexit__(self, *_: object) -> None:
        Desk.left.append(self.name)

    @method
    async def get(self) -> str:
        return self.name


@pytest.mark.parametrize("moment", range(12))
def test_a_spawn_that_is_cancelled_at_any_moment_gives_back_what_it_took(moment: int) -> None:
    simulation = Simulation(moment)

    async def spawned(rt: aiodaft.Runtime) -> Desk:
        return await rt.spawn(Desk)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with simulation.runtime(cpus=1) as rt:
            spawning = loop.create_task(spawned(rt))
            loop.call_later(moment * 0.004, spawning.cancel)
            with suppress(asyncio.CancelledError):
                await rt.stop(await spawning)
            assert (await resources_of(rt))[1]["cpus"] == 1
            # So there is room for another one.
            assert await (await rt.spawn(Desk, "next")).get() == "next"

    simulation.run(main())
    assert simulation.problems == []


def test_an_actor_that_cannot_be_made_gives_back_its_place() -> None:
    simulation = Simulation(1)

    async def main() -> None:
        async with simulation.runtime(cpus=1) as rt:
            with pytest.raises(ValueError, match="it cannot be made"):
                await rt.spawn(Desk, "fail")
            assert (await resources_of(rt))[1]["cpus"] == 1

    simulation.run(main())


def test_actors_leave_in_the_reverse_order_and_those_of_inner_scopes_first() -> None:
    simulation = Simulation(1)
    Desk.left.clear()

    async def main() -> None:
        async with simulation.runtime(cpus=4) as rt, rt.scope() as outer:
            for name in ("one", "two"):
                await outer.spawn(Desk, name)
            async with outer.scope() as inner:
                await inner.spawn(Desk, "three")
                await outer.spawn(Desk, "four")
            assert Desk.left == ["three"]

    simulation.run(main())
    assert Desk.left == ["three", "four", "two", "one"]


def test_an_actor_that_was_killed_is_owned_no_more() -> None:
    simulation = Simulation(1)
    Desk.left.clear()

    async def main() -> None:
        async with simulation.runtime(cpus=1) as rt:
            desk = await rt.spawn(Desk, "killed")
            await rt.kill(desk)
            await rt.kill(desk)
            with pytest.raises(aiodaft.ActorDied, match="killed by its owner"):
                await desk.get()
            assert await (await rt.spawn(Desk, "next")).get() == "next"

    simulation.run(main())
    assert Desk.left == ["next"]
