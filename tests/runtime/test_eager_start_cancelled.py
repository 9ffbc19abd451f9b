"""Coroutines that begin at once are cancelled as those of tasks are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from beginning import Begun, Call, nothing, over


@pytest.mark.parametrize("turns", range(1, 5))
@pytest.mark.parametrize("inner", ["future", "task", "turn", "done"])
async def test_cancelling_reaches_what_is_awaited(begun: Begun, inner: str, turns: int) -> None:
    """As it does in a task, whether that has gone on with the coroutine or not."""

    async def run(start: bool) -> list[str]:
        said: list[str] = []

        async def sleep() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                said.append("inner ended")

        async def work() -> None:
            try:
                if inner == "future":
                    await asyncio.get_running_loop().create_future()
                elif inner == "task":
                    task = begun.loop.create_task(sleep())
                    # It has begun.
                    await asyncio.sleep(0)
                    await task
                elif inner == "turn":
                    for _ in range(10):
                        await asyncio.sleep(0)
                else:
                    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    done.set_result(None)
                    await done
                    await asyncio.Event().wait()
            except asyncio.CancelledError:
                said.append("cancelled")
                await asyncio.sleep(0)
                said.append("cleaned up")
                raise

        if start:
            (call,) = await begun(work())
            task = call.task
        else:
            task = begun.loop.create_task(work())
            await asyncio.sleep(0)
        assert task is not None
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        said.append(f"{task.cancelled()}")
        await asyncio.sleep(0)
        return said

    assert await run(start=True) == await run(start=False)


async def test_cancelling_passes_the_message_on(begun: Begun) -> None:
    """Libraries know by it whether a cancellation is theirs."""
    said: list[Any] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            said.append(error.args)

    tasks: list[asyncio.Task[None]] = []

    def handle() -> None:
        # Neither task has gone on with its coroutine; the first has begun, the second has not.
        for coro in (work(), work()):
            call = Call()
            begun.starter.start(call, coro)
            assert call.task is not None
            call.task.cancel("mine")
            tasks.append(call.task)

    await begun(nothing())
    begun.loop.call_soon(handle)
    await asyncio.sleep(0)
    await asyncio.wait(tasks)
    assert said == [("mine",), ("mine",)]


@pytest.mark.parametrize("used", [False, True])
async def test_a_cancellation_that_is_taken_back_leaves_later_calls_alone(begun: Begun, used: bool) -> None:
    said: list[str] = []

    async def cancel_and_take_back() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        task.uncancel()

    async def innocent() -> None:
        await asyncio.sleep(0)
        said.append("innocent")

    if used:
        await begun(nothing(), cancel_and_take_back())
        await asyncio.sleep(0)
    _, first = await begun(cancel_and_take_back(), innocent())
    await over(first)
    await begun(cancel_and_take_back())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    (second,) = await begun(innocent())
    await over(second)
    assert said == ["innocent", "innocent"]


async def test_what_cancels_itself_is_cancelled_where_it_waits(begun: Begun) -> None:
    said: list[str] = []

    def cancel() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    async def cancel_and_end() -> None:
        cancel()

    async def cancel_and_wait() -> None:
        cancel()
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            said.append("cancelled")
            raise

    async def innocent() -> None:
        await asyncio.sleep(0)
        said.append("innocent")

    calls = await begun(cancel_and_end(), innocent(), cancel_and_wait(), innocent())
    for call in calls[1:]:
        await over(call)
    assert sorted(said) == ["cancelled", "innocent", "innocent"]
    assert [call.task.cancelled() for call in calls if call.task] == [True, False, True, False]


async def test_timeouts_and_groups_work_from_the_first_line(begun: Begun) -> None:
    said: list[str] = []

    async def limited() -> None:
        try:
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()
        except TimeoutError:
            said.append("timeout")

    async def grouped() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0))
        said.append("group")

    async def failing() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.wait_for(asyncio.sleep(9), 0.001))
                await asyncio.Event().wait()
        except* TimeoutError:
            said.append("failed group")

    for call in await begun(limited(), grouped(), failing()):
        await over(call)
    assert sorted(said) == ["failed group", "group", "timeout"]


async def test_a_spare_task_that_was_cancelled_is_replaced(begun: Begun) -> None:
    said: list[str] = []

    async def work() -> None:
        await asyncio.sleep(0)
        said.append("work")

    await begun(nothing())
    (spare,) = [task for task in asyncio.all_tasks() if task.get_name() == "aiodaft call"]
    # As programs do that cancel all tasks.
    spare.cancel()
    first, second = await begun(work(), work())
    await over(first)
    await over(second)
    assert said == ["work", "work"]
    begun.starter.close()
    await asyncio.wait([spare])
    assert [task for task in asyncio.all_tasks() if task.get_name() == "aiodaft call"] == []
