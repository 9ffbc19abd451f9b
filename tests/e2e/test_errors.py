"""Errors travel the graph as their own type (row CR4; group A of the fault tests)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
import traceback
import weakref
from typing import Any

import pytest
from actors import Echo, Trainer
from failing import CustomError, Failing

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def error_of(ref: aiodaft.Ref[Any]) -> BaseException:
    await ref.ready()
    error = ref.exception()
    assert error is not None
    return error


async def test_an_error_that_is_awaited_keeps_nothing_of_its_caller(rt: aiodaft.Runtime) -> None:
    failing = await rt.spawn(Failing)
    kept: list[weakref.ref[Failing]] = []

    async def step() -> None:
        value = Failing()
        kept.append(weakref.ref(value))
        await failing.raise_value_error()

    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            await step()
        # Dropped refs are freed in the next turn.
        await asyncio.sleep(0)
        assert kept[0]() is None
    finally:
        gc.enable()


async def test_a_remote_exception_has_its_own_type_frames_and_a_note(rt: aiodaft.Runtime) -> None:
    failing = await rt.spawn(Failing)
    with pytest.raises(ValueError, match="bad value") as caught:
        await failing.raise_value_error()
    assert "raise ValueError(text)" in "".join(traceback.format_exception(caught.value))
    info = await rt.info(failing)
    assert caught.value.__notes__ == [
        f"raised by Failing.raise_value_error in {info.name} (pid {info.pid}, {info.node})"
    ]


async def test_a_def_method_raises_as_well(rt: aiodaft.Runtime) -> None:
    failing = await rt.spawn(Failing)
    with pytest.raises(KeyError, match="bad thread"):
        await failing.raise_on_thread()


async def test_the_cause_comes_along(rt: aiodaft.Runtime) -> None:
    failing = await rt.spawn(Failing)
    with pytest.raises(ValueError, match="the effect") as caught:
        await failing.raise_with_cause()
    assert isinstance(caught.value.__cause__, KeyError)


async def test_an_exception_with_keyword_only_arguments_survives(rt: aiodaft.Runtime) -> None:
    failing = await rt.spawn(Failing)
    with pytest.raises(CustomError, match="7: by keyword") as caught:
        await failing.raise_custom()
    assert (caught.value.code, caught.value.detail) == (7, "by keyword")


async def test_an_exception_that_cannot_be_rebuilt_comes_as_text(rt: aiodaft.Runtime) -> None:
    failing = await rt.spawn(Failing)
    with pytest.raises(aiodaft.RemoteError, match="HostileError") as caught:
        await failing.raise_hostile()
    assert caught.value.type_name == "failing.HostileError"
    assert caught.value.executed is True
    assert await failing.use("alive") == "alive"


async def test_a_class_that_cannot_be_imported_here_comes_as_text(rt: aiodaft.Runtime) -> None:
    failing = await rt.spawn(Failing)
    with pytest.raises(aiodaft.RemoteError, match="told all the same") as caught:
        await failing.raise_unknown()
    assert (caught.value.type_name, caught.value.executed) == ("known_here.LocalError", True)
    assert await failing.use("alive") == "alive"


async def test_a_huge_message_is_cut(rt: aiodaft.Runtime) -> None:
    failing = await rt.spawn(Failing)
    with pytest.raises(ValueError, match="xxx") as caught:
        await failing.raise_huge()
    assert len(str(caught.value)) < 30_000


async def test_a_cancellation_that_a_method_raises_fails_the_task_group(rt: aiodaft.Runtime) -> None:
    failing = await rt.spawn(Failing)
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            group.create_task(failing.raise_cancelled().value())
    assert isinstance(caught.value.exceptions[0], aiodaft.CallCancelled)


@pytest.mark.parametrize("method", ["raise_named", "raise_named_on_thread"])
async def test_generator_exit_is_an_error_like_any_other(rt: aiodaft.Runtime, method: str) -> None:
    failing = await rt.spawn(Failing)
    with pytest.raises(RuntimeError, match="raised GeneratorExit"):
        await getattr(failing, method)("GeneratorExit")
    assert await failing.use("alive") == "alive"


async def test_stop_iteration_does_not_end_the_callers_own_generators(rt: aiodaft.Runtime) -> None:
    failing = await rt.spawn(Failing)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await failing.raise_stop_iteration()


@pytest.mark.asyncio(loop_scope="function")
async def test_dependents_of_a_failed_call_do_not_run_and_name_the_path(own_rt: aiodaft.Runtime) -> None:
    a, b, c = await own_rt.spawn(Failing), await own_rt.spawn(Failing), await own_rt.spawn(Failing)
    last = c.use([b.use(a.raise_value_error("root"))])
    with pytest.raises(ValueError, match="root") as caught:
        await last
    raised, *path = caught.value.__notes__
    # The name of the actor, among others of its class.
    assert raised.startswith("raised by Failing.raise_value_error in Failing-1 (pid ")
    result = "which did not run: its argument is the result of"
    assert path == [
        f"needed by Failing.use of Failing-2, {result} Failing.raise_value_error of Failing-1",
        f"needed by Failing.use of Failing-3, {result} Failing.use of Failing-2",
    ]
    assert (await b.count(), await c.count()) == (0, 0)
    assert "raise ValueError(text)" in "".join(traceback.format_exception(caught.value))


@pytest.mark.asyncio(loop_scope="function")
async def test_an_argument_that_has_failed_already_fails_the_call_without_sending_it(own_rt: aiodaft.Runtime) -> None:
    a, b = await own_rt.spawn(Failing), await own_rt.spawn(Failing)
    bad = a.raise_value_error("early")
    await bad.ready()
    with pytest.raises(ValueError, match="early") as caught:
        await b.use(bad)
    path = (
        "needed by Failing.use of Failing-2, which did not run: its argument is the result of Failing.raise_value_error"
    )
    assert caught.value.__notes__[1:] == [f"{path} of Failing-1"]
    assert await b.count() == 0


@pytest.mark.asyncio(loop_scope="function")
async def test_each_call_that_needs_a_failed_result_gets_an_error_of_its_own(own_rt: aiodaft.Runtime) -> None:
    a, b = await own_rt.spawn(Failing), await own_rt.spawn(Failing)
    near = [await own_rt.on(with_=a).spawn(Failing) for _ in range(2)]
    bad = a.raise_later()
    consumers = [*near, b]
    under_way = [consumer.use(argument) for consumer in consumers for argument in (bad, [bad])]
    await a.raise_now()
    failed = [await error_of(ref) for ref in (bad, *under_way)]
    after = [await error_of(consumer.use(bad)) for consumer in consumers]
    raised = failed[0].__notes__
    assert len(raised) == 1
    result = "which did not run: its argument is the result of Failing.raise_later of Failing-1"
    for number, error in zip((3, 3, 4, 4, 2, 2, 3, 4, 2), (*failed[1:], *after), strict=True):
        assert error.__notes__ == [*raised, f"needed by Failing.use of Failing-{number}, {result}"]
    assert (await error_of(bad)).__notes__ == raised


async def test_each_call_in_one_process_that_needs_a_failed_result_gets_an_error_of_its_own(
    rt: aiodaft.Runtime,
) -> None:
    a = await rt.spawn(Failing)
    near = await rt.on(with_=a).spawn(Failing)
    assert await near.notes_of_consumers(a) == [1, 2, 2, 1]


async def test_actors_and_groups_go_on_after_an_error(rt: aiodaft.Runtime) -> None:
    group = await rt.group(3, Trainer, lr=1.0)
    with pytest.raises(ValueError, match="this member fails"):
        await group.each(Trainer.fail_if, [False, True, False])
    with pytest.raises(ExceptionGroup) as caught:
        await group.all(Trainer.fail_if, True)
    assert len(caught.value.exceptions) == 3
    assert await group.all(Trainer.step, [1]) == [1.0, 1.0, 1.0]


async def test_errors_of_siblings_arrive_as_a_group(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(Failing), await rt.spawn(Failing)
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            group.create_task(a.raise_value_error().value())
            group.create_task(b.raise_on_thread().value())
    assert caught.value.split((ValueError, KeyError))[1] is None


async def test_a_result_that_cannot_travel_fails_its_call_only(rt: aiodaft.Runtime) -> None:
    failing = await rt.spawn(Failing)
    with pytest.raises(
        aiodaft.exceptions.SerializationError, match=r"result of Failing.unencodable cannot travel"
    ) as caught:
        await failing.unencodable()
    assert caught.value.executed is True
    assert await failing.use(1) == 1


async def test_the_error_of_a_tell_is_logged_where_it_was_told(
    rt: aiodaft.Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    failing = await rt.spawn(Failing)
    with caplog.at_level(logging.ERROR, logger="aiodaft"):
        failing.raise_value_error.tell("told")
        assert await failing.count() == 1
    assert [record.message for record in caplog.records] == ["Failing.raise_value_error, called by tell(), failed"]


async def test_a_failed_argument_of_a_tell_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async with aiodaft.Runtime(preload=()) as rt:
        source, failing = await rt.spawn(Failing), await rt.spawn(Failing)
        failing.use.tell(source.raise_value_error())
        # By their answers, both errors have come.
        assert await failing.count() == 0
        assert await source.count() == 1
    assert [record.message for record in caplog.records] == ["Failing.use, called by tell(), failed"]


async def test_an_error_that_no_code_will_see_ends_a_scope_at_once(rt: aiodaft.Runtime) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with rt.scope() as scope:
            failing = await scope.spawn(Failing)
            failing.raise_value_error("no code looks")
            await asyncio.Event().wait()
    assert str(caught.value.exceptions[0]) == "no code looks"


async def test_the_error_of_a_held_ref_waits_to_be_looked_at(rt: aiodaft.Runtime) -> None:
    failing = await rt.spawn(Failing)
    ref = failing.raise_value_error()
    await ref.ready()
    assert await failing.use("block goes on") == "block goes on"
    assert isinstance(ref.exception(), ValueError)


async def test_the_error_of_a_held_ref_that_is_never_looked_at_is_raised_at_the_end() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with aiodaft.Runtime(preload=()) as rt:
            failing = await rt.spawn(Failing)
            ref = failing.raise_value_error("never looked at")
            await ref.ready()
    assert [str(error) for error in caught.value.exceptions] == ["never looked at"]


async def test_dropping_a_ref_with_an_unseen_error_ends_a_scope(rt: aiodaft.Runtime) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with rt.scope() as scope:
            failing = await scope.spawn(Failing)
            ref = failing.raise_value_error("dropped")
            await ref.ready()
            del ref
            await asyncio.Event().wait()
    assert [str(error) for error in caught.value.exceptions] == ["dropped"]


async def test_the_bodys_own_error_is_raised_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        async with aiodaft.Runtime(preload=()) as rt:
            await rt.spawn(Failing)
            raise ZeroDivisionError


async def test_the_same_error_awaited_twice_does_not_grow(rt: aiodaft.Runtime) -> None:
    failing = await rt.spawn(Failing)
    ref: Any = failing.raise_value_error()
    lengths = []
    for _ in range(3):
        with pytest.raises(ValueError, match="bad value") as caught:
            await ref
        lengths.append(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(set(lengths)) == 1


async def test_a_failed_spawn_argument_fails_the_spawn(rt: aiodaft.Runtime) -> None:
    failing = await rt.spawn(Failing)
    with pytest.raises(ValueError, match="bad value"):
        await rt.spawn(Trainer, aiodaft.typing.lazy(failing.raise_value_error()))
    good = await rt.spawn(Trainer, aiodaft.typing.lazy((await rt.spawn(Echo)).echo(2.0)))
    assert await good.step([1]) == 2.0


class Picky(aiodaft.Actor):
    def __init__(self, value: Any) -> None:
        raise LookupError("a bad argument")


async def test_an_error_of_a_spawn_has_the_lines_of_the_program_alone(rt: aiodaft.Runtime) -> None:
    for spawned, lines in (
        (rt.spawn(Picky, 1), ['raise LookupError("a bad argument")']),
        (rt.spawn(Picky, threading.Lock()), []),
        (rt.on(cpus=10_000).group(2, Echo), []),
    ):
        with pytest.raises((LookupError, aiodaft.DaftError)) as caught:
            await spawned
        first, *shown = [frame.line for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert first == "await spawned"
        # One line of aiodaft's own, which notebooks hide.
        assert [line for line in shown if line not in {"return await starting", "raise"}] == lines
        assert len(shown) <= len(lines) + 1
