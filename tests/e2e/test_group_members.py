"""Groups with members that die, are restarted, are stopped or do not answer."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
from actors import Echo
from inside import agent_of, resources_of
from supervised import Balancer, Late, Lingerer, Mortal

import aiodaft
from aiodaft import Group, Patience
from aiodaft._protocol.node.worker import Health
from aiodaft.actor import target_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def kill(actor: Mortal) -> None:
    """Return once this process has seen the death."""
    with pytest.raises(aiodaft.ActorDied, match="SIGKILL"):
        await actor.die()


async def pids(group: Group[Mortal]) -> set[int]:
    """The members that calls go to."""
    return {await group.any(Mortal.pid) for _ in range(2 * len(group))}


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def test_any_and_map_leave_out_a_dead_member(rt: aiodaft.Runtime) -> None:
    group = await rt.group(3, Mortal)
    dead, *alive = await group.all(Mortal.pid)
    await kill(group[0])
    assert await pids(group) == set(alive)
    assert {value async for value in group.map(Mortal.add, [0] * 12)} == {0}
    streams = [group.any(Mortal.count, 1) for _ in range(4)]
    assert [[item async for item in stream] for stream in streams] == [[0]] * 4
    assert dead not in alive


async def test_a_call_of_a_group_without_a_living_member_fails_at_once_and_says_how_one_died(
    rt: aiodaft.Runtime,
) -> None:
    group = await rt.group(2, Mortal)
    for member in group:
        await kill(member)
    with pytest.raises(aiodaft.ActorDied, match=r"Mortal-\d+\[\d\] .* was killed by SIGKILL") as caught:
        await group.any(Mortal.pid)
    assert caught.value.executed is False
    with pytest.raises(aiodaft.ActorDied, match="SIGKILL"):
        await anext(group.map(Mortal.add, [1]))


async def test_any_and_map_leave_out_a_member_until_it_is_back(rt: aiodaft.Runtime, fifo: Path) -> None:
    group = await rt.group(2, Late, str(fifo))
    first, second = await group.all(Late.pid)
    await kill(group[0])
    assert await pids(group) == {second}
    assert [value async for value in group.map(Late.add, [1] * 8)] == list(range(1, 9))
    back = group[0].pid()
    await asyncio.to_thread(fifo.write_text, "")
    assert await back != first
    assert await pids(group) == {await back, second}


async def test_a_call_waits_if_all_members_are_being_restarted(rt: aiodaft.Runtime, fifo: Path) -> None:
    group = await rt.group(1, Late, str(fifo))
    (before,) = await group.all(Late.pid)
    await kill(group[0])
    refs = [group.any(Late.pid) for _ in range(4)]
    assert not any(ref.done() for ref in refs)
    await asyncio.to_thread(fifo.write_text, "")
    assert set(await asyncio.gather(*refs)) == {await group[0].pid()} != {before}


async def test_any_leaves_out_a_member_that_does_not_answer(rt: aiodaft.Runtime) -> None:
    group = await rt.on(patience=Patience(0.1, None)).group(2, Mortal)
    stopped, other = await group.all(Mortal.pid)
    os.kill(stopped, signal.SIGSTOP)
    await until(lambda: target_of(group[0]).health() is Health.SUSPECT)
    assert await pids(group) == {other}
    os.kill(stopped, signal.SIGCONT)
    await until(lambda: target_of(group[0]).health() is Health.ALIVE)
    assert await pids(group) == {stopped, other}


async def test_any_leaves_out_a_member_that_was_stopped_though_its_process_lives(rt: aiodaft.Runtime) -> None:
    host = await rt.spawn(Echo)
    group = await rt.on(with_=host).group(2, Mortal)
    balancer = await rt.spawn(Balancer, group)
    pid = await group[0].pid()
    await rt.stop(group[0])
    assert await pids(group) == {pid}
    # Another process learns of it from a call.
    with pytest.raises(aiodaft.ActorDied, match=r"Mortal-\d+\[0\] was stopped") as caught:
        await balancer.pids(2)
    assert caught.value.executed is True
    assert await balancer.pids(4) == [pid] * 4


async def test_another_process_leaves_out_what_it_knows_to_be_dead(rt: aiodaft.Runtime) -> None:
    group = await rt.group(3, Mortal)
    balancer = await rt.spawn(Balancer, group)
    _, *alive = await group.all(Mortal.pid)
    assert len(set(await balancer.pids(3))) == 3
    await kill(group[0])
    with pytest.raises(aiodaft.ActorDied):
        # Its own connection has to end before it knows.
        while True:
            await balancer.ask_first()
    assert set(await balancer.pids(4)) == set(alive)


async def test_another_process_finds_a_restarted_member_again(rt: aiodaft.Runtime, fifo: Path) -> None:
    group = await rt.group(2, Late, str(fifo))
    balancer = await rt.spawn(Balancer, group)
    _, second = await group.all(Late.pid)
    assert len(set(await balancer.pids(8))) == 2
    await kill(group[0])
    while set(await balancer.pids(2)) != {second}:
        pass
    back = group[0].pid()
    await asyncio.to_thread(fifo.write_text, "")
    expected = {await back, second}
    while set(await balancer.pids(2)) != expected:
        pass


async def test_a_map_goes_on_with_a_member_that_dies_in_the_middle_where_calls_may_be_made_again(
    rt: aiodaft.Runtime,
) -> None:
    group = await rt.on(restart="permanent").group(2, Mortal)
    lives = [0, 0, 1, 0, 0, 0]
    results = [result async for result in group.map(Mortal.survive, lives)]
    assert all(attempt > died for (attempt, _, _), died in zip(results, lives, strict=True))


async def test_a_map_ends_with_the_death_of_a_member_in_its_place(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Mortal)
    got: list[int] = []
    with pytest.raises(aiodaft.ActorDied, match="SIGKILL") as caught:
        async for attempt, _, _ in group.map(Mortal.survive, [0, 0, 1, 0, 0]):
            got.append(attempt)
    # Calls that ran at that moment in the same process died with it.
    assert got in ([], [1], [1, 1])
    assert caught.value.executed is None
    assert len(await pids(group)) == 1


async def leave(rt: aiodaft.Runtime, notes: str) -> None:
    async with rt.group(3, Lingerer, notes):
        pass


async def stop(rt: aiodaft.Runtime, notes: str) -> None:
    await rt.stop(await rt.group(3, Lingerer, notes))


async def shrink(rt: aiodaft.Runtime, notes: str) -> None:
    group = await rt.on(restart="permanent").group(3, Lingerer, notes)
    await group.resize(0)


async def stop_one(rt: aiodaft.Runtime, notes: str) -> None:
    await rt.stop(await rt.spawn(Lingerer, notes))


@pytest.mark.parametrize(("end", "again"), list(itertools.product([leave, stop, shrink, stop_one], [False, True])))
async def test_cancelling_the_end_of_a_group_leaves_no_member(
    rt: aiodaft.Runtime,
    tmp_path: Path,
    end: Callable[[aiodaft.Runtime, str], Coroutine[None, None, None]],
    again: bool,
) -> None:
    notes = tmp_path / "notes"
    ending = asyncio.get_running_loop().create_task(end(rt, str(notes)))
    await until(notes.exists)
    ending.cancel()
    if again:
        await asyncio.sleep(0)
        ending.cancel()
    await asyncio.wait([ending])
    assert ending.cancelled()
    assert await agent_of(rt).processes() == ()
    assert (await resources_of(rt))[1]["gpus"] == 4
