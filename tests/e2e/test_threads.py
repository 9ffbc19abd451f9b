"""Refs in the threads of a process: of the controller, and of an actor's `def` methods."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
from actors import Echo, Log
from blocking import Blocking, Inheriting, Locking, in_thread
from failing import Failing

import aiodaft
from aiodaft.ref import Refs

pytestmark = pytest.mark.asyncio(loop_scope="module")

T = TypeVar("T")


def be_strict() -> None:
    """Have the loop refuse calls that are not safe in other threads."""
    asyncio.get_running_loop().set_debug(True)


async def test_a_call_that_a_thread_made_and_cancelled_says_whether_it_ran(module_rt: aiodaft.Runtime) -> None:
    log = await module_rt.spawn(Log)
    be_strict()

    def make_and_cancel() -> aiodaft.Ref[None]:
        ref = log.note_async("from a thread")
        assert ref.cancel()
        return ref

    ref = in_thread(make_and_cancel)
    await ref.ready()
    error = ref.exception()
    seen = await log.all()
    assert (isinstance(error, aiodaft.DaftError) and error.executed is False) == (seen == [])


async def test_a_call_that_was_cancelled_before_its_thread_had_handed_it_over_is_not_made(
    module_rt: aiodaft.Runtime,
) -> None:
    log = await module_rt.spawn(Log)
    ref = in_thread(lambda: log.note_async("from a thread"))
    assert ref.cancel()
    with pytest.raises(aiodaft.CallCancelled, match="before it was sent") as caught:
        await ref
    assert caught.value.executed is False
    assert await log.all() == []


async def test_so_is_a_call_of_an_actor_of_the_same_process_not(module_rt: aiodaft.Runtime) -> None:
    log = await module_rt.spawn(Log)
    blocking = await module_rt.on(with_=log).spawn(Blocking)
    assert await blocking.cancel_before_it_is_handed_over(log) is False
    assert await log.all() == []


async def test_what_a_thread_asks_of_a_ref_is_done_by_the_loop(module_rt: aiodaft.Runtime) -> None:
    log, echo = await module_rt.spawn(Log), await module_rt.spawn(Echo)
    be_strict()
    waiting, done = log.after_gate("never"), echo.echo("done")
    await done.ready()
    told: asyncio.Queue[Any] = asyncio.Queue()

    def ask() -> aiodaft.Ref[Any]:
        assert not waiting.done()
        assert done.exception() is None
        waiting.add_done_callback(told.put_nowait)
        with pytest.raises(RuntimeError, match="in the thread of its event loop only"):
            waiting.remove_done_callback(told.put_nowait)
        both = Refs([done, echo.echo("new")]).gather()
        assert waiting.cancel()
        done.free()
        return both

    both = in_thread(ask)
    assert await told.get() is waiting
    assert waiting.cancelled()
    with pytest.raises(ReferenceError, match="was freed"):
        await both


@pytest.mark.parametrize("what", ["value", "ready", "released", "into", "completed"])
async def test_a_ref_is_awaited_on_the_loop_of_its_runtime_only(module_rt: aiodaft.Runtime, what: str) -> None:
    log = await module_rt.spawn(Log)
    ref: aiodaft.Ref[Any] = log.after_gate("value")

    async def completed() -> None:
        async for _ in Refs([ref]):
            pass

    routes: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "value": ref.value, "ready": ref.ready, "released": ref.released, "into": lambda: ref.into(None),
        "completed": completed,
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="awaited on another event loop"):
        in_thread(lambda: asyncio.run(routes[what]()))
    await log.open_gate()
    assert await ref == "value"


async def test_a_thread_is_told_how_to_put_a_value(module_rt: aiodaft.Runtime) -> None:
    with pytest.raises(
        RuntimeError, match="a value cannot be put where no event loop runs: have .*call_soon_threadsafe"
    ):
        in_thread(lambda: module_rt.put(1))


# Waiting in a thread.


async def test_a_def_method_waits_for_refs_of_other_actors(module_rt: aiodaft.Runtime) -> None:
    blocking, echo = await module_rt.spawn(Blocking), await module_rt.spawn(Echo)
    failing = await module_rt.spawn(Failing)
    large = bytes(3_000_000)
    assert await blocking.ask(echo, "echo", "value") == "value"
    assert await blocking.ask(echo, "echo_on_thread", large) == large
    with pytest.raises(ValueError, match="bad value"):
        await blocking.ask(failing, "raise_value_error")
    with pytest.raises(RuntimeError, match=r"result\(\) would block the event loop of this thread: use `await`"):
        await blocking.ask_on_the_loop(echo, "value")
    assert await blocking.ask_in_another_thread(echo, "value") == "value"


async def test_a_thread_of_the_controller_waits_for_a_ref(module_rt: aiodaft.Runtime) -> None:
    echo = await module_rt.spawn(Echo)
    assert await asyncio.to_thread(lambda: echo.echo("value").result()) == "value"
    ref = echo.echo("value")
    with pytest.raises(RuntimeError, match=r"result\(\) would block the event loop"):
        ref.result()
    assert await ref == "value"


async def test_a_cancelled_def_method_stops_waiting_and_cancels_what_it_waits_for(module_rt: aiodaft.Runtime) -> None:
    blocking, log = await module_rt.spawn(Blocking), await module_rt.spawn(Log)
    task = asyncio.get_running_loop().create_task(blocking.ask(log, "after_gate", "never").value())
    while not (await module_rt.info(log)).running:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    # The thread is free again, and the call that it waited for has ended.
    assert await blocking.ask(log, "all") == []
    assert await blocking.history() == ["asked", "CancelledError", "asked"]
    assert not (await module_rt.info(log)).running


async def test_an_actor_that_is_stopped_stops_waiting() -> None:
    async with aiodaft.Runtime(stop_grace=0.1) as rt, rt.spawn(Log) as log:
        blocking = await rt.spawn(Blocking)
        ref = blocking.ask(log, "after_gate", "never")
        while not (await rt.info(log)).running:
            await asyncio.sleep(0)
        await rt.stop(blocking)
        with pytest.raises((aiodaft.ActorDied, aiodaft.CallCancelled)):
            await ref
        while (await rt.info(log)).running:
            await asyncio.sleep(0)


async def test_a_deadline_ends_the_wait_of_a_def_method(module_rt: aiodaft.Runtime) -> None:
    blocking, log = await module_rt.spawn(Blocking), await module_rt.spawn(Log)
    with pytest.raises(aiodaft.DeadlineExceeded):
        async with aiodaft.deadline(0.2):
            await blocking.ask(log, "after_gate", "never")
    assert await blocking.ask(log, "all") == []


@pytest.mark.parametrize("seconds", [0, 0.01])
async def test_a_wait_with_a_timeout_leaves_the_call_as_it_is(module_rt: aiodaft.Runtime, seconds: float) -> None:
    log = await module_rt.spawn(Log)
    ref = log.after_gate("value")
    with pytest.raises(TimeoutError, match=rf"of Log.after_gate of Log-\d+: .* within {seconds:g} s; the call goes on"):
        await asyncio.to_thread(ref.result, seconds)
    await log.open_gate()
    await ref.ready()
    assert await asyncio.to_thread(ref.result, seconds) == "value"
    assert await log.all() == ["value"]


@pytest.mark.parametrize("seconds", [0, 0.01])
async def test_the_error_of_a_call_that_no_thread_waits_for_any_longer_is_unseen(seconds: float) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with aiodaft.Runtime() as rt, rt.spawn(Failing) as failing:
            ref: aiodaft.Ref[int] | None = failing.raise_later()
            assert ref is not None
            with pytest.raises(TimeoutError):
                await asyncio.to_thread(ref.result, seconds)
            await failing.raise_now()
            await ref.ready()
            ref = None
    assert [type(error) for error in caught.value.exceptions] == [ValueError]


async def test_a_thread_that_waits_with_a_timeout_gets_the_timeout_of_the_call(module_rt: aiodaft.Runtime) -> None:
    failing = await module_rt.spawn(Failing)
    with pytest.raises(TimeoutError, match="^$"):
        await asyncio.to_thread(lambda: failing.raise_named("TimeoutError").result(60))
    with pytest.raises(ValueError, match="a timeout is None or a number of seconds that is not negative, not -1"):
        failing.count().result(-1)


async def test_a_def_method_waits_for_a_while_or_by_a_deadline(module_rt: aiodaft.Runtime) -> None:
    blocking, log = await module_rt.spawn(Blocking), await module_rt.spawn(Log)
    with pytest.raises(TimeoutError, match="Log.after_gate of .*the call goes on"):
        await blocking.ask_within(0.01, log, "after_gate", "waited for a while")
    with pytest.raises(aiodaft.DeadlineExceeded, match="Log.after_gate of Log"):
        await blocking.ask_by(0.01, log, "after_gate", "waited by a deadline")
    await log.open_gate()
    assert await blocking.ask_within(60, log, "all") == ["waited for a while"]
    assert await blocking.ask_by(60, log, "after_gate", "last") == "last"


async def test_a_thread_of_the_controller_has_deadlines_of_its_own(module_rt: aiodaft.Runtime) -> None:
    log = await module_rt.spawn(Log)
    early = log.after_gate("early")

    def wait(ref: aiodaft.Ref[Any] | None, *seconds: float) -> Any:
        if seconds:
            with aiodaft.deadline(seconds[0]):
                return wait(ref, *seconds[1:])
        return (log.after_gate("late") if ref is None else ref).result()

    for ref, seconds in ((None, (0.01,)), (None, (60, 0.01, 60)), (early, (0.01,))):
        with pytest.raises(aiodaft.DeadlineExceeded, match="Log.after_gate"):
            await asyncio.to_thread(wait, ref, *seconds)
    assert early.cancelled()
    await log.open_gate()
    assert await asyncio.to_thread(wait, None, 60) == "late"
    with pytest.raises(RuntimeError, match="runs an event loop: use `async with aiodaft.deadline\\(1\\)`"):
        wait(None, 1)


async def test_def_methods_that_wait_for_each_other_are_a_deadlock(module_rt: aiodaft.Runtime) -> None:
    a, b = await module_rt.spawn(Blocking), await module_rt.spawn(Blocking)
    with pytest.raises(aiodaft.DeadlockDetected) as caught:
        await a.around([b, a])
    assert sorted(call.method for call in caught.value.cycle) == ["Blocking.around"] * 3
    assert any("blocking.py" in call.line and call.line.endswith("in around") for call in caught.value.cycle)
    with pytest.raises(aiodaft.DeadlockDetected):
        await a.around([a])
    assert (await a.around([b])).startswith("Blocking-")


async def test_a_stack_shows_where_a_thread_waits_and_for_what(module_rt: aiodaft.Runtime) -> None:
    blocking, log = await module_rt.spawn(Blocking), await module_rt.spawn(Log)
    ref = blocking.ask(log, "after_gate", "value")
    while not (await module_rt.info(log)).running:
        await asyncio.sleep(0)
    shown = str(await module_rt.stack())
    assert "blocking.py" in shown
    assert "waits for Log.after_gate" in shown
    await log.open_gate()
    assert await ref == "value"


# Calls on `self`.


async def test_a_method_that_is_called_on_self_runs_in_place(module_rt: aiodaft.Runtime) -> None:
    blocking, inheriting = await module_rt.spawn(Blocking), await module_rt.spawn(Inheriting)
    assert await blocking.two() == 2
    assert await inheriting.two() == 22
    with pytest.raises(TypeError) as caught:
        await blocking.awaits_one()
    assert any("gives its result, not a ref: do not await it" in note for note in caught.value.__notes__)
    with pytest.raises(TypeError, match="^Blocking.one runs in another process"):
        aiodaft.typing.local(blocking.one)


async def test_a_call_of_a_thread_has_its_small_arguments_as_they_were(module_rt: aiodaft.Runtime) -> None:
    echo = await module_rt.spawn(Echo)
    value = [1]

    def call() -> list[aiodaft.Ref[Any]]:
        return [echo.echo(value), echo.echo(value=value), echo.echo(5)]

    refs = in_thread(call)
    value.append(2)
    assert [await ref for ref in refs] == [[1], [1], 5]


async def test_a_def_method_that_holds_a_lock_calls_while_the_loop_waits_for_it(module_rt: aiodaft.Runtime) -> None:
    echo, locking, value = await module_rt.spawn(Echo), await module_rt.spawn(Locking), list(range(1000))
    asked, waited = locking.ask(echo, value), locking.wait_for_lock()
    assert await asked == value
    await waited
