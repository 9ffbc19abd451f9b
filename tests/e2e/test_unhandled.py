"""Errors that no code sees: a runtime's treatment of them, and a scope's."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import traceback
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from actors import Echo, Relay
from failing import Failing
from forgetful import Gated, Responder
from inside import errors_kept_by
from log_ear import Ear, listening

import aiodaft

# Tests that need no runtime of their own share one.
shared_loop = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def ear() -> Iterator[Ear]:
    with listening() as hearing:
        yield hearing


def texts(group: BaseExceptionGroup[Any]) -> list[str]:
    return [str(error) for error in group.exceptions]


# A runtime.


async def test_an_error_no_code_sees_is_logged_at_once_and_raised_when_the_block_ends(ear: Ear) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with aiodaft.Runtime(preload=()) as rt:
            failing = await rt.spawn(Failing)
            failing.raise_value_error("no code sees this")
            logged = await ear.hears("Failing.raise_value_error failed, and its ref was dropped")
            assert await failing.use("the block goes on") == "the block goes on"
    assert "raise ValueError(text)" in logged
    assert "raised by Failing.raise_value_error in Failing-1" in logged
    assert texts(caught.value) == ["no code sees this"]
    assert "raise ValueError(text)" in "".join(traceback.format_exception(caught.value))


async def test_an_idle_actor_that_dies_does_not_end_the_others(ear: Ear) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with aiodaft.Runtime(preload=()) as rt:
            idle, other = await rt.spawn(Echo), await rt.spawn(Echo)
            os.kill((await rt.info(idle)).pid, signal.SIGKILL)
            assert "Echo-1" in await ear.hears("an actor died while no call was under way")
            assert await other.echo("alive") == "alive"
    (error,) = caught.value.exceptions
    assert isinstance(error, aiodaft.ActorDied)
    assert error.signal == "SIGKILL"


async def test_an_error_no_code_in_a_worker_sees_names_the_worker_and_is_logged_once(ear: Ear) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with aiodaft.Runtime(preload=()) as rt:
            failing, relay = await rt.spawn(Failing), await rt.spawn(Relay)
            await relay.tell_and_fail(failing)
            assert "(in Relay-1" in await ear.hears("Failing.raise_value_error failed")
    assert texts(caught.value) == ["no code sees this"]
    assert len(ear.lines) == 1


async def test_a_runtime_that_only_logs_raises_nothing_and_keeps_nothing(ear: Ear) -> None:
    async with aiodaft.Runtime(preload=(), unhandled="log") as rt:
        failing = await rt.spawn(Failing)
        failing.raise_value_error("dropped")
        await ear.hears("ValueError: dropped")
        held = failing.raise_value_error("held to the end")
        await held.ready()
        assert len(errors_kept_by(rt)) == 0
    assert "and no code saw the error" in await ear.hears("ValueError: held to the end")
    assert len(ear.lines) == 2
    assert isinstance(held.exception(), ValueError)


async def test_an_unknown_way_to_handle_errors_is_refused() -> None:
    with pytest.raises(ValueError, match="unhandled='ignore' is neither"):
        aiodaft.Runtime(unhandled="ignore")  # type: ignore[arg-type]


async def test_the_error_of_the_body_comes_together_with_unhandled_ones(ear: Ear) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with aiodaft.Runtime(preload=()) as rt:
            (await rt.spawn(Failing)).raise_value_error("unhandled")
            await ear.hears("ValueError: unhandled")
            raise KeyError("of the body")
    assert texts(caught.value) == ["'of the body'", "unhandled"]


@pytest.mark.parametrize("ending", [asyncio.CancelledError, SystemExit, KeyboardInterrupt])
async def test_a_block_that_is_to_end_the_program_raises_just_that(ear: Ear, ending: type[BaseException]) -> None:
    rt = aiodaft.Runtime(preload=())
    await rt.__aenter__()
    failing = await rt.spawn(Failing)
    failing.raise_value_error("dropped")
    await ear.hears("ValueError: dropped")
    held = failing.raise_value_error("held")
    await held.ready()
    # None: the error of the block goes on.
    assert await rt.__aexit__(ending, ending(), None) is None
    await ear.hears("ValueError: held")


async def test_a_restart_limit_is_logged_and_raised_at_the_end(ear: Ear) -> None:
    policy = aiodaft.Restart(intensity=0)
    with pytest.raises(ExceptionGroup) as caught:
        async with aiodaft.Runtime(preload=()) as rt:
            supervised, other = await rt.on(restart=policy).spawn(Failing), await rt.spawn(Echo)
            with pytest.raises(aiodaft.ActorDied):
                await supervised.kill_itself()
            await ear.hears("Failing-1 died more often than its restart policy allows")
            assert await other.echo("alive") == "alive"
    assert [type(error) for error in caught.value.exceptions] == [aiodaft.exceptions.RestartLimitReached]


async def test_errors_that_are_kept_hold_no_variables(ear: Ear, monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest itself keeps log records.
    monkeypatch.setattr(logging.getLogger("aiodaft"), "propagate", False)

    class Large:
        """Stands for a tensor."""

    async def work(failing: Failing) -> weakref.ref[Large]:
        large = Large()
        bad = failing.raise_value_error("raised where something large is known")
        with suppress(ValueError):
            await bad
        # Fails with the same exception, which now knows these frames.
        failing.use(bad)
        return weakref.ref(large)

    with pytest.raises(ExceptionGroup) as caught:
        async with aiodaft.Runtime(preload=()) as rt:
            large = await work(await rt.spawn(Failing))
            await ear.hears("Failing.use failed")
            gc.collect()
            assert len(errors_kept_by(rt)) == 1
            assert large() is None
    assert len(caught.value.exceptions) == 1


# A scope.


@shared_loop
async def test_a_scope_is_cancelled_by_what_a_runtime_only_logs(module_rt: aiodaft.Runtime) -> None:
    for death in (False, True):
        with pytest.raises(ExceptionGroup) as caught:
            async with module_rt.scope() as scope:
                failing = await scope.spawn(Failing)
                if death:
                    os.kill((await scope.info(failing)).pid, signal.SIGKILL)
                else:
                    failing.raise_value_error()
                await asyncio.Event().wait()
        assert isinstance(caught.value.exceptions[0], aiodaft.ActorDied if death else ValueError)
    assert await (await module_rt.spawn(Echo)).echo("the runtime goes on") == "the runtime goes on"


# Siblings: the await of one fails, and the others are not awaited.

SEEN = "failed as well; its ref was dropped after the await of another call of the same task had failed"


async def one_after_the_other(x: Failing, y: Failing) -> None:
    a, b = x.raise_value_error("a"), y.raise_value_error("b")
    await a
    await b


async def the_later_one_first(x: Failing, y: Failing) -> None:
    b, a = y.raise_value_error("b"), x.raise_value_error("a")
    await a
    await b


async def in_a_loop(x: Failing, y: Failing) -> None:
    for ref in [x.raise_value_error("a"), y.raise_value_error("b")]:
        await ref


async def gathered_before(x: Failing, y: Failing) -> None:
    a, b = x.raise_value_error("a"), y.raise_value_error("b")
    await asyncio.gather(a)
    await b


async def of_a_group_of_refs(x: Failing, y: Failing) -> None:
    refs = aiodaft.Refs([x.raise_value_error("a"), y.raise_value_error("b")])
    await refs[0]
    await refs[1]


async def as_an_argument(x: Failing, y: Failing) -> None:
    a, b = x.use(x.raise_value_error("a")), y.raise_value_error("b")
    await a
    await b


WAYS = [one_after_the_other, the_later_one_first, in_a_loop, gathered_before, of_a_group_of_refs, as_an_argument]


@shared_loop
@pytest.mark.parametrize("route", WAYS)
async def test_a_sibling_that_is_not_awaited_any_more_counts_as_seen(
    log_only: aiodaft.Runtime, ear: Ear, route: Any
) -> None:
    x, y = await log_only.spawn(Failing), await log_only.spawn(Failing)
    with suppress(ValueError):
        await route(x, y)
    # Its answer came before this one; its ref may be part of a circle.
    await y.count()
    gc.collect()
    await ear.hears(SEEN)
    assert len(ear.lines) == 1


@shared_loop
async def test_a_sibling_of_an_await_that_timed_out_counts_as_seen(log_only: aiodaft.Runtime, ear: Ear) -> None:
    gated, slow = await log_only.spawn(Gated), await log_only.spawn(Failing)

    async def work() -> None:
        a, b = slow.wait(), gated.fail_later("not awaited")
        await a
        await b

    with suppress(TimeoutError):
        # The time is over when both calls are made.
        async with asyncio.timeout(0):
            await work()
    gc.collect()
    await gated.open_gate()
    await ear.hears(SEEN)
    assert len(ear.lines) == 1


async def test_a_sibling_that_is_still_held_at_the_end_is_raised() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with aiodaft.Runtime(preload=()) as rt:
            failing = await rt.spawn(Failing)
            a, b = failing.raise_value_error("a"), failing.raise_value_error("b")
            with suppress(ValueError):
                await a
            await b.ready()
    assert texts(caught.value) == ["b"]


async def test_a_sibling_in_a_circle_that_was_not_collected_yet_is_not_raised_at_the_end() -> None:
    async with aiodaft.Runtime(preload=()) as rt:
        x, y = await rt.spawn(Failing), await rt.spawn(Failing)
        gc.disable()
        try:
            with suppress(ValueError):
                await one_after_the_other(x, y)
            await y.count()
        finally:
            gc.enable()


@shared_loop
async def test_a_ref_that_was_never_held_is_reported_also_if_a_sibling_fails(
    log_only: aiodaft.Runtime, ear: Ear
) -> None:
    failing = await log_only.spawn(Failing)

    async def work() -> None:
        failing.raise_value_error("forgotten")
        await failing.raise_value_error("awaited")

    with suppress(ValueError):
        await work()
    assert "forgotten" in await ear.hears("its ref was dropped before any code saw the error")


@shared_loop
async def test_the_error_of_another_task_excuses_nothing(log_only: aiodaft.Runtime, ear: Ear) -> None:
    x, y = await log_only.spawn(Failing), await log_only.spawn(Failing)
    made, raised = asyncio.Event(), asyncio.Event()

    async def forgets() -> None:
        forgotten = y.raise_value_error("forgotten")
        made.set()
        await raised.wait()
        del forgotten

    async def fails() -> None:
        await made.wait()
        with suppress(ValueError):
            await x.raise_value_error("of the other task")
        raised.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(forgets())
        tasks.create_task(fails())
    assert "forgotten" in await ear.hears("its ref was dropped before any code saw the error")
    assert len(ear.lines) == 1


@shared_loop
async def test_an_error_that_was_there_before_the_other_call_was_made_is_reported(
    log_only: aiodaft.Runtime, ear: Ear
) -> None:
    failing = await log_only.spawn(Failing)
    forgotten = failing.raise_value_error("forgotten")
    await forgotten.ready()
    with suppress(ValueError):
        await failing.raise_value_error("later")
    del forgotten
    assert "forgotten" in await ear.hears("its ref was dropped before any code saw the error")


@shared_loop
async def test_calls_of_two_methods_are_no_siblings(log_only: aiodaft.Runtime, ear: Ear) -> None:
    gated = await log_only.spawn(Gated)
    caller = await log_only.spawn(Responder, gated)
    await caller.hold()
    await caller.catch()
    await caller.drop()
    await gated.open_gate()
    assert "forgotten" in await ear.hears("its ref was dropped before any code saw the error")


@shared_loop
async def test_an_error_that_a_notebook_shows_counts_as_seen(log_only: aiodaft.Runtime, ear: Ear) -> None:
    failing = await log_only.spawn(Failing)
    for text in ("shown", "forgotten"):
        ref = failing.raise_value_error(text)
        await ref.ready()
        if text == "shown":
            assert "ValueError: shown" in ref._repr_html_()
        del ref
    heard = await ear.hears("its ref was dropped before any code saw the error")
    assert "forgotten" in heard
    assert "shown" not in heard
