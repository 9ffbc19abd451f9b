"""Coroutines that begin at once behave as those of tasks do, but for beginning at once."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextvars import Context, ContextVar
from typing import Any

import pytest
from beginning import Begun, Call, nothing, over

number: ContextVar[int] = ContextVar("number", default=0)


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
    calls = await begun(count(False), count(True), count(False), count(True))
    for call in calls[1::2]:
        await over(call)
    assert sorted(seen) == [5, 5, 5, 5, 6, 6, 6, 6]
    assert number.get() == 5


async def test_a_context_that_it_brings_is_its_own_also_if_nothing_is_in_it(begun: Begun) -> None:
    seen: list[int] = []

    async def count() -> None:
        seen.append(number.get())
        number.set(1)
        await asyncio.sleep(0)
        seen.append(number.get())

    call = Call()
    call.context = Context()
    number.set(5)
    begun.loop.call_soon(begun.starter.start, call, count())
    await asyncio.sleep(0)
    await over(call)
    assert seen == [0, 1]
    assert call.context[number] == 1


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


async def test_what_is_over_is_no_garbage(begun: Begun) -> None:
    """The objects that a call held are free at once: its task, its coroutine and its context are no circle."""

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
