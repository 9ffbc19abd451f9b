"""The seven failures of torch.distributed with gloo that a user of SPMD meets, each beside the results of members of
groups.

The twins are real processes with a process group of gloo. The assertions on them are certain, however slow they are: a
wrong number, an abort, or members that wait for each other until their time of one second is over.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_twins import Twin
from keyed_members import Keyer, Round, expected, shuffled
from seven_failures import TIMED_OUT
from supervised import AT_ONCE

import aiodaft
from aiodaft import ActorDied, Restart

pytestmark = [pytest.mark.programs, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


async def run(rt: aiodaft.Runtime, count: int, method: Any, store: str) -> list[Any]:
    """The result, or the error, of each of several twins."""
    twins = await rt.on(restart=Restart("temporary")).group(count, Twin)
    return await asyncio.gather(*twins.all(method, store), return_exceptions=True)


def all_stuck(ends: list[Any]) -> bool:
    # The first whose time is over closes its connections, which the others may see.
    return all(isinstance(end, RuntimeError) for end in ends) and any(TIMED_OUT.search(str(end)) for end in ends)


def aborted(ends: list[Any]) -> bool:
    return any(isinstance(end, ActorDied) and end.signal == "SIGABRT" for end in ends)


async def test_1_opposite_orders_give_wrong_numbers(rt: aiodaft.Runtime, store: str) -> None:
    # The loss is 1 + 2, the gradient 100 + 200.
    assert await run(rt, 2, Twin.opposite_orders, store) == [(201.0, 102.0), (102.0, 201.0)]

    group = await rt.group(2, Keyer)
    first = group[0].all_reduce_in_order([("loss", 1.0), ("gradient", 100.0)])
    second = group[1].all_reduce_in_order([("gradient", 200.0), ("loss", 2.0)])
    assert await first == await second == {"loss": 3.0, "gradient": 300.0}


async def test_2_different_shapes_abort_the_process(rt: aiodaft.Runtime, store: str) -> None:
    assert aborted(await run(rt, 2, Twin.different_shapes, store))

    group = await rt.group(2, Keyer)
    found = [member.do("all_reduce", torch.ones(size), key="x") for member, size in zip(group, (6, 10), strict=True)]
    for end in await asyncio.gather(*found, return_exceptions=True):
        assert isinstance(end, ValueError)
        for told in ("all_reduce 'x'", "rank 0 has value torch.float32 (6,)", "rank 1 has value torch.float32 (10,)"):
            assert told in str(end)
    assert await group.all(Keyer.do, "all_reduce", 1) == [2, 2]


async def test_3_overlapping_groups_in_opposite_orders_hang(rt: aiodaft.Runtime, store: str) -> None:
    assert all_stuck(await run(rt, 3, Twin.overlapping_groups, store))

    # Rows and columns of a grid: each member begins with the one that its neighbour ends with.
    group = await rt.group(4, Keyer, axes={"a": 2, "b": 2})
    rounds = [(0, "a", "all_gather"), (0, "b", "all_gather")]
    orders = [0, 1], [1, 0], [1, 0], [0, 1]
    found = [member.program(rounds, order) for member, order in zip(group, orders, strict=True)]
    for rank, results in enumerate(await asyncio.gather(*found)):
        assert results == expected(rounds, rank, {"a": 2, "b": 2})


async def test_4_both_send_first(rt: aiodaft.Runtime, store: str) -> None:
    assert all_stuck(await run(rt, 2, Twin.both_send_first, store))

    group = await rt.group(2, Keyer)
    for other, found in zip((1, 0), await group.all(Keyer.swap, torch.arange(1000.0)), strict=True):
        assert torch.equal(found, torch.arange(1000.0) + other)


async def test_5_a_message_that_is_larger_than_the_room_for_it(rt: aiodaft.Runtime, store: str) -> None:
    assert aborted(await run(rt, 2, Twin.too_little_room, store))

    # A receiver does not say how much it expects.
    group = await rt.group(2, Keyer)
    for size in (10, 6):
        sent = group[0].send(torch.ones(size), 1)
        assert torch.equal(await group[1].receive(0), torch.ones(size))
        await sent


async def test_6_a_dead_peer_leaves_the_group_unusable(rt: aiodaft.Runtime, store: str) -> None:
    first, dead, third = await run(rt, 3, Twin.a_peer_dies, store)
    # Once, before the death.
    assert (first, third) == (1, 1)
    assert isinstance(dead, ActorDied)

    group = await rt.on(restart=Restart(intensity=9, backoff=AT_ONCE)).group(3, Keyer)
    assert await group.all(Keyer.do, "all_reduce", 1) == [3] * 3
    for rank in (0, 2):
        await group[rank].begin("all_reduce", 1, key="x")
    while not sum(await group.all(Keyer.meetings)):
        await asyncio.sleep(0)
    with pytest.raises(ActorDied):
        await group[1].die()
    for rank in (0, 2):
        with pytest.raises(ActorDied, match="SIGKILL"):
            await group[rank].finish("x")
    assert await group.all(Keyer.do, "all_reduce", 1, key="x") == [3] * 3


async def test_7_the_stuck_order_of_a_pipeline(rt: aiodaft.Runtime, store: str) -> None:
    assert all_stuck(await run(rt, 2, Twin.stuck_pipeline, store))

    group = await rt.group(2, Keyer)
    sent = torch.ones(1000)
    found = [group[0].send_first(sent * 0, "F1", "F0"), group[1].send_first(sent * 1, "F0", "F1")]
    for rank, received in enumerate(await asyncio.gather(*found)):
        assert torch.equal(received, sent * (1 - rank))


async def test_500_rounds_of_opposite_orders_and_overlapping_groups(rt: aiodaft.Runtime) -> None:
    source, sizes = random.Random(15), {"a": 2, "b": 2}
    group = await rt.group(4, Keyer, axes=sizes)
    operations = {"all": "all_reduce", "a": "all_gather", "b": "broadcast"}
    for _ in range(5):
        rounds: list[Round] = []
        for _ in range(100):
            axis = source.choice(list(operations))
            rounds.append((source.randrange(20), axis, operations[axis]))
        found = [member.program(rounds, shuffled(rounds, source)) for member in group]
        for rank, results in enumerate(await asyncio.gather(*found)):
            assert results == expected(rounds, rank, sizes)
    assert await group.all(Keyer.meetings) == [0] * 4
