"""Training goes on while members die, join and leave (row GC4): after each step all have the same state."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from functools import reduce

import pytest
import torch
from replicas import Replica

import aiodaft
from aiodaft import ActorDied, Group

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Values of 80 KB stay at their members; those of 4 KB travel with the messages.
LARGE, SMALL = 20_000, 1_000
MOST = 5


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


class Training:
    """A controller of replicas, of which any may die at any time."""

    def __init__(self, group: Group[Replica], size: int, seed: int) -> None:
        self.group = group
        self.random = random.Random(seed)
        # Does the members' work here.
        self.twin = Replica(size)

    async def step(self, victims: int = 0) -> tuple[int, ...]:
        """One step, in the middle of which some members are killed; returns the ranks that are in the sum."""
        group = self.group
        doomed = self.random.sample(range(len(group)), victims)
        pids = await asyncio.gather(*(group[rank].pid() for rank in doomed))
        gradients = group.each(Replica.gradient, range(len(group)))
        summing = asyncio.get_running_loop().create_task(
            aiodaft.collectives.among_survivors(aiodaft.all_reduce, gradients)
        )
        for pid in pids:
            for _ in range(self.random.randrange(40)):
                await asyncio.sleep(0)
            os.kill(pid, signal.SIGKILL)
        ranks, totals = await summing
        # A member that dies from now on loses its state with its life; all others apply the same sum.
        applied = [group[rank].apply(total, len(ranks)) for rank, total in zip(ranks, totals, strict=True)]
        for ended in await asyncio.gather(*applied, return_exceptions=True):
            assert ended is None or isinstance(ended, ActorDied)
        assert set(range(len(group))) - set(ranks) <= set(doomed)
        total = reduce(torch.add, [await Replica.gradient.__wrapped__(self.twin, rank) for rank in ranks])
        await Replica.apply.__wrapped__(self.twin, total, len(ranks))
        return ranks

    async def churn(self) -> None:
        """One random event, and a step."""
        group, event = self.group, self.random.choice(["die", "replace", "join", "leave"])
        size = len(group)
        if event == "join" and size < MOST:
            await group.resize(self.random.randint(size + 1, MOST), prepare=self.catch_up)
        elif event == "leave" and size > 2:
            await group.remove(group[self.random.randrange(size)])
        elif event == "die" and size > 2:
            await self.step(self.random.randint(1, size - 1))
            await group.heal()
        elif event == "replace" and size > 1:
            await self.step(self.random.randint(1, size - 1))
            await group.heal(size, prepare=self.catch_up)
            assert len(group) == size
        await self.step()
        await self.agree()

    async def catch_up(self, new: list[Replica]) -> None:
        # Of a member that lives.
        state = self.group.any(Replica.state)
        await asyncio.gather(*(replica.load(aiodaft.typing.lazy(state)) for replica in new))

    async def agree(self) -> None:
        """Check that all members have the same state: that of the sums, in the order of ranks."""
        assert set(await self.group.all(Replica.digest)) == {await Replica.digest.__wrapped__(self.twin)}


async def begin(rt: aiodaft.Runtime, count: int, size: int, seed: int) -> Training:
    # With this policy, a death that no call meets is no error of the runtime.
    return Training(await rt.on(restart="temporary").group(count, Replica, size), size, seed)


async def test_four_members_become_three_in_the_middle_of_a_sum_and_then_five(rt: aiodaft.Runtime) -> None:
    training = await begin(rt, 4, LARGE, seed=4)
    group = training.group
    assert await training.step() == (0, 1, 2, 3)
    await training.agree()
    before = rt.traffic()
    survived = await training.step(victims=1)
    assert len(survived) in {3, 4}
    (dead,) = await group.heal()
    assert set(range(4)) - set(survived) <= {dead}
    await training.agree()
    assert await training.step() == (0, 1, 2)
    await group.resize(5, prepare=training.catch_up)
    await training.agree()
    assert await training.step() == (0, 1, 2, 3, 4)
    await training.agree()
    # Neither the sums nor the state of the new members have passed the controller.
    assert rt.traffic().payload_received == before.payload_received


@pytest.mark.timeout(180)
@pytest.mark.parametrize("count", [30, pytest.param(100, marks=pytest.mark.soak)])
async def test_many_events_leave_all_members_with_the_same_state(rt: aiodaft.Runtime, count: int) -> None:
    training = await begin(rt, 4, SMALL, seed=15)
    for _ in range(count):
        await training.churn()


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("seed", range(3))
async def test_churn_for_long(rt: aiodaft.Runtime, size: int, seed: int) -> None:
    training = await begin(rt, 3, size, seed)
    for _ in range(1000):
        await training.churn()
