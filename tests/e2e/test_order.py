"""The calls and runs of graphs that one process submits to one actor start in the order of submission."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from graph_actors import Node
from inside import peer_of

import aiodaft
from aiodaft.actor import target_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Copied by the helper thread, so that its call or run waits.
LARGE = bytes(4 << 20)


class Stranger(aiodaft.Actor):
    """Calls the members of a group in a process that has not called them before."""

    @aiodaft.method
    async def mark_all(self, group: aiodaft.Group[Node]) -> None:
        refs: list[Any] = []
        for number in range(0, 9, 3):
            refs += group.all(Node.mark, (number, None))
            refs += group.all(Node.mark, (number + 1, LARGE))
            refs += [member.mark((number + 2, None)) for member in group]
        await ends(refs)


async def spawn(rt: aiodaft.Runtime, count: int) -> list[Any]:
    return list(await asyncio.gather(*(rt.spawn(Node, f"n{index}") for index in range(count))))


async def ends(refs: list[Any]) -> None:
    for ref in refs:
        await ref.ready()


async def test_a_run_starts_behind_calls_with_arguments_that_are_being_copied(module_rt: aiodaft.Runtime) -> None:
    a, b = await spawn(module_rt, 2)
    async with aiodaft.compile(lambda x: b.mark(a.mark(x))) as graph:
        for number in range(0, 20, 2):
            await ends([a.mark((number, LARGE)), graph((number + 1, None))])
        assert await a.notes() == list(range(20))


async def test_a_run_starts_behind_calls_that_wait_for_the_window(module_rt: aiodaft.Runtime) -> None:
    (a,) = await spawn(module_rt, 1)
    async with aiodaft.compile(lambda x: a.mark(x)) as graph:
        refs = [a.mark((number, None)) for number in range(5_000)]
        run = graph((5_000, None))
        # The window is full: some of the calls have not been sent.
        assert peer_of(module_rt).connections[target_of(a).remote].session.waiting
        await ends([*refs, run])
        assert await a.notes() == list(range(5_001))


async def test_calls_start_behind_a_run_with_an_input_that_is_being_copied(module_rt: aiodaft.Runtime) -> None:
    a, b = await spawn(module_rt, 2)
    async with aiodaft.compile(lambda x: b.mark(a.mark(x))) as graph:
        run = graph((0, LARGE))
        await ends([run, a.mark((1, None)), b.mark((1, None)), graph((2, None))])
        assert await a.notes() == await b.notes() == [0, 1, 2]


async def test_calls_start_behind_a_run_that_waits_for_room_at_each_of_its_actors(module_rt: aiodaft.Runtime) -> None:
    a, b, other = await spawn(module_rt, 3)
    async with aiodaft.compile(lambda x: b.mark(a.wait(x)), max_in_flight=1) as graph:
        runs = [graph((number, None)) for number in range(2)]
        after = [a.mark((2, None)), b.mark((2, None))]
        # Other actors, and methods without an order, have nothing to do with it.
        await other.mark((0, None))
        assert await b.state() == (1, 1, 0)
        assert not any(ref.done() for ref in after)
        await a.open()
        await ends([*runs, *after])
        assert await a.notes() == [2]
        assert await b.notes() == [0, 1, 2]


async def test_calls_start_behind_a_run_of_a_graph_that_is_not_ready(module_rt: aiodaft.Runtime) -> None:
    a, b = await spawn(module_rt, 2)
    graph = aiodaft.compile(lambda x: b.mark(a.mark(x)))
    await ends([graph((0, None)), a.mark((1, None)), b.mark((1, None))])
    assert await a.notes() == await b.notes() == [0, 1]
    await graph.aclose()


async def test_an_actor_that_runs_a_graph_in_its_own_process_keeps_the_order(module_rt: aiodaft.Runtime) -> None:
    (a,) = await spawn(module_rt, 1)
    beside = await module_rt.on(with_=a).spawn(Node)
    assert await a.run_and_call(beside) == [0, 1, 2]


async def test_calls_and_runs_that_cross_do_not_wait_for_each_other_in_a_circle(module_rt: aiodaft.Runtime) -> None:
    a, b = await spawn(module_rt, 2)
    async with aiodaft.compile(lambda x: a.mark(b.mark(x))) as graph:
        first = a.mark((0, LARGE))
        second = a.mark((1, None))
        third = b.mark(second)
        run = graph((2, None))
        await ends([first, second, third, run])
        assert await a.notes() == [0, 1, 2]
        assert await b.notes() == [1, 2]


async def test_a_process_that_has_to_ask_where_members_are_calls_them_and_their_group_in_order(
    module_rt: aiodaft.Runtime,
) -> None:
    group = await module_rt.on(restart=aiodaft.Restart()).group(2, Node)
    stranger = await module_rt.spawn(Stranger)
    await stranger.mark_all(group)
    assert await group.all(Node.notes) == [list(range(9))] * 2


async def test_any_mix_of_calls_and_runs_starts_in_its_order_on_every_actor(module_rt: aiodaft.Runtime) -> None:
    """Of small and large values, refs that are not there yet, and graphs with little room, some not ready."""
    source = random.Random(15)
    actors = await spawn(module_rt, 3)
    actors.append(await module_rt.on(with_=actors[0]).spawn(Node))
    expected: list[list[int]] = [[] for _ in actors]

    def chain(places: Sequence[int]) -> Any:
        def flow(x: aiodaft.Ref[Any]) -> aiodaft.Ref[Any]:
            for place in places:
                x = actors[place].mark(x)
            return x

        return aiodaft.compile(flow, max_in_flight=2)

    paths = [*itertools.permutations(range(4), 2), range(4)][::3]
    graphs = [(path, chain(path)) for path in paths]
    refs: list[Any] = []
    places: Sequence[int]
    for number in range(200):
        value: Any = LARGE if source.random() < 0.1 else None
        if source.random() < 0.5:
            places, run = source.choice(graphs)
            refs.append(run((number, value)))
        else:
            places = [source.randrange(4)]
            refs.append(actors[places[0]].mark((number, value)))
        for place in places:
            expected[place].append(number)
    await ends(refs)
    assert [await actor.notes() for actor in actors] == expected
    await asyncio.gather(*(graph.aclose() for _, graph in graphs))


async def held_up(rt: aiodaft.Runtime) -> tuple[Any, Any, list[aiodaft.Ref[Any]]]:
    """An actor, a graph over it, and two runs, of which the second waits for the end of the first."""
    (a,) = await spawn(rt, 1)
    graph = aiodaft.compile(lambda x: a.wait(x), max_in_flight=1)
    await graph.__aenter__()
    return a, graph, [graph(0), graph(1)]


async def test_runs_that_wait_while_an_actor_is_replaced_keep_their_places(module_rt: aiodaft.Runtime) -> None:
    a, gate, new = await spawn(module_rt, 3)
    async with aiodaft.compile(lambda x: gate.wait(a.mark(x)), max_in_flight=1) as graph:
        runs = [graph((number, None)) for number in range(2)]
        freed = a.mark((2, None))
        replacing = asyncio.get_running_loop().create_task(graph.replace(a, new))
        # It stood behind the run that is for another actor now.
        await freed
        behind = new.mark((3, None))
        await gate.state()
        assert not behind.done()
        await gate.open()
        await ends([*runs, behind])
        await replacing
    assert await a.notes() == [0, 2]
    assert await new.notes() == [1, 3]


async def test_a_call_that_waits_behind_a_run_is_cancelled_at_once(module_rt: aiodaft.Runtime) -> None:
    a, graph, runs = await held_up(module_rt)
    cancelled, late, kept = a.mark((0, None)), a.mark((1, bytes(1 << 18))), a.mark((2, None))
    cancelled.cancel()
    with pytest.raises(aiodaft.CallCancelled, match="before it was sent") as caught:
        await cancelled
    assert caught.value.executed is False
    async with asyncio.TaskGroup() as group:
        waits = group.create_task(late.value())
        await asyncio.sleep(0)
        waits.cancel()
    stream = a.words("never made")
    await stream.aclose()
    await a.open()
    await ends([*runs, kept])
    assert await a.notes() == [2]
    await graph.aclose()


async def test_a_call_that_waits_behind_a_run_fails_at_its_deadline(module_rt: aiodaft.Runtime) -> None:
    a, graph, runs = await held_up(module_rt)
    with pytest.raises(aiodaft.DeadlineExceeded) as caught:
        async with aiodaft.deadline(0.01):
            late = a.mark((0, None))
            await late
    assert caught.value.executed is False
    await a.open()
    await ends(runs)
    assert await a.notes() == []
    await graph.aclose()


async def test_a_call_takes_its_arguments_as_they_are_when_it_waits_behind_a_run(module_rt: aiodaft.Runtime) -> None:
    a, graph, runs = await held_up(module_rt)
    buffer = bytearray(1 << 18)
    call = a.mark((0, buffer))
    buffer[:] = b"x" * len(buffer)
    await a.open()
    assert await call == (0, bytearray(1 << 18))
    await ends(runs)
    await graph.aclose()


async def test_a_cancelled_run_lets_the_calls_behind_it_go(module_rt: aiodaft.Runtime) -> None:
    a, graph, runs = await held_up(module_rt)
    call = a.mark((0, None))
    runs[1].cancel()
    assert await call == (0, None)
    with pytest.raises(aiodaft.CallCancelled):
        await runs[1]
    await a.open()
    assert await runs[0] == 0
    await graph.aclose()


@pytest.mark.asyncio(loop_scope="function")
async def test_calls_behind_a_run_fail_with_it_when_the_actor_dies(rt: aiodaft.Runtime) -> None:
    a, graph, runs = await held_up(rt)
    call = a.mark((0, None))
    await rt.kill(a)
    for ref in (*runs, call):
        with pytest.raises(aiodaft.ActorDied):
            await ref
    assert call.exception().executed is False  # type: ignore[union-attr]  # brief
    await graph.aclose()


@pytest.mark.asyncio(loop_scope="function")
async def test_no_more_than_max_pending_calls_wait_behind_a_run() -> None:
    async with aiodaft.Runtime(preload=(), max_pending=2) as rt:
        a, graph, runs = await held_up(rt)
        calls = [a.mark((number, None)) for number in range(2)]
        with pytest.raises(aiodaft.Overloaded, match=r"mark of Node-1 is refused: 2 calls .* with runs that wait"):
            a.mark((2, None))
        await a.open()
        await ends([*runs, *calls])
        assert await a.notes() == [0, 1]
        await graph.aclose()


@pytest.mark.asyncio(loop_scope="function")
async def test_calls_that_waited_behind_a_run_are_not_refused_when_their_turn_comes() -> None:
    async with aiodaft.Runtime(preload=(), max_pending=2) as rt:
        a, graph, runs = await held_up(rt)
        calls = [a.mark((number, None)) for number in range(2)]
        # They are outside the order, and take all that one connection may have without an answer.
        full = [a.wait_outside() for _ in range(2)]
        runs[1].cancel()
        for ref in full:
            ref.cancel()
        assert await asyncio.gather(*calls) == [(0, None), (1, None)]
        await a.open()
        assert await runs[0] == 0
        await graph.aclose()


@pytest.mark.asyncio(loop_scope="function")
async def test_what_waits_fails_when_the_runtime_is_closed() -> None:
    async with aiodaft.Runtime(preload=(), stop_grace=0) as rt:
        a, graph, runs = await held_up(rt)
        waiting = [graph(LARGE), a.mark((0, None))]
        refs = [*runs, *waiting]
    for ref in refs:
        with pytest.raises(aiodaft.DaftError):
            await ref
    await graph.aclose()


@pytest.mark.asyncio(loop_scope="function")
async def test_calls_and_runs_that_wait_for_a_restart_keep_their_order(rt: aiodaft.Runtime) -> None:
    other = await rt.spawn(Node)
    a = await rt.on(restart=aiodaft.Restart(intensity=9, backoff=aiodaft.Backoff(0))).spawn(Node)
    async with aiodaft.compile(lambda x: a.mark(other.mark(x))) as graph:
        await graph((0, None))
        with pytest.raises(aiodaft.ActorDied):
            await a.die("die")
        await ends([a.mark((1, LARGE)), graph((2, LARGE)), a.mark((3, None)), other.mark((3, None))])
        assert await a.notes() == [1, 2, 3]
        assert await other.notes() == [0, 2, 3]
