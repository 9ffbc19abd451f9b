"""Graphs with collectives follow the restarts of members, which have each step in the process where they are."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from graph_actors import Node
from inside import producer_of
from overlapping import Step, Stepper
from supervised import AT_ONCE, Late

import aiodaft
from aiodaft import ActorDied, CallCancelled, GroupChanged, Ref, Restart

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOR_EVER = Restart(intensity=99, backoff=AT_ONCE)


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def places(results: Any) -> list[Any]:
    await asyncio.gather(*results)
    return [producer_of(result) for result in results]


@pytest.mark.parametrize("algorithm", ["exchange", "star", "tree"])
async def test_a_run_that_a_member_ends_says_so_and_the_next_has_its_new_process(
    rt: aiodaft.Runtime, algorithm: Any
) -> None:
    group = await rt.on(restart=FOR_EVER).group(3, Node)

    def flow(a: Any, b: Any, c: Any) -> list[Ref[int]]:
        values = [member.die(value) for member, value in zip(group, (a, b, c), strict=True)]
        totals = aiodaft.all_reduce(values, algorithm=algorithm)
        # Of results of a collective, too.
        return list(aiodaft.all_reduce(totals, algorithm=algorithm))

    async with aiodaft.compile(flow) as graph:
        for rank in range(3):
            assert await asyncio.gather(*graph(1, 2, 3)) == [18] * 3
            for result in graph(*("die" if rank == other else 1 for other in range(3))):
                with pytest.raises(ActorDied, match=rf"Node-\d+\[{rank}\] \(pid \d+\) was killed by SIGKILL"):
                    await result
            # Each result is at its member.
            assert await places(graph(1, 2, 3)) == await places([member.same() for member in group])


async def test_the_parts_of_a_step_stay_at_its_actor_also_after_a_restart(rt: aiodaft.Runtime) -> None:
    group = await rt.on(restart=FOR_EVER).group(2, Node)

    def flow(pair: Any) -> list[Ref[Any]]:
        first, second = group[0].same(pair).parts(2)
        return [group[1].same(aiodaft.typing.lazy([second, first])), first]

    async with aiodaft.compile(flow) as graph:
        for _ in range(2):
            turned, first = graph([1, 2])
            assert (await turned, await first) == ([2, 1], 1)
            assert await places([first]) == await places([group[0].same([1])])
            with pytest.raises(ActorDied):
                await group[0].die("die")
            await group[0].same(0)


async def test_members_without_other_steps_are_followed(rt: aiodaft.Runtime) -> None:
    group, source = await rt.on(restart=FOR_EVER).group(2, Node), await rt.spawn(Node)
    outside = group[0].same([5])
    assert await outside == [5]
    async with (
        aiodaft.compile(lambda x: list(aiodaft.broadcast(source.same(x), group))) as hands_out,
        aiodaft.compile(lambda x: list(aiodaft.all_gather([outside, source.same(x)]))) as takes_in,
    ):
        for member in (*group, group[0]):
            with pytest.raises(ActorDied):
                await member.die("die")
            assert await asyncio.gather(*hands_out("all")) == ["all"] * 2
            assert await places(hands_out(1)) == await places([member.same() for member in group])
            assert await asyncio.gather(*takes_in(6)) == [[[5], 6]] * 2


async def test_a_graph_that_is_compiled_while_a_member_is_down_waits_for_it(rt: aiodaft.Runtime, fifo: Path) -> None:
    late, other = await rt.spawn(Late, str(fifo)), await rt.spawn(Node)
    with pytest.raises(ActorDied):
        await late.die()
    (outside,) = aiodaft.broadcast(other.same("outside"), [late])

    def flow(x: Any) -> list[Ref[Any]]:
        return [*aiodaft.broadcast(other.same(x), [late, other]), *aiodaft.all_gather([outside, other.same(x)])]

    graph = aiodaft.compile(flow)
    results = graph("both")
    # Calls of the actors would wait for the run.
    await rt.info(other)
    assert not any(result.done() for result in results)
    await asyncio.to_thread(fifo.write_text, "")
    assert await asyncio.gather(*results) == ["both", "both", ["outside", "both"], ["outside", "both"]]
    await graph.aclose()


async def test_a_run_waits_until_all_members_are_up_at_the_same_time(rt: aiodaft.Runtime, tmp_path: Path) -> None:
    gates = [tmp_path / "first", tmp_path / "second"]
    for gate in gates:
        os.mkfifo(gate)
    first, second = members = [await rt.spawn(Late, str(gate)) for gate in gates]

    async def comes_back(index: int) -> None:
        await asyncio.to_thread(gates[index].write_text, "")
        while (await rt.info(members[index])).restarting:
            pass

    async with aiodaft.compile(lambda x: [second.add(first.add(x)), *aiodaft.broadcast(x, members)]) as graph:
        for member in members:
            with pytest.raises(ActorDied):
                await member.die()
        results = graph(1)
        await comes_back(0)
        os.kill((await rt.info(first)).pid, signal.SIGKILL)
        while not (await rt.info(first)).restarting:
            pass
        await comes_back(1)
        await comes_back(0)
        assert await asyncio.gather(*results) == [1, 1, 1]
        assert await places(results[1:]) == await places([member.get() for member in members])


async def test_the_steps_beside_an_actor_that_is_replaced_move_to_the_new_one(rt: aiodaft.Runtime) -> None:
    old, other, new, unknown = [await rt.spawn(Node) for _ in range(4)]
    async with aiodaft.compile(lambda x: list(aiodaft.broadcast(other.same(x), [old, other]))) as graph:
        assert await asyncio.gather(*graph(1)) == [1, 1]
        await rt.kill(old)
        with pytest.raises(ActorDied):
            await graph(2)[0]
        with pytest.raises(ValueError, match="has no part in"):
            await graph.replace(unknown, new)
        await graph.replace(old, new)
        assert await places(graph(3)) == await places([new.same(), other.same()])


async def test_eager_collectives_take_results_of_graphs(rt: aiodaft.Runtime) -> None:
    group = await rt.on(restart=FOR_EVER).group(2, Node)
    async with aiodaft.compile(lambda x: list(aiodaft.broadcast(group[0].same(x), group))) as graph:
        for _ in range(2):
            assert await aiodaft.all_reduce(graph(2)) == [4, 4]
            with pytest.raises(ActorDied):
                await group[1].die("die")


async def test_a_graph_of_an_actor_follows_members_that_another_process_owns(rt: aiodaft.Runtime) -> None:
    owner, member = await rt.spawn(Node), await rt.on(restart=FOR_EVER).spawn(Node)
    assert await owner.outlives(member, 3, beside=True) == [True, True, True]


async def test_collectives_in_methods_go_on_in_graphs_when_a_member_was_restarted(rt: aiodaft.Runtime) -> None:
    group = await rt.on(restart=FOR_EVER).group(2, Stepper)

    async def run(name: str) -> list[Any]:
        return await asyncio.gather(*graph(Step(name, 1), Step(name, 2)), return_exceptions=True)

    async with aiodaft.compile(lambda a, b: tuple(group.each(Stepper.step, [a, b]))) as graph:
        assert await run("whole") == [[1, 2]] * 2
        for rank in range(2):
            # The other one waits for it in the collective.
            broken = graph(*(Step("first", other, held=other == rank) for other in range(2)))
            await group[rank].holds("first")
            with pytest.raises(ActorDied):
                await group[rank].die()
            found = await asyncio.gather(*broken, return_exceptions=True)
            assert isinstance(found[rank], ActorDied)
            assert isinstance(found[1 - rank], ActorDied | GroupChanged | CallCancelled)
            # A member that has not heard of the restart says so, as in a call of the group.
            while (again := await run("next")) != [[1, 2]] * 2:
                assert all(isinstance(one, ActorDied | GroupChanged | CallCancelled) for one in again)
