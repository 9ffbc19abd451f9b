"""Generators of `def` methods: streams whose steps run on the actor's thread."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TypeVar

import pytest
from stepping import Stepper

import aiodaft

T = TypeVar("T")

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def items_of(stream: aiodaft.Stream[T]) -> list[T]:
    return [item async for item in stream]


async def lines_of(rt: aiodaft.Runtime, method: str) -> list[str]:
    """The lines of the tests' actors in which calls of a method are."""
    calls = [call for process in (await rt.stack()).processes for call in process.calls if call.method == method]
    return [frame.code for call in calls for frame in call.frames if frame.file.endswith("stepping.py")]


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def test_items_come_in_order_and_are_what_they_were_when_they_were_made(rt: aiodaft.Runtime) -> None:
    stepper = await rt.spawn(Stepper)
    assert [item async for item in stepper.count(1000)] == list(range(1000))
    assert [item async for item in stepper.count(0)] == []
    assert [len(item) async for item in stepper.same_list(40, "word")] == list(range(1, 41))
    assert [len(item) async for item in stepper.same_list(4, bytes(1 << 20))] == [1, 2, 3, 4]
    assert await items_of(stepper.lends()) == await stepper.takes_what_it_lends(stepper) == [[1, 2]]


async def test_each_step_runs_on_the_actors_thread_in_the_context_of_the_call(rt: aiodaft.Runtime) -> None:
    stepper = await rt.spawn(Stepper)
    thread = await stepper.thread()
    assert [item async for item in stepper.where(3)] == [(thread, -1, 1), (thread, 0, 1), (thread, 1, 1)]
    assert [item async for item in stepper.where(1)] == [(thread, -1, 1)]


async def test_it_begins_in_the_order_of_the_calls_and_others_run_between_its_items(rt: aiodaft.Runtime) -> None:
    stepper = await rt.spawn(Stepper)
    before, numbers, after = stepper.note("before"), stepper.count(10**9), stepper.note("after")
    await asyncio.gather(before, after)
    async for number in numbers:
        # Its consumer calls the same thread, and the generator has long filled the window.
        await stepper.note(str(number))
        if number == 40:
            break
    while "count ends" not in (noted := await stepper.noted()):
        pass
    assert noted == ["before", "count begins", "after", *map(str, range(41)), "count ends"]


async def test_who_leaves_in_a_step_goes_on_and_the_generator_ends_with_the_step(rt: aiodaft.Runtime) -> None:
    stepper = await rt.spawn(Stepper)
    async for _ in stepper.holds(1 << 20):
        while (await lines_of(rt, "Stepper.holds")) != ["self.go_on.wait()"]:
            pass
        break
    # The thread is held by the step, the loop is not.
    last = stepper.noted()
    await stepper.let_go_on()
    while "lets go" not in (noted := await last):
        last = stepper.noted()
    assert noted == ["holds", "lets go"]


async def test_a_left_generator_that_asks_other_actors_ends_and_may_ask_them_in_its_cleanup(
    rt: aiodaft.Runtime,
) -> None:
    stepper, other = await rt.spawn(Stepper), await rt.spawn(Stepper)
    async for _ in stepper.relays(other):
        break
    while "relays ends" not in await stepper.noted():
        pass
    assert await other.noted() == ["left"]
    async for _ in stepper.asks(other):
        while "Stepper.wait" not in (await rt.info(other)).running:
            pass
        break
    # The wait of the step is cancelled.
    while "asks ends" not in await stepper.noted():
        pass
    await other.let_go_on()


async def test_a_step_that_waits_for_its_own_actor_is_a_deadlock(rt: aiodaft.Runtime) -> None:
    itself, other, third = [await rt.spawn(Stepper) for _ in range(3)]
    in_a_circle = asyncio.gather(
        *map(items_of, (itself.asks(itself), other.asks(third, other))), return_exceptions=True
    )
    for error, behind in zip(await in_a_circle, ("wait", "count"), strict=True):
        assert isinstance(error, aiodaft.DeadlockDetected)
        asks = min(error.cycle, key=lambda one: one.method)
        assert (asks.method, "stepping.py" in asks.line) == ("Stepper.asks", True)
        assert f"Stepper.{behind} of " in str(error)
        assert "is queued behind Stepper.asks" in str(error)
    assert await other.takes(itself) == [0]


async def test_errors_come_after_the_items_before_them(rt: aiodaft.Runtime) -> None:
    stepper = await rt.spawn(Stepper)
    numbers: list[int] = []
    with pytest.raises(ValueError, match="it broke"):
        async for number in stepper.fails(20, ValueError("it broke")):
            numbers.append(number)  # noqa: PERF401 - the error comes afterwards
    assert numbers == list(range(20))
    with pytest.raises(RuntimeError, match="generator raised StopIteration"):
        [number async for number in stepper.fails(1, StopIteration(1))]
    with pytest.raises(TypeError, match=r"item of Stepper.odd|Stepper.odd"):
        [item async for item in stepper.odd()]
    assert [item async for item in stepper.count(2)] == [0, 1]


async def test_what_ends_a_program_ends_the_actor(rt: aiodaft.Runtime) -> None:
    stepper = await rt.spawn(Stepper)
    with pytest.raises(aiodaft.ActorDied, match="exit code 3"):
        [number async for number in stepper.exits(3)]


async def test_an_actor_that_is_stopped_closes_its_generators(tmp_path: Path) -> None:
    async with aiodaft.Runtime(preload=(), stop_grace=0) as rt, rt.spawn(Stepper) as stepper:
        numbers = stepper.until_closed(str(tmp_path / "closed"))
        assert await anext(numbers) == 0
    assert (tmp_path / "closed").exists()
    with pytest.raises(aiodaft.CallCancelled):
        [number async for number in numbers]


async def test_a_generator_of_an_actor_in_this_process_takes_its_steps_on_the_thread(
    daft: aiodaft.Runtime,
) -> None:
    stepper = await daft.spawn(Stepper)
    thread = await stepper.thread()
    assert [item[0] async for item in stepper.where(3)] == [thread] * 3
    async for _ in stepper.count(10**9):
        break
    while "count ends" not in await stepper.noted():
        pass
