"""Calls: an actor is an asyncio service (row CR1)."""

from __future__ import annotations

import asyncio
import inspect
import pydoc
import tracemalloc
from pathlib import Path

import pytest
from actors import Echo, Entered, Log, Plain, Relay, Sleeper, Writer
from leaks import resident

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def test_a_call_gives_a_ref_at_once_and_the_value_when_awaited(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    ref = echo.echo(41)
    assert isinstance(ref, aiodaft.Ref)
    assert await ref == 41
    assert await ref == 41


async def test_ten_thousand_calls_of_one_caller_run_in_order_on_the_thread(rt: aiodaft.Runtime) -> None:
    log = await rt.spawn(Log)
    for index in range(10_000):
        ref = log.note(index)
    await ref
    assert await log.all() == list(range(10_000))


async def test_ten_thousand_calls_of_one_caller_start_in_order_on_the_loop(rt: aiodaft.Runtime) -> None:
    log = await rt.spawn(Log)
    refs = [log.note_async(index) for index in range(10_000)]
    await asyncio.gather(*refs)
    assert await log.all() == list(range(10_000))


async def test_def_and_async_def_calls_of_one_caller_keep_their_order(rt: aiodaft.Runtime) -> None:
    log = await rt.spawn(Log)
    refs = [(log.note if index % 3 else log.note_async)(index) for index in range(300)]
    await asyncio.gather(*refs)
    assert await log.all() == list(range(300))


async def test_a_call_that_waits_for_its_argument_holds_back_later_ones_unless_unordered(rt: aiodaft.Runtime) -> None:
    log, slow = await rt.spawn(Log), await rt.spawn(Log)
    argument = slow.after_gate("first")
    first = log.note_async(argument)
    unordered = log.note_unordered("unordered")
    second = log.note_async("second")
    await unordered
    assert not second.done()
    await slow.open_gate()
    await asyncio.gather(first, second)
    assert await log.all() == ["unordered", "first", "second"]


async def test_eight_callers_keep_their_own_orders(rt: aiodaft.Runtime) -> None:
    log = await rt.spawn(Log)
    # From this process, from the actor's own, and from six others.
    relays = [await rt.on(with_=log).spawn(Relay), *(await rt.group(6, Relay))]
    noted = [relay.note_all(log, caller, 1000) for caller, relay in enumerate(relays)]
    await asyncio.gather(*noted, *(log.note((7, index)) for index in range(1000)))
    seen = await log.all()
    assert len(seen) == 8000
    for caller in range(8):
        assert [index for who, index in seen if who == caller] == list(range(1000))


async def test_async_calls_run_side_by_side(rt: aiodaft.Runtime) -> None:
    log = await rt.spawn(Log)
    refs = [log.after_gate(index) for index in range(50)]
    # One after the other, the first would wait for ever for the last one.
    await log.open_gate()
    assert await asyncio.gather(*refs) == list(range(50))


async def test_concurrency_bounds_a_method(rt: aiodaft.Runtime) -> None:
    log = await rt.spawn(Log)
    running = await asyncio.gather(*(log.note_two_at_a_time(index) for index in range(40)))
    assert max(running) == 2
    assert await log.all() == list(range(40))


async def test_a_def_method_does_not_hold_up_the_loop(rt: aiodaft.Runtime) -> None:
    sleeper = await rt.spawn(Sleeper)
    blocked = sleeper.block(20)
    while "block began" not in await sleeper.history():
        await asyncio.sleep(0)
    await sleeper.unblock()
    assert await blocked == "unblocked"


async def test_arguments_by_position_and_keyword(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    assert await echo.kwargs(1, "two", three=3, four=[4]) == ((1, "two"), {"three": 3, "four": [4]})
    with pytest.raises(TypeError, match=r"^Echo.kwargs\(self, .*multiple values for argument 'self'"):
        echo.kwargs(self=3)


async def test_tell_runs_in_order_and_gives_nothing(rt: aiodaft.Runtime) -> None:
    log = await rt.spawn(Log)
    for index in range(100):
        assert log.note.tell(index) is None
    assert await log.all() == list(range(100))


async def test_an_actor_calls_another_through_its_handle(rt: aiodaft.Runtime) -> None:
    echo, relay = await rt.spawn(Echo), await rt.spawn(Relay)
    assert await relay.call_other(echo, "through") == "through"


async def test_a_def_method_may_call_other_actors(rt: aiodaft.Runtime) -> None:
    echo, relay = await rt.spawn(Echo), await rt.spawn(Relay)
    box = await relay.call_from_thread(echo, "from a thread")
    assert await box.ref == "from a thread"


async def test_many_more_calls_than_the_window_are_all_answered(rt: aiodaft.Runtime) -> None:
    echo = await rt.spawn(Echo)
    values = await asyncio.gather(*(echo.echo(index) for index in range(20_000)))
    assert values == list(range(20_000))


@pytest.mark.asyncio(loop_scope="module", loop_factories=["uvloop"])
@pytest.mark.timeout(120)
@pytest.mark.parametrize("count", [20_000, pytest.param(100_000, marks=pytest.mark.soak)])
async def test_very_many_calls_to_a_slow_actor_stay_small_on_both_sides(rt: aiodaft.Runtime, count: int) -> None:
    log = await rt.spawn(Log)
    await log.all()
    pid = (await rt.info(log)).pid
    before = resident(pid)
    tracemalloc.start()
    try:
        refs = [log.note_slowly(index) for index in range(count)]
        here, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The attributes that states have had in this process so far make each new one up to 240 bytes larger.
    assert here < 840 * count
    await refs[5_000]
    assert resident(pid) - before < 64 << 20
    await refs[-1]
    assert await log.all() == list(range(count))


async def test_a_call_behind_a_full_window_of_waiting_ones_gets_through(rt: aiodaft.Runtime) -> None:
    log = await rt.spawn(Log)
    refs = [log.after_gate(index) for index in range(4500)]
    opened = log.open_gate()
    await opened
    assert await asyncio.gather(*refs) == list(range(4500))


async def test_calls_beyond_the_limit_are_refused_at_once_and_nothing_is_lost() -> None:
    async with aiodaft.Runtime(preload=(), max_pending=100) as rt:
        log = await rt.spawn(Log)
        refs = [log.after_gate(index) for index in range(100)]
        for value in ("one too many", bytes(1 << 20)):
            with pytest.raises(
                aiodaft.Overloaded, match=r"Log.after_gate of Log-1 is refused: 100 calls to "
            ) as caught:
                log.after_gate(value)
            assert caught.value.executed is False
        # The runtime's own calls get through.
        assert (await rt.info(log)).running_besides == 0
        assert "Log.after_gate" in str(await rt.stack())
        # A call that is cancelled makes room for the one that frees the others.
        given_up = refs.pop()
        given_up.cancel()
        with pytest.raises(aiodaft.CallCancelled):
            await given_up
        release = log.open_gate()
        await asyncio.gather(*refs, release)
        assert await log.all() == list(range(99))


@pytest.mark.asyncio(loop_scope="function")
async def test_calls_behind_a_full_window_do_not_hold_up_the_runtimes_own(hasty_rt: aiodaft.Runtime) -> None:
    log = await hasty_rt.spawn(Log)
    refs = [log.after_gate(index) for index in range(5000)]
    assert (await hasty_rt.info(log)).alive
    await hasty_rt.stop(log)
    endings = await asyncio.gather(*refs, return_exceptions=True)
    assert {type(ending) for ending in endings} == {aiodaft.ActorDied, aiodaft.CallCancelled}


async def test_what_an_actor_is_told_before_it_is_stopped_arrives(rt: aiodaft.Runtime, tmp_path: Path) -> None:
    written = tmp_path / "written"
    async with rt.spawn(Writer) as writer:
        # Copied by a helper thread: it is not sent yet when the block ends.
        writer.write.tell(str(written), bytes(8 << 20))
    assert written.stat().st_size == 8 << 20


async def test_a_handle_shows_its_methods_as_notebooks_and_help_ask_for_them(rt: aiodaft.Runtime) -> None:
    sleeper = await rt.spawn(Sleeper)
    assert dir(sleeper) == sorted(dir(sleeper))
    assert {"sleep", "history", "time_left"} <= set(dir(sleeper))
    assert "events" not in dir(sleeper)
    assert str(inspect.signature(sleeper.sleep)) == "(seconds: 'float', name: 'str' = 'sleep') -> 'str'"
    assert inspect.getdoc(sleeper.stubborn) == "Does not let itself be cancelled."
    assert sleeper.sleep.__name__ == "sleep"
    assert inspect.getdoc(sleeper.sleep) is None
    assert inspect.getsource(sleeper.stubborn).strip() == inspect.getsource(Sleeper.stubborn).strip()
    # Of the class that is named in calls of groups, with self.
    assert str(inspect.signature(Sleeper.sleep)).startswith("(self, seconds: 'float', ")
    assert inspect.getsource(Sleeper.sleep).strip().startswith("@method")
    about = pydoc.plaintext.document(sleeper, "sleeper")
    assert (inspect.getdoc(Sleeper) or "") in about
    assert "sleep(seconds: 'float', name: 'str' = 'sleep') -> 'str'" in about
    about = pydoc.plaintext.document(sleeper.stubborn, "stubborn")
    assert "<remote method Sleeper.stubborn(" in about
    assert "Does not let itself be cancelled." in about


async def test_an_unmodified_class_is_hosted(rt: aiodaft.Runtime) -> None:
    service = await rt.spawn(Plain, 10)
    assert await service.call(Plain.add, 5) == 15
    assert await service.call(Plain.add, 5, times=3) == 25
    assert await service.call(Plain.add_later, service.call(Plain.add, 1)) == 21
    with pytest.raises(TypeError, match="not a method of Plain"):
        service.call(Echo.echo, 1)  # type: ignore[call-overload]  # the mistake under test
    with pytest.raises(AttributeError, match="no public method"):
        service.call(Plain._private)


async def test_an_actor_that_is_a_context_manager_is_entered_and_left(tmp_path: object) -> None:
    path = f"{tmp_path}/left"
    async with aiodaft.Runtime(preload=()) as rt:
        actor = await rt.spawn(Entered, path)
        assert await actor.is_entered()
    with open(path, encoding="utf-8") as file:
        assert file.read() == "left\n"


async def test_co_located_actors_share_a_process_and_pass_objects(rt: aiodaft.Runtime) -> None:
    first = await rt.spawn(Echo)
    second = await rt.on(with_=first).spawn(Relay)
    info_first, info_second = await rt.info(first), await rt.info(second)
    assert info_first.pid == info_second.pid
    assert await second.call_other(first, {"a": 1}) == {"a": 1}
    await rt.stop(second)
    assert await first.echo("still here") == "still here"


async def test_what_went_to_actors_can_be_asked_when_the_runtime_is_closed() -> None:
    async with aiodaft.Runtime() as rt:
        echo = await rt.spawn(Echo)
        assert await echo.echo(bytes(1 << 20)) == bytes(1 << 20)
        before = rt.traffic()
    assert rt.traffic().payload == before.payload == 2 << 20
