"""Coroutines that begin at once behave as those of tasks do, but for beginning at once."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Coroutine
from contextvars import ContextVar
from typing import Any

import pytest

from aiodaft._runtime.starting import Starter

number: ContextVar[int] = ContextVar("number", default=0)


class Call:
    """What is started."""

    task: asyncio.Task[None] | None = None


class Begun:
    """Starts coroutines as message handlers do: where no task runs."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.starter = Starter(self.loop)

    async def __call__(self, *coros: Coroutine[Any, Any, None]) -> list[Call]:
        calls = [Call() for _ in coros]
        done: asyncio.Future[None] = self.loop.create_future()

        def handle() -> None:
            try:
                for call, coro in zip(calls, coros, strict=True):
                    self.starter.start(call, coro)
            except Exception as error:  # noqa: BLE001 - the test that waits gets it
                done.set_exception(error)
            else:
                done.set_result(None)

        self.loop.call_soon(handle)
        await done
        return calls


@pytest.fixture
async def begun() -> AsyncIterator[Begun]:
    begun = Begun()
    yield begun
    begun.starter.close()


async def nothing() -> None:
    pass


async def over(call: Call) -> None:
    assert call.task is not None
    await asyncio.wait([call.task])


async def test_it_begins_at_once(begun: Begun) -> None:
    said: list[str] = []

    async def work() -> None:
        said.append("began")
        await asyncio.sleep(0)
        said.append("went on")

    def handle() -> None:
        begun.starter.start(call, work())
        at_once.set_result(list(said))

    call = Call()
    at_once: asyncio.Future[list[str]] = begun.loop.create_future()
    begun.loop.call_soon(handle)
    assert await at_once == ["began"]
    await over(call)
    assert said == ["began", "went on"]


async def test_what_does_not_wait_takes_no_task_of_its_own(begun: Begun) -> None:
    seen: list[Any] = []

    async def look() -> None:
        seen.append(asyncio.current_task())

    before = len(asyncio.all_tasks())
    await begun(*(look() for _ in range(100)))
    await begun(look())
    assert len(seen) == 101
    assert len(set(seen)) == 1
    assert seen[0] is not asyncio.current_task()
    assert len(asyncio.all_tasks()) == before + 1


async def test_what_waits_goes_on_in_the_task_that_it_began_in(begun: Begun) -> None:
    seen: list[list[Any]] = []
    gate = asyncio.Event()

    async def look() -> None:
        mine = [asyncio.current_task()]
        seen.append(mine)
        await asyncio.sleep(0)
        mine.append(asyncio.current_task())
        await gate.wait()
        mine.append(asyncio.current_task())

    calls = await begun(look(), look(), look())
    gate.set()
    for call in calls:
        await over(call)
    assert [len(set(mine)) for mine in seen] == [1, 1, 1]
    assert [mine[0] for mine in seen] == [call.task for call in calls]
    assert len({mine[0] for mine in seen}) == 3


async def test_each_has_a_context_of_its_own(begun: Begun) -> None:
    seen: list[int] = []

    async def count(wait: bool) -> None:
        seen.append(number.get())
        number.set(number.get() + 1)
        if wait:
            await asyncio.sleep(0)
            await begun.loop.create_task(asyncio.sleep(0))
        seen.append(number.get())

    number.set(5)
    for call in await begun(count(False), count(True), count(False), count(True)):
        if call.task is not None and not call.task.done() and call.task.get_name() != "aiodaft call":
            await over(call)
    await asyncio.sleep(0.01)
    assert sorted(seen) == [5, 5, 5, 5, 6, 6, 6, 6]
    assert number.get() == 5


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


async def test_who_looks_at_its_task_sees_the_coroutine(begun: Begun) -> None:
    gate = asyncio.Event()

    async def work() -> None:
        await gate.wait()

    (call,) = await begun(work())
    assert call.task is not None
    for _ in range(2):
        assert [frame.f_code for frame in call.task.get_stack()] == [work.__code__]
        assert "work() running at" in repr(call.task)
        await asyncio.sleep(0)
    gate.set()
    await over(call)


async def test_many_may_wait_for_one_future(begun: Begun) -> None:
    shared: asyncio.Future[int] = begun.loop.create_future()
    seen: list[int] = []

    async def work() -> None:
        seen.append(await shared)

    calls = await begun(work(), work(), work())
    await asyncio.sleep(0)
    shared.set_result(7)
    for call in calls:
        await over(call)
    assert seen == [7, 7, 7]


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
async def test_a_cancellation_that_is_taken_back_hurts_nobody_else(begun: Begun, used: bool) -> None:
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


async def test_what_is_over_is_no_garbage(begun: Begun) -> None:
    """What a call held is free at once: its task, what that ran and its context are no circle."""

    class Held:
        pass

    refs: list[weakref.ref[Held]] = []
    var: ContextVar[Held] = ContextVar("var")

    async def work() -> None:
        held = Held()
        refs.append(weakref.ref(held))
        var.set(held)
        await asyncio.sleep(0)

    gc.disable()
    try:
        for _ in range(2):
            (call,) = await begun(work())
            await over(call)
            call.task = None
        await asyncio.sleep(0)
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


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


async def test_in_a_task_it_begins_in_its_turn(begun: Begun) -> None:
    said: list[str] = []

    async def work() -> None:
        said.append("work")

    call = Call()
    begun.starter.start(call, work())
    assert said == []
    await over(call)
    assert said == ["work"]


async def test_errors_come_out_where_they_are_raised(begun: Begun) -> None:
    async def at_once() -> None:
        raise ValueError("at once")

    async def later() -> None:
        await asyncio.sleep(0)
        raise ValueError("later")

    with pytest.raises(ValueError, match="at once"):
        await begun(at_once())
    (call,) = await begun(later())
    await over(call)
    assert call.task is not None
    assert str(call.task.exception()) == "later"
    await begun(nothing())


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
