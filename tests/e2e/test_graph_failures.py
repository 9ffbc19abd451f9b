"""Graphs when something goes wrong: the run fails, or part of it, and everything else goes on (row CO5)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from graph_actors import Node
from inside import peer_of

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def spawn(rt: Any, count: int) -> list[Any]:
    return list(await asyncio.gather(*(rt.spawn(Node, f"n{index}") for index in range(count))))


async def test_an_exception_fails_its_run_only_and_what_depends_on_it(module_rt: aiodaft.Runtime) -> None:
    a, b = await spawn(module_rt, 2)
    first, second = [(await module_rt.info(actor)).name for actor in (a, b)]

    def flow(x: Any) -> Any:
        made = a.on_loop(x)
        return {"depends": b.same(b.on_thread(made)), "other": [b.same(x)]}

    async with aiodaft.compile(flow) as graph:
        good, bad, later = graph(1), graph(13), graph(2)
        with pytest.raises(ValueError, match="n0 does not take 13") as caught:
            await bad["depends"]  # type: ignore[index]  # brief: statically this graph gives one ref
        raised, captured, *path = caught.value.__notes__
        assert raised.startswith("raised by Node.on_loop in Node-")
        assert "test_graph_failures.py" in captured
        result = "which did not run: its argument is the result of"
        assert path == [
            f"needed by Node.on_thread of {second}, {result} Node.on_loop of {first}",
            f"needed by Node.same of {second}, {result} Node.on_thread of {second}",
        ]
        assert await bad["other"][0] == 13  # type: ignore[index]  # as above
        assert await good["other"][0] == 1  # type: ignore[index]  # as above
        assert await later["depends"] == await b.on_thread(a.on_loop(2))  # type: ignore[index]  # as above


async def test_an_input_that_fails_is_told_as_it_is_one_by_one(module_rt: aiodaft.Runtime) -> None:
    a, b = await spawn(module_rt, 2)
    first, second = [(await module_rt.info(actor)).name for actor in (a, b)]
    async with aiodaft.compile(lambda x: a.same(b.same(x))) as graph:
        failing = a.on_loop(13)
        with pytest.raises(ValueError, match="13") as caught:
            await graph(failing)
        assert caught.value.__notes__[1] == (
            f"needed by Node.same of {second}, which did not run: its argument is the result of Node.on_loop of {first}"
        )
        with pytest.raises(aiodaft.exceptions.SerializationError):
            await graph(asyncio.get_running_loop())
        assert await graph(1) == 1


async def test_a_run_that_cannot_begin_keeps_none_of_its_inputs(module_rt: aiodaft.Runtime) -> None:
    a, b = await spawn(module_rt, 2)

    def flow(x: aiodaft.Ref[Any], y: aiodaft.Ref[Any]) -> aiodaft.Ref[Any]:
        return a.on_loop(x, y)

    async with aiodaft.compile(flow) as graph:
        used = b.same("used")
        with pytest.raises(aiodaft.exceptions.SerializationError):
            await graph([used], asyncio.get_running_loop())
        async with asyncio.timeout(30):
            await used.released()


async def test_a_graph_that_is_closed_leaves_nothing_for_the_garbage_collector(module_rt: aiodaft.Runtime) -> None:
    (a,) = await spawn(module_rt, 1)
    await a.collect_garbage(by_itself=False)
    for step in (a.on_loop, a.on_thread):
        async with aiodaft.compile(lambda x, step=step: step(x)) as graph:
            assert await asyncio.gather(*map(graph, range(10))) == await asyncio.gather(*map(step, range(10)))
    # The processes are told later.
    while await a.graph_objects():
        pass
    await a.collect_garbage(by_itself=True)


async def test_an_actor_that_was_stopped_fails_its_steps_only(module_rt: aiodaft.Runtime) -> None:
    a, b = await spawn(module_rt, 2)
    beside = await module_rt.on(with_=a).spawn(Node)
    async with aiodaft.compile(lambda x: [b.same(a.same(x)), b.same(beside.same(x))]) as graph:
        await asyncio.gather(*graph(1))
        await module_rt.stop(beside)
        lives, gone = graph(2)
        assert await lives == 2
        with pytest.raises(aiodaft.ActorDied, match="stopped") as caught:
            await gone
        assert caught.value.executed is False


async def test_a_step_that_ignores_its_cancellation_is_the_last_one_of_its_run(module_rt: aiodaft.Runtime) -> None:
    (a,) = await spawn(module_rt, 1)
    async with aiodaft.compile(lambda x: a.mark(a.wait_though_cancelled(x))) as graph:
        run = graph((0, None))
        while not (await module_rt.info(a)).running:
            pass
        run.cancel()
        with pytest.raises(aiodaft.CallCancelled):
            await run
        await a.open()
        assert await graph((1, None)) == (1, None)
        assert await a.notes() == [1]


@pytest.mark.parametrize("how", ["result", "task", "deadline"])
async def test_a_run_is_cancelled_where_it_waits_and_skips_the_rest(module_rt: aiodaft.Runtime, how: str) -> None:
    a, b = await spawn(module_rt, 2)

    def flow(x: Any) -> Any:
        waited = a.wait(x)
        if how != "deadline":
            # Cancelled with its run: no error for the scope. It would hear of a deadline, as it does of single calls.
            b.note(waited)
        return b.same(waited)

    async with aiodaft.compile(flow) as graph:
        if how == "deadline":
            async with aiodaft.deadline(0.05):
                run = graph("given up")
            with pytest.raises(aiodaft.DeadlineExceeded, match=r"deadline of Node\."):
                await run
        else:
            run = graph("given up")
            waiter = asyncio.get_running_loop().create_task(run.value())
            while not (await module_rt.info(a)).running:
                pass
            _ = run.cancel() if how == "result" else waiter.cancel()
            with pytest.raises(aiodaft.CallCancelled if how == "result" else asyncio.CancelledError):
                await waiter
        await a.open()
        assert await graph("after") == "after"
        assert await b.notes() == ([] if how == "deadline" else ["after"])
        assert (await a.state())[1:] == (await b.state())[1:] == (0, 0)


async def test_a_segment_says_for_each_step_that_its_deadline_passed(module_rt: aiodaft.Runtime) -> None:
    (a,) = await spawn(module_rt, 1)

    def flow(x: Any) -> Any:
        waited = a.wait(x)
        return waited, a.same(waited)

    async with aiodaft.compile(flow) as graph:
        async with aiodaft.deadline(0.05):
            waits, same = graph("too late")
        for ref, executed in ((waits, None), (same, False)):
            with pytest.raises(aiodaft.DeadlineExceeded, match=r"deadline of Node\.wait of Node-") as caught:
                await ref
            assert caught.value.executed is executed


async def test_one_of_two_results_may_be_given_up(module_rt: aiodaft.Runtime) -> None:
    a, b = await spawn(module_rt, 2)
    async with aiodaft.compile(lambda x: [a.wait(x), b.same(a.wait(x))]) as graph:
        first, second = graph(1)
        assert first.cancel()
        with pytest.raises(aiodaft.CallCancelled, match="its run goes on"):
            await first
        await a.open()
        assert await second == 1


async def test_a_graph_that_is_dropped_is_closed_after_its_last_run(module_rt: aiodaft.Runtime) -> None:
    a, b = await spawn(module_rt, 2)
    graphs = peer_of(module_rt).graphs
    owned = len(graphs.own)
    run = aiodaft.compile(lambda x: b.same(a.wait(x)))(b"x" * 300_000)
    await a.same()
    assert len(graphs.own) == owned + 1
    await a.open()
    assert len(await run) == 300_000
    del run
    while await a.state() != (0, 0, 0) or await b.state() != (0, 0, 0):
        pass
    assert len(graphs.own) == owned
    # From another thread, as garbage collection may come, and without any run.
    left = [aiodaft.compile(lambda x: a.same(x))]
    while await a.state() == (0, 0, 0):
        pass
    await asyncio.to_thread(left.clear)
    while await a.state() != (0, 0, 0):
        pass
    assert len(graphs.own) == owned


async def test_closing_waits_for_runs_and_frees_everything(module_rt: aiodaft.Runtime) -> None:
    a, b = await spawn(module_rt, 2)
    graph = aiodaft.compile(lambda x: b.same(a.wait(x)))
    run = graph(b"x" * 300_000)
    closing = asyncio.get_running_loop().create_task(graph.aclose())
    await a.open()
    await closing
    await graph.aclose()
    with pytest.raises(aiodaft.exceptions.RuntimeClosed, match="the graph is closed"):
        graph(1)
    assert len(await run) == 300_000
    del run
    while await a.state() != (0, 0, 0):
        pass
    with pytest.raises(ZeroDivisionError):
        async with aiodaft.compile(lambda x: a.wait(a.same(x))) as left:
            await a.same()
            abandoned = left(1)
            raise ZeroDivisionError
    assert abandoned.done()
