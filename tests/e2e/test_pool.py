"""Pools: plain functions in other processes."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Iterator
from functools import partial

import pytest
from inside import producer_of
from pool_tasks import Desk, cut, die, die_at_first, fail, heads, pid, square, total, wait

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module", loop_factories=["uvloop"])


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def test_functions_run_in_workers_with_the_arguments_of_that_line(rt: aiodaft.Runtime) -> None:
    async with rt.pool(2) as pool:
        values = [1, 2]
        refs = [pool.submit(total, values, start=10) for _ in range(4)]
        values.clear()
        assert await asyncio.gather(*refs) == [13] * 4
        assert await pool.submit(square, pool.submit(square, 3)) == 81
        assert await pool.submit(partial(total, [1]), start=1) == 2
        with pytest.raises(ValueError, match="wrong") as caught:
            await pool.submit(fail, "wrong")
        assert any("PoolWorker-1" in note for note in caught.value.__notes__)
        assert await pool.submit(pid) in {(await rt.info(worker)).pid for worker in pool.group}


async def test_a_worker_that_dies_takes_along_only_the_task_that_it_ran(rt: aiodaft.Runtime) -> None:
    async with rt.pool(2) as pool:
        desk = await rt.spawn(Desk)
        dying, living = pool.submit(wait, desk, True), pool.submit(wait, desk, True)
        waiting = [pool.submit(square, x) for x in range(5)]
        pids = {await desk.arrival(), await desk.arrival()}
        await desk.let(1)
        results = asyncio.gather(*waiting)
        # Those that wait go to the new worker, while the other one is busy.
        assert await results == [0, 1, 4, 9, 16]
        done = [ref for ref in (dying, living) if ref.done()]
        assert len(done) == 1
        with pytest.raises(aiodaft.ActorDied, match="wait"):
            await done[0]
        await desk.let(1)
        with pytest.raises(aiodaft.ActorDied):
            await (living if done == [dying] else dying)
        assert await pool.submit(pid) not in pids


async def test_a_task_that_may_run_twice_is_made_again(rt: aiodaft.Runtime) -> None:
    async with rt.pool(1, retries=1) as pool:
        assert await pool.submit(die_at_first) == 2


async def test_a_cancelled_task_that_waits_is_not_begun(rt: aiodaft.Runtime) -> None:
    async with rt.pool(1) as pool:
        desk = await rt.spawn(Desk)
        first, second = pool.submit(wait, desk), pool.submit(wait, desk)
        await desk.arrival()
        second.cancel()
        with pytest.raises(aiodaft.CallCancelled, match="before it was sent") as caught:
            await second
        assert caught.value.executed is False
        await desk.let(1)
        await first
        assert await pool.submit(square, 2) == 4


async def test_map_takes_items_as_workers_become_free(rt: aiodaft.Runtime) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(1000):
            taken.append(item)
            yield item

    async def later() -> AsyncIterator[int]:
        for item in range(5):
            yield item

    async with rt.pool(2) as pool:
        results = pool.map(square, items())
        assert [await anext(results) for _ in range(3)] == [0, 1, 4]
        await results.aclose()
        # 64 results and 2 tasks for each worker wait.
        assert len(taken) <= 2 * (64 + 2) + 3
        assert sorted([result async for result in pool.map(square, later(), ordered=False)]) == [0, 1, 4, 9, 16]
        found = [result async for result in pool.map(die, range(6), return_exceptions=True)]
        assert [type(one) for one in found] == [int, int, int, aiodaft.ActorDied, int, int]


async def test_code_that_takes_an_executor_takes_a_pool(rt: aiodaft.Runtime) -> None:
    async with rt.pool(2) as pool:
        executor = pool.executor()
        assert await asyncio.get_running_loop().run_in_executor(executor, square, 5) == 25
        assert await asyncio.to_thread(lambda: list(executor.map(square, range(4)))) == [0, 1, 4, 9]
        desk = await rt.spawn(Desk)
        runs = executor.submit(wait, desk)
        await desk.arrival()
        # The loop would wait for ever.
        for waits in (runs.result, runs.exception, lambda: list(executor.map(square, [2])), executor.shutdown):
            with pytest.raises(RuntimeError, match="the loop cannot wait for tasks: await the futures"):
                waits()
        with pytest.raises(TimeoutError):
            runs.result(timeout=0)
        with pytest.raises(RuntimeError, match="was shut down"):
            executor.submit(square, 1)
        assert runs.cancel()
        await asyncio.to_thread(executor.shutdown)
        with pytest.raises(concurrent.futures.CancelledError):
            runs.result()
        with pool.executor() as another:
            future = asyncio.wrap_future(another.submit(fail, "wrong"))
            with pytest.raises(ValueError, match="wrong"):
                await future


async def test_nothing_is_lost_when_a_pool_is_resized(rt: aiodaft.Runtime) -> None:
    async with rt.pool(2) as pool:
        desk = await rt.spawn(Desk)
        running = [pool.submit(wait, desk) for _ in range(2)]
        pids = [await desk.arrival(), await desk.arrival()]
        waiting = [pool.submit(square, x) for x in range(4)]
        shrinking = asyncio.get_running_loop().create_task(pool.resize(1))
        await desk.let(2)
        assert sorted(await asyncio.gather(*running)) == sorted(pids)
        await shrinking
        assert len(pool) == len(pool.group) == 1
        assert await asyncio.gather(*waiting) == [0, 1, 4, 9]
        running = [pool.submit(wait, desk) for _ in range(3)]
        await desk.arrival()
        await pool.resize(3)
        # The new ones take the tasks that waited for the only one.
        assert len({await desk.arrival(), await desk.arrival()}) == 2
        await desk.let(3)
        assert len(set(await asyncio.gather(*running))) == 3


async def test_a_worker_runs_as_many_coroutines_at_once_as_it_is_said(rt: aiodaft.Runtime) -> None:
    async with rt.pool(1, concurrency=2) as pool:
        desk = await rt.spawn(Desk)
        refs = [pool.submit(wait, desk) for _ in range(3)]
        await desk.arrival()
        await desk.arrival()
        await desk.let(3)
        assert len(set(await asyncio.gather(*refs))) == 1


async def test_bad_input_is_refused_at_its_line(rt: aiodaft.Runtime) -> None:
    for count, options, word in (
        (0, {}, "n=0"),
        (True, {}, "n=True"),
        (1, {"concurrency": 0}, "concurrency=0"),
        (1, {"retries": -1}, "retries=-1"),
    ):
        with pytest.raises(ValueError, match=word):
            rt.pool(count, **options)
    async with rt.pool(1) as pool:
        with pytest.raises(TypeError, match="a pool runs functions, not 3"):
            pool.submit(3)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="items is a generator: a task has one result"):
            pool.submit(items)
        with pytest.raises(TypeError, match="is no `async def` function and returned the coroutine sleep: give"):
            await pool.submit(lambda: asyncio.sleep(0))
        with pytest.raises(TypeError, match=r"square\(\) takes 1 positional argument"):
            await pool.submit(square, 1, 2)  # type: ignore[call-overload]
        with pytest.raises(aiodaft.exceptions.SerializationError, match=r"args\[1\] of square cannot travel"):
            pool.submit(square, asyncio.get_running_loop())  # type: ignore[arg-type]
        with pytest.raises(aiodaft.exceptions.SerializationError, match=r"pass its workers, `pool.group`"):
            pool.submit(square, pool)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="positive number of workers"):
            await pool.resize(0)


def items() -> Iterator[int]:
    yield 1


async def test_parts_of_results_go_from_worker_to_worker(rt: aiodaft.Runtime) -> None:
    async with rt.pool(2) as pool:
        before = rt.traffic().payload
        # The parts are cut where the maps ran, although no map has begun.
        maps = [pool.submit(cut, seed, 4) for seed in range(3)]
        rows = [ref.parts(4) for ref in maps]
        columns = [pool.submit(heads, list(column)) for column in zip(*rows, strict=True)]
        assert await asyncio.gather(*columns) == [[10 * seed + part for seed in range(3)] for part in range(4)]
        assert rt.traffic().payload == before
        workers = {(await rt.info(worker)).process for worker in pool.group}
        for ref, parts in zip(maps, rows, strict=True):
            assert {producer_of(part) for part in parts} == {producer_of(ref)} <= workers


async def test_values_without_such_parts_are_errors_of_the_parts(rt: aiodaft.Runtime) -> None:
    async with rt.pool(1) as pool:
        with pytest.raises(ValueError, match=r"positive number of parts, not 0"):
            pool.submit(square, 1).parts(0)  # type: ignore[misc]  # no list
        for wrong, kind, found in (
            (pool.submit(cut, 0, 3), ValueError, "of 3"),
            (pool.submit(square, 1), TypeError, "int"),
        ):
            for part in wrong.parts(2):  # type: ignore[misc]  # one is no list
                with pytest.raises(kind, match=rf"parts\(2\) of .*: expected a list or tuple of 2 items, not {found}"):
                    await part
        for part in pool.submit(fail, "wrong").parts(2):
            with pytest.raises(ValueError, match="wrong"):
                await part
        for part in pool.submit(die, 3).parts(2):  # type: ignore[misc]  # no list
            with pytest.raises(aiodaft.ActorDied, match="die"):
                await part
        values = rt.put((1, "two"))
        assert [await part for part in values.parts(2)] == [1, "two"]
        assert await asyncio.to_thread(lambda: [part.result() for part in values.parts(2)]) == [1, "two"]
