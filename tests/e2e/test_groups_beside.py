"""Groups beside groups: rank by rank in the same processes (GC7)."""

from __future__ import annotations

import pytest
from beside import Generator, PlainGenerator, Trainer
from inside import actors_of
from supervised import AT_ONCE

import aiodaft
from aiodaft import Restart

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1 << 17  # elements of float64


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def test_members_share_the_processes_of_the_same_ranks_and_no_value_moves(rt: aiodaft.Runtime) -> None:
    trainers = await rt.group(3, Trainer)
    generators = await rt.on(with_=trainers).group(3, Generator)
    pids = await trainers.all(Trainer.pid)
    assert len(set(pids)) == 3
    assert await generators.all(Generator.pid) == list(enumerate(pids))
    made = trainers.all(Trainer.make, 4 * MIB)
    before = rt.traffic()
    taken = await generators.each(Generator.take, made)
    # No large value has left or reached a process.
    assert taken == [0] * 3
    assert rt.traffic().payloads_received == before.payloads_received


async def test_moving_a_group_elsewhere_changes_one_argument(rt: aiodaft.Runtime) -> None:
    trainers = await rt.group(2, Trainer)
    elsewhere = await rt.on().group(2, Generator)
    pids = {pid for _, pid in await elsewhere.all(Generator.pid)}
    assert not pids & set(await trainers.all(Trainer.pid))
    assert await elsewhere.each(Generator.take, trainers.all(Trainer.make, 4 * MIB)) == [1, 1]


async def test_services_and_slices_go_beside_groups_and_services(rt: aiodaft.Runtime) -> None:
    trainers = await rt.group(3, Trainer)
    pids = await trainers.all(Trainer.pid)
    services = await rt.on(with_=trainers[1:]).group(2, PlainGenerator)
    assert await services.all(PlainGenerator.pid) == pids[1:]
    beside = await rt.on(with_=services).group(2, Generator)
    assert await beside.all(Generator.pid) == list(enumerate(pids[1:]))


async def test_a_group_beside_another_grows_with_it(rt: aiodaft.Runtime) -> None:
    trainers = await rt.group(1, Trainer)
    generators = await rt.on(with_=trainers).group(1, Generator)
    with pytest.raises(ValueError, match=r"2 members go beside <Group of 1 Trainer>: there have to be as many"):
        await generators.resize(2)
    await trainers.resize(2)
    await generators.resize(2)
    assert await generators.all(Generator.pid) == list(enumerate(await trainers.all(Trainer.pid)))


async def test_a_member_that_is_restarted_goes_to_where_its_host_is(rt: aiodaft.Runtime) -> None:
    trainers = await rt.on(restart=Restart(backoff=AT_ONCE)).group(2, Trainer)
    generators = await rt.on(with_=trainers, restart=Restart(backoff=AT_ONCE)).group(2, Generator)
    first, second = await trainers.all(Trainer.pid)
    with pytest.raises(aiodaft.ActorDied):
        await trainers[1].die()
    again = await trainers[1].pid()
    assert again != second
    assert await generators.all(Generator.pid) == [(0, first), (1, again)]


async def test_a_group_that_cannot_go_beside_another_leaves_nothing(rt: aiodaft.Runtime) -> None:
    trainers = await rt.group(2, Trainer)
    await rt.stop(trainers[1])
    with pytest.raises(aiodaft.ActorDied):
        await rt.on(with_=trainers).group(2, Generator)
    assert len(actors_of(rt)) == 1
    with pytest.raises(ValueError, match=r"one actor goes beside one actor: give a member, with_=group\[0\]"):
        rt.on(with_=trainers).spawn(Generator)
    with pytest.raises(ValueError, match="node cannot be combined with with_"):
        rt.on(with_=trainers, node="x")
