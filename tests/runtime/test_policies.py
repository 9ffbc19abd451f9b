"""Policies: which member takes the next call."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from inside import controller_of
from simulated import Simulation

import aiodaft
from aiodaft import Actor, method
from aiodaft._protocol.node.worker import Health
from aiodaft.actor import target_of
from aiodaft.policies import Load, fewest_in_flight, nearest, two_choices


def loads(*in_flight: int, distance: Sequence[int] = ()) -> list[Load]:
    return [Load(rank, busy, distance[rank] if distance else 2) for rank, busy in enumerate(in_flight)]


def test_the_default_takes_the_least_busy_and_the_first_of_equals() -> None:
    assert fewest_in_flight(loads(2, 1, 0, 0)) == 2
    assert fewest_in_flight(loads(0)) == 0


def test_two_choices_takes_the_less_busy_of_two_at_random() -> None:
    random = Random(1)
    taken = Counter(two_choices(loads(3, 0, 1, 2), random) for _ in range(600))
    # Of the six pairs, the least busy one wins three, and the busiest none.
    assert taken[1] > taken[2] > taken[3] > taken[0] == 0
    assert two_choices(loads(5), random) == 0
    assert {two_choices(loads(1, 1, 1)) for _ in range(200)} == {0, 1, 2}


def test_the_nearest_comes_before_the_least_busy() -> None:
    assert nearest(loads(0, 5, 4, distance=[2, 1, 1])) == 2
    assert nearest(loads(9, 0, 0, distance=[0, 1, 2])) == 0


class Server(Actor):
    """Says where it is."""

    def __init__(self) -> None:
        self.rank = aiodaft.current_group().rank

    @method
    async def at(self) -> int:
        return self.rank

    @method
    async def at_for(self, item: int) -> int:
        return self.rank


@pytest.mark.parametrize("seed", range(3))
def test_members_on_a_node_that_is_being_drained_are_left_out(seed: int) -> None:
    simulation = Simulation(seed, hosts=("one", "two"), lease=4.0)

    async def main() -> None:
        async with simulation.runtime("one", unhandled="log") as rt:
            group = await rt.on(spread=True).group(4, Server)
            nodes = {(await rt.info(member)).node for member in group}
            assert nodes == {"one", "two"}
            assert {await group.any(Server.at) for _ in range(8)} == {0, 1, 2, 3}
            near = {rank for rank, member in enumerate(group) if (await rt.info(member)).node == "one"}
            assert {await group.with_policy(nearest).any(Server.at) for _ in range(8)} == near
            draining = controller_of(rt).nodes.named("two").drain(60.0)
            while not any(target_of(member).health() is Health.LEAVING for member in group):
                await asyncio.sleep(0.01)
            assert {await group.any(Server.at) for _ in range(8)} == near
            assert {rank async for rank in group.map(Server.at_for, range(12))} == near
            # Such members still take calls, and are better than a dead one.
            assert {await group[rank].at() for rank in {0, 1, 2, 3} - near} == {0, 1, 2, 3} - near
            await rt.stop(group)
            await draining

    simulation.run(main())
    assert simulation.problems == []
