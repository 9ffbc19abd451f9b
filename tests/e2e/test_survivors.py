"""Collectives among members of which some die or are restarted (row GC4)."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from collective_actors import Member, lethal, made
from inside import producer_of
from supervised import AT_ONCE
from torch import Tensor

import aiodaft
from aiodaft import ActorDied, CallCancelled, Group, Ref, Refs, Restart
from aiodaft.collectives import first_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

LARGE = (131, 131)


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def mortals(rt: aiodaft.Runtime, count: int) -> Group[Member]:
    """Their death is no error of the runtime."""
    return await rt.on(restart="temporary").group(count, Member)


def values(group: Group[Member], shape: tuple[int, ...] = LARGE) -> list[Ref[Tensor]]:
    return [member.make(seed, *shape) for seed, member in enumerate(group)]


def total(ranks: tuple[int, ...], shape: tuple[int, ...] = LARGE) -> Tensor:
    first, *others = (made(rank, *shape) for rank in ranks)
    for other in others:
        first = first + other
    return first


async def same(done: aiodaft.collectives.Survivors[Tensor], expected: Tensor) -> bool:
    assert len(done.refs) == len(done.ranks)
    return all(torch.equal(value, expected) for value in await done.refs)


async def test_without_a_death_it_is_the_collective_itself(rt: aiodaft.Runtime) -> None:
    group = await mortals(rt, 3)
    done = await aiodaft.collectives.among_survivors(aiodaft.all_reduce, values(group), "max", algorithm="ring")
    assert done.ranks == (0, 1, 2)
    assert all(ref.done() for ref in done.refs)
    assert await same(done, torch.stack([made(rank, *LARGE) for rank in range(3)]).amax(0))
    gathered = await aiodaft.collectives.among_survivors(aiodaft.all_gather, [member.give(7) for member in group])
    assert await gathered.refs == [[7] * 3] * 3


@pytest.mark.parametrize("shape", [(3,), LARGE])
async def test_members_that_die_before_or_in_the_middle_are_left_out(rt: aiodaft.Runtime, shape: Any) -> None:
    group = await mortals(rt, 5)
    refs = values(group, shape)
    await asyncio.gather(*(ref.ready() for ref in refs))
    # One dies while it makes its value, one has made it, and one dies while it reduces.
    refs[0] = group[0].die()
    os.kill(await group[2].pid(), signal.SIGKILL)
    await group[3].doom()
    done = await aiodaft.collectives.among_survivors(aiodaft.all_reduce, refs, lethal, algorithm="exchange")
    assert done.ranks == (1, 4)
    assert await same(done, total((1, 4), shape))
    assert [producer_of(ref) for ref in done.refs] == [producer_of(refs[1]), producer_of(refs[4])]
    assert await group.heal() == [0, 2, 3]


async def test_a_function_of_ones_own_is_carried_out_among_survivors(rt: aiodaft.Runtime) -> None:
    group = await mortals(rt, 3)
    seen: list[int] = []

    def twice(refs: Any) -> Refs[Tensor]:
        seen.append(len(refs))
        return aiodaft.all_reduce(aiodaft.all_reduce(refs))

    refs = values(group)
    os.kill(await group[1].pid(), signal.SIGKILL)
    done = await aiodaft.collectives.among_survivors(twice, refs)
    assert (done.ranks, seen) == ((0, 2), [3, 2])
    assert await same(done, total((0, 2)) + total((0, 2)))


async def test_when_no_value_is_left_the_death_is_raised(rt: aiodaft.Runtime) -> None:
    group = await mortals(rt, 2)
    with pytest.raises(ActorDied, match="SIGKILL"):
        await aiodaft.collectives.among_survivors(aiodaft.all_reduce, group.all(Member.die))


async def test_what_is_no_death_is_raised(rt: aiodaft.Runtime) -> None:
    group = await mortals(rt, 3)
    with pytest.raises(ValueError, match="the members disagree"):
        await aiodaft.collectives.among_survivors(
            aiodaft.all_reduce, [member.make(1, rank + 1) for rank, member in enumerate(group)]
        )
    with pytest.raises(LookupError, match="no gradient"):
        await aiodaft.collectives.among_survivors(
            aiodaft.all_reduce, [group[0].die(), group[1].fail(), group[2].make(1, 2)]
        )
    # The death of another actor, which a method has met, is that of its value.
    other = await rt.spawn(Member)
    done = await aiodaft.collectives.among_survivors(aiodaft.all_reduce, [group[1].give(other.die()), group[2].give(5)])
    assert (done.ranks, await done.refs) == ((1,), [5])


async def test_a_value_that_is_made_again_takes_part(rt: aiodaft.Runtime) -> None:
    group = await rt.on(restart=Restart(backoff=AT_ONCE)).group(3, Member)
    refs = [*values(group[:2]), group[2].make_in_second_life(2, *LARGE)]
    done = await aiodaft.collectives.among_survivors(aiodaft.all_reduce, refs)
    assert done.ranks == (0, 1, 2)
    assert await same(done, total((0, 1, 2)))


async def test_a_member_that_is_being_restarted_gets_its_result_where_it_will_be(
    rt: aiodaft.Runtime, fifo: Path
) -> None:
    group = await rt.on(restart=Restart(backoff=AT_ONCE)).group(2, Member, str(fifo))
    with pytest.raises(ActorDied, match="SIGKILL"):
        await group[0].die()
    refs = values(group)
    before = rt.traffic()
    first = aiodaft.all_reduce(refs)
    second = aiodaft.all_reduce(first)
    copies = aiodaft.broadcast(refs[1], group)
    assert not any(ref.done() for ref in (*first, *second))
    await asyncio.to_thread(fifo.write_text, "")
    await asyncio.gather(*(ref.ready() for ref in (*first, *second, *copies)))
    assert rt.traffic().payload_received == before.payload_received
    places = [producer_of(ref) for ref in refs]
    assert [[producer_of(ref) for ref in results] for results in (first, second, copies)] == [places] * 3
    assert len(set(places)) == 2
    assert all(torch.equal(value, total((0, 1)) * 2) for value in await second)


async def test_a_collective_ends_when_a_member_is_not_restarted(rt: aiodaft.Runtime, fifo: Path) -> None:
    group = await rt.on(restart=Restart(backoff=AT_ONCE)).group(2, Member, str(fifo))
    with pytest.raises(ActorDied, match="SIGKILL"):
        await group[0].die()
    results = aiodaft.all_reduce(values(group))
    await rt.stop(group[0])
    for result in results:
        with pytest.raises(ActorDied):
            await result


def hold(group: Group[Member], ranks: tuple[int, ...]) -> list[Ref[float]]:
    """Values of members, of which those at some ranks come only when a gate is opened."""
    return [
        member.after_gate(float(rank)) if rank in ranks else member.give(float(rank))
        for rank, member in enumerate(group)
    ]


async def test_the_first_k_of_n_are_combined_and_the_late_ones_cancelled(rt: aiodaft.Runtime) -> None:
    group = await mortals(rt, 4)
    refs = hold(group, (0, 2))
    first = await first_of(refs, 2)
    assert (first.ranks, first.late) == ((1, 3), {})
    assert [producer_of(ref) for ref in first.refs] == [producer_of(refs[rank]) for rank in first.ranks]
    assert await aiodaft.all_reduce(first.refs) == [4.0, 4.0]
    for rank in (0, 2):
        with pytest.raises(CallCancelled):
            await refs[rank]
    # The members go on.
    assert await group.all(Member.give, 1) == [1] * 4


async def test_values_that_were_late_are_those_of_the_next_round(rt: aiodaft.Runtime) -> None:
    group = await mortals(rt, 3)
    first = await first_of(hold(group, (1,)), 2, late="keep")
    assert (first.ranks, list(first.late)) == ((0, 2), [1])
    await group[1].open_gate()
    values = [first.late[rank] if rank in first.late else group[rank].give(10.0 + rank) for rank in range(3)]
    assert await aiodaft.all_reduce((await first_of(values, 3)).refs) == [23.0] * 3


async def test_the_first_k_leave_out_values_that_a_death_has_taken_if_they_can(rt: aiodaft.Runtime) -> None:
    group = await mortals(rt, 3)
    refs = [group[0].die(), group[1].give(1.0), group[2].after_gate(2.0)]
    await refs[0].ready()
    waiting = asyncio.get_running_loop().create_task(first_of(refs, 2))
    await group[2].open_gate()
    assert (await waiting).ranks == (1, 2)
    with pytest.raises(ActorDied, match="SIGKILL"):
        await first_of(refs, 3)


async def test_an_error_among_the_first_is_raised_and_a_cancelled_wait_cancels_no_call(rt: aiodaft.Runtime) -> None:
    group = await mortals(rt, 2)
    refs = [group[0].after_gate(torch.ones(1)), group[1].fail()]
    with pytest.raises(LookupError, match="no gradient"):
        await first_of(refs, 1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await first_of(refs[:1], 1)
    await group[0].open_gate()
    assert torch.equal(await refs[0], torch.ones(1))


async def test_a_wrong_number_of_first_values_is_refused_before_anything_waits(rt: aiodaft.Runtime) -> None:
    group = await mortals(rt, 2)
    refs = hold(group, (0, 1))
    for k in (0, 3, 1.5, True, "2"):
        with pytest.raises(ValueError, match=f"k is the number of values to wait for, 1 to 2, not {k!r}"):
            await first_of(refs, k)  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(ValueError, match='late is "cancel" or "keep", not \'drop\''):
        await first_of(refs, 1, late="drop")  # type: ignore[arg-type]  # the mistake under test
    assert not any(ref.done() for ref in refs)
    await group.all(Member.open_gate)
    assert await asyncio.gather(*refs) == [0.0, 1.0]
