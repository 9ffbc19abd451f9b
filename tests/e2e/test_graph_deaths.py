"""Graphs when actors die, scopes end and runtimes close (row CO5)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from graph_actors import Node
from packing import Warden

import aiodaft
from aiodaft.actor import target_of
from aiodaft.exceptions import RemoteProtocolError

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def spawn(rt: Any, count: int) -> list[Any]:
    return list(await asyncio.gather(*(rt.spawn(Node, f"n{index}") for index in range(count))))


async def test_the_error_of_a_side_effect_ends_the_scope(rt: aiodaft.Runtime) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with rt.scope() as scope, scope.spawn(Node, "side") as a:

            def flow(x: Any) -> Any:
                a.on_loop(x)
                return a.same(x)

            async with aiodaft.compile(flow) as graph:
                assert await graph(1) == 1
                assert await graph(13) == 13
                await asyncio.Event().wait()
    assert caught.group_contains(ValueError, match="side does not take 13")


async def test_a_dead_actor_fails_its_runs_and_is_replaced(rt: aiodaft.Runtime) -> None:
    a, b, c = await spawn(rt, 3)
    async with (
        aiodaft.compile(lambda x: c.same(b.die(a.same(x)))) as graph,
        aiodaft.compile(lambda x: c.same(a.same(x))) as other,
    ):
        assert await graph("good") == "good"
        runs = [graph(x) for x in ("die", "in flight", "in flight")]
        for run in runs:
            with pytest.raises(aiodaft.ActorDied, match="killed by SIGKILL") as caught:
                await run
            assert caught.value.actor.startswith("Node-")
            assert caught.value.signal == "SIGKILL"
        # Until it is replaced, runs fail; the other actors and graphs live on.
        with pytest.raises(aiodaft.ActorDied, match="SIGKILL"):
            await graph("later")
        assert await other(1) == 1
        await graph.replace(b, await rt.spawn(Node))
        assert await asyncio.gather(*(graph(x) for x in range(20))) == list(range(20))
        with pytest.raises(ValueError, match="has no part in"):
            await graph.replace(b, a)
        assert [(await actor.state())[1:] for actor in (a, c)] == [(0, 0), (0, 0)]


async def test_runs_fail_of_actors_that_live_and_have_lost_each_other(rt: aiodaft.Runtime) -> None:
    first, second = await spawn(rt, 2)
    processes = [target_of(actor).remote for actor in (first, second)]
    async with aiodaft.compile(lambda x: second.same(first.wait(x))) as graph:
        # Rings are there for the calls that follow, and the first actor waits.
        under_way = graph(0)
        assert await first.same(0) == 0
        await second.break_with(processes[0])
        with pytest.raises(RemoteProtocolError, match="it broke"):
            await under_way
        await first.open()
        for run in range(3):
            with pytest.raises(RemoteProtocolError, match="it broke"):
                await graph(run)
    while any([any((await actor.state())[1:]) for actor in (first, second)]):
        pass


async def test_a_run_that_waits_behind_another_graph_calls_the_new_actor(rt: aiodaft.Runtime) -> None:
    gate, old, new = await spawn(rt, 3)
    async with (
        aiodaft.compile(lambda x: old.same(gate.wait(x)), max_in_flight=1) as ahead,
        aiodaft.compile(lambda x: old.mark(x)) as graph,
    ):
        runs = [ahead(1), ahead(2), graph((3, None))]
        await graph.replace(old, new)
        await gate.open()
        await asyncio.gather(*runs)
        assert (await old.notes(), await new.notes()) == ([], [3])


@pytest.mark.parametrize("how", ["closed", "replaced"])
async def test_steps_of_a_run_that_was_given_up_go_on_and_hold_no_call_up(rt: aiodaft.Runtime, how: str) -> None:
    slow, between, dead = await spawn(rt, 3)
    async with aiodaft.compile(lambda x: dead.same(between.same(slow.wait(x)))) as graph:
        run = graph(1)
        # It has begun.
        assert await slow.same(0) == 0
        await rt.kill(dead)
        with pytest.raises(aiodaft.ActorDied):
            await run
        if how == "replaced":
            await graph.replace(dead, await rt.spawn(Node))
        else:
            await graph.aclose()
        # The first answer comes when the processes are being told, the second when they have been.
        for _ in range(2):
            await rt.info(between)
        later = between.same(2)
        await slow.open()
        assert await later == 2
        if how == "replaced":
            assert await graph(3) == 3
    while any([await actor.graph_objects() for actor in (slow, between)]):
        await between.collect_garbage(by_itself=True)


async def test_graphs_follow_actors_that_are_restarted(rt: aiodaft.Runtime) -> None:
    a, owner = await spawn(rt, 2)
    supervised = await rt.on(restart=aiodaft.Restart(intensity=9, backoff=aiodaft.Backoff(0))).spawn(Node)
    async with aiodaft.compile(lambda x: a.same(supervised.die(a.same(x))), max_in_flight=2) as graph:
        for restarts in (1, 2):
            assert await graph("good") == "good"
            # Two are under way and end with it; the others wait for the next incarnation.
            runs = [graph(x) for x in ("die", "in flight", "waits", "waits too")]
            for run in runs[:2]:
                with pytest.raises(aiodaft.ActorDied, match="SIGKILL"):
                    await run
            assert await asyncio.gather(*runs[2:]) == ["waits", "waits too"]
            assert (await rt.info(supervised)).restarts == restarts
        # An actor that owns a graph has to ask.
        assert await owner.outlives(supervised, 3) == [True, True, True]
        with pytest.raises(aiodaft.ActorDied, match="SIGKILL"):
            await graph("die")
        assert await graph("good") == "good"
    # Processes are told to forget a graph, and no task waits for that.
    while [(await actor.state())[:2] for actor in (a, supervised, owner)] != [(0, 0)] * 3:
        pass


async def test_graphs_of_actors_that_are_not_restarted_any_more_say_so(rt: aiodaft.Runtime) -> None:
    policy = aiodaft.Restart(intensity=1, backoff=aiodaft.Backoff(0))
    with pytest.raises(ExceptionGroup) as caught:
        async with rt.scope(restart=policy) as scope:
            supervised = await scope.spawn(Node)
            graph = aiodaft.compile(lambda x: supervised.die(x))
            for _ in range(2):
                with pytest.raises(aiodaft.ActorDied):
                    await graph("die")
            await asyncio.Event().wait()
    assert caught.group_contains(aiodaft.exceptions.RestartLimitReached)
    for _ in range(2):
        with pytest.raises(aiodaft.exceptions.RestartLimitReached, match="2 deaths"):
            await graph("good")
    await graph.aclose()


async def test_the_runs_of_a_dead_owner_are_cancelled_and_forgotten(rt: aiodaft.Runtime) -> None:
    owner, other = await spawn(rt, 2)
    running = owner.run_for_ever(other)
    while (await other.state())[1] != 1:
        pass
    await rt.kill(owner)
    with pytest.raises(aiodaft.ActorDied, match=r"^Node-\d+ \("):
        await running
    while await other.state() != (0, 0, 0):
        pass
    left = await rt.info(other)
    assert (left.running, left.queued, left.abandoned) == ((), 0, 0)
    assert await other.same("goes on") == "goes on"


async def test_a_thousand_runs_that_cannot_begin_all_say_so(rt: aiodaft.Runtime) -> None:
    (a,) = await spawn(rt, 1)
    # The gate stays closed.
    graph = aiodaft.compile(lambda x: a.wait(x))
    runs = [graph(index) for index in range(1_500)]
    await rt.kill(a)
    errors = await asyncio.gather(*runs, return_exceptions=True)
    assert {type(error) for error in errors} == {aiodaft.ActorDied}
    # The others may have been under way.
    assert all(error.executed is False for error in errors[16:] if isinstance(error, aiodaft.ActorDied))


async def test_what_was_made_for_the_dead_is_not_kept(rt: aiodaft.Runtime) -> None:
    a, b = await spawn(rt, 2)
    warden = await rt.on(with_=a).spawn(Warden)
    async with aiodaft.compile(lambda x: b.die(a.same(x))) as graph:
        assert await graph(b"good" * 75_000) == b"good" * 75_000
        for run in [graph(x) for x in ("die", *[b"late" * 75_000] * 10)]:
            with pytest.raises(aiodaft.ActorDied):
                await run
        for _ in range(10):
            with pytest.raises(aiodaft.ActorDied):
                await graph(b"later" * 75_000)
    while await warden.in_use():
        pass


async def test_entering_a_graph_waits_also_while_an_actor_is_replaced(rt: aiodaft.Runtime) -> None:
    a, b = await spawn(rt, 2)
    graph = aiodaft.compile(lambda x: a.same(x))
    entering = asyncio.get_running_loop().create_task(graph.__aenter__())
    await asyncio.sleep(0)
    await graph.replace(a, b)
    assert await entering is graph
    assert await graph("replaced") == "replaced"
    await graph.aclose()


async def test_a_runtime_that_closes_fails_the_runs_under_way() -> None:
    async with aiodaft.Runtime(preload=(), stop_grace=0) as rt:
        a, b = await spawn(rt, 2)
        run = aiodaft.compile(lambda x: b.same(a.wait(x)))(1)
    # Stopping `a` cancels its step; the effects of that may arrive before the end of `b`, or of the runtime.
    with pytest.raises((aiodaft.ActorDied, aiodaft.exceptions.RuntimeClosed, aiodaft.CallCancelled)):
        await run


async def test_without_shared_memory_graphs_go_over_the_links() -> None:
    async with aiodaft.Runtime(preload=(), transport="tcp") as rt:
        a, b = await spawn(rt, 2)
        async with aiodaft.compile(lambda x: b.same([a.same(x), x])) as graph:
            for data in (1, b"small", b"large" * 100_000):
                assert await graph(data) == [data, data]
        assert rt.traffic().control > 0
        # More than the other side lets in at a time.
        data = bytes(65536)
        async with aiodaft.compile(lambda x: b.same(a.same(x)), max_in_flight=150) as graph:
            assert await asyncio.gather(*(graph(data) for _ in range(150))) == [data] * 150
        assert await asyncio.gather(*(b.same(a.same(data)) for _ in range(150))) == [data] * 150
