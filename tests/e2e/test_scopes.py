"""Scopes: nothing outlives the block that owns it (row CR5; group C of the fault tests)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from actors import Echo, Entered, NeedsGpu, Sleeper, SlowStart
from failing import Failing
from inside import awaited, resources_of
from leaks import descendants, is_alive, wait_gone
from supervised import Late

import aiodaft

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def test_leaving_a_block_ends_every_process() -> None:
    async with aiodaft.Runtime(preload=()) as rt:
        pids = [(await rt.info(await rt.spawn(Echo))).pid for _ in range(3)]
        assert all(map(is_alive, pids))
    assert not any(map(is_alive, pids))


async def test_an_error_in_the_body_cancels_what_runs(tmp_path: Path) -> None:
    async def body() -> None:
        async with aiodaft.Runtime(preload=()) as rt:
            await rt.spawn(Entered, str(tmp_path / "left"))
            sleeper = await rt.spawn(Sleeper)
            ref = sleeper.sleep(60)
            await sleeper.history()
            assert not ref.done()
            raise ZeroDivisionError

    async with asyncio.timeout(30):
        with pytest.raises(ZeroDivisionError):
            await body()
    assert (tmp_path / "left").read_text() == "left\n"


@pytest.mark.parametrize("error", [ZeroDivisionError("in the body"), asyncio.CancelledError()], ids=["error", "Ctrl-C"])
async def test_an_error_in_the_block_of_an_actor_is_the_only_one_and_waits_for_no_call(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    refs = []
    with pytest.raises(type(error)) as caught:
        # Well over the time that a test has.
        async with (
            aiodaft.Runtime(preload=(), stop_grace=1000) as rt,
            rt.group(2, Sleeper) as sleepers,
            rt.on(restart=aiodaft.Restart()).spawn(Sleeper) as restarted,
        ):
            for sleeper in (*sleepers, restarted):
                refs.append(sleeper.sleep(60))
                await sleeper.history()
            raise error
    assert caught.value is error
    assert caplog.records == []
    for ref in refs:
        assert isinstance(ref.exception(), aiodaft.CallCancelled | aiodaft.ActorDied)


async def test_a_call_that_the_end_of_the_block_of_its_actor_cancels_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with aiodaft.Runtime(preload=(), stop_grace=0) as rt, rt.spawn(Sleeper) as sleeper:
        ref = sleeper.sleep(60)
        sleeper.sleep(60)
        await sleeper.history()
    assert isinstance(ref.exception(), aiodaft.CallCancelled | aiodaft.ActorDied)
    assert caplog.records == []


async def test_an_error_of_a_method_is_raised_at_the_end_of_a_block_in_which_it_fails() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with aiodaft.Runtime(preload=()) as rt, rt.spawn(Failing) as failing:
            ref = failing.raise_value_error("x")
            await ref.ready()
    assert [str(one) for one in caught.value.exceptions] == ["x"]


async def test_calls_under_way_end_in_peace_when_the_block_does() -> None:
    async with aiodaft.Runtime(preload=()) as rt:
        sleeper = await rt.spawn(Sleeper)
        ref = sleeper.sleep(0.2)
        await sleeper.history()
    assert await ref == "sleep"


async def test_a_call_that_does_not_end_is_cancelled_after_the_grace_time() -> None:
    async with aiodaft.Runtime(preload=(), stop_grace=0.1) as rt:
        sleeper = await rt.spawn(Sleeper)
        ref = sleeper.sleep(60)
        await sleeper.history()
    with pytest.raises((aiodaft.CallCancelled, aiodaft.ActorDied)):
        await ref


async def test_a_method_stuck_in_its_thread_does_not_hold_up_the_end() -> None:
    async with asyncio.timeout(30), aiodaft.Runtime(preload=(), stop_grace=0.1, cancel_grace=0.1) as rt:
        sleeper = await rt.spawn(Sleeper)
        ref = sleeper.block(1000)
        await sleeper.history()
    with pytest.raises(aiodaft.ActorDied):
        await ref


@pytest.mark.asyncio(loop_scope="module")
async def test_nested_scopes_close_inside_out(rt: aiodaft.Runtime, tmp_path: Path) -> None:
    log = tmp_path / "log"

    async with rt.scope() as outer:
        await outer.spawn(Entered, str(log))
        async with outer.scope() as inner:
            first = await inner.spawn(Entered, str(log))
            assert await first.is_entered()
        assert log.read_text() == "left\n"
        with pytest.raises(aiodaft.ActorDied):
            await first.is_entered()
    assert log.read_text() == "left\n" * 2
    assert await (await rt.spawn(Echo)).echo("the runtime goes on") == "the runtime goes on"


@pytest.mark.asyncio(loop_scope="module")
async def test_an_error_in_a_scope_ends_that_scope_only(rt: aiodaft.Runtime) -> None:
    survivor = await rt.spawn(Echo)
    with pytest.raises(ExceptionGroup):
        async with rt.scope() as scope:
            failing = await scope.spawn(Failing)
            failing.raise_value_error()
            await asyncio.sleep(60)
    assert await survivor.echo(1) == 1
    with pytest.raises(aiodaft.exceptions.RuntimeClosed):
        await scope.spawn(Echo)


@pytest.mark.asyncio(loop_scope="module")
async def test_b29_one_of_five_that_raises_ends_the_others(rt: aiodaft.Runtime) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with rt.scope() as scope:
            group = await scope.group(5, Failing)
            pids = [(await rt.info(member)).pid for member in group]
            waiting = [member.wait() for member in group[:4]]
            await asyncio.gather(*(member.count() for member in group[:4]))
            group[4].raise_value_error("the fifth")
            await asyncio.gather(*waiting)
    assert [str(error) for error in caught.value.exceptions] == ["the fifth"]
    assert all(ref.done() for ref in waiting)
    assert not any(map(is_alive, pids))


@pytest.mark.asyncio(loop_scope="module")
async def test_spawn_as_a_context_manager_stops_its_actor(rt: aiodaft.Runtime) -> None:
    async with rt.spawn(Echo) as echo, rt.group(2, Failing) as group:
        assert await echo.echo(1) == 1
        pids = [(await rt.info(member)).pid for member in group]
    with pytest.raises(aiodaft.ActorDied, match="was stopped") as caught:
        await echo.echo(2)
    assert caught.value.executed is False
    assert not any(map(is_alive, pids))


@pytest.mark.asyncio(loop_scope="module")
async def test_stopping_and_killing_are_idempotent_and_free_resources(rt: aiodaft.Runtime) -> None:
    first = await rt.on(gpus=4).spawn(Echo)
    with pytest.raises(aiodaft.exceptions.InsufficientResources):
        await rt.spawn(NeedsGpu)
    await rt.stop(first)
    await rt.stop(first)
    second = await rt.on(gpus=4).spawn(Sleeper)
    ref = second.sleep(60)
    await rt.kill(second)
    await rt.kill(second)
    with pytest.raises(aiodaft.ActorDied, match="killed by its owner"):
        await ref
    assert await (await rt.spawn(NeedsGpu)).visible() == "0"


async def test_the_body_is_cancelled_from_outside(tmp_path: Path) -> None:
    entered = asyncio.Event()

    async def body() -> None:
        async with aiodaft.Runtime(preload=()) as rt:
            await rt.spawn(Entered, str(tmp_path / "left"))
            entered.set()
            await asyncio.sleep(60)

    task = asyncio.get_running_loop().create_task(body())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (tmp_path / "left").read_text() == "left\n"


async def test_a_runtime_is_opened_in_one_task_and_closed_in_another() -> None:
    rt = aiodaft.Runtime(preload=())
    await asyncio.get_running_loop().create_task(rt.__aenter__())
    echo = await rt.spawn(Echo)
    assert await echo.echo(1) == 1
    await asyncio.get_running_loop().create_task(rt.__aexit__(None, None, None))
    with pytest.raises(aiodaft.exceptions.RuntimeClosed):
        await rt.spawn(Echo)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_block_does_not_end_before_what_is_being_spawned_in_it_is_taken_back(rt: aiodaft.Runtime) -> None:
    # The fork server stays.
    await rt.stop(await rt.spawn(Echo))
    before = descendants()
    async with rt.scope() as scope:
        loop = asyncio.get_running_loop()
        spawning, cancelled = (loop.create_task(awaited(scope.spawn(Echo))) for _ in range(2))
        await asyncio.wait([cancelled], timeout=0)
        cancelled.cancel()
    assert spawning.done()
    with pytest.raises(aiodaft.exceptions.RuntimeClosed, match="Echo cannot be spawned: its scope is closed"):
        await spawning
    assert descendants() <= before


@pytest.mark.asyncio(loop_scope="module")
async def test_a_block_ends_although_the_actor_that_an_actor_is_spawned_beside_does_not_come_back(
    rt: aiodaft.Runtime, tmp_path: Path
) -> None:
    os.mkfifo(gate := tmp_path / "gate")
    late = await rt.spawn(Late, str(gate))
    with pytest.raises(aiodaft.ActorDied):
        await late.die()
    async with rt.scope() as scope:
        spawning = asyncio.get_running_loop().create_task(awaited(scope.on(with_=late).spawn(Echo)))
        await asyncio.wait([spawning], timeout=0)
    with pytest.raises(aiodaft.exceptions.RuntimeClosed, match="Echo cannot be spawned: its scope is closed"):
        await spawning


async def test_a_runtime_ends_although_what_starts_its_actors_imports_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(gate := tmp_path / "gate")
    (tmp_path / "read_at_import.py").write_text(f"open({str(gate)!r}).read()")
    monkeypatch.syspath_prepend(tmp_path)
    async with aiodaft.Runtime(preload=("read_at_import",)) as rt:
        spawning = asyncio.get_running_loop().create_task(awaited(rt.spawn(Echo)))
        # Open as soon as the module is being imported, which ends when this is closed.
        importing = await asyncio.to_thread(gate.open, "w")
    importing.close()
    with pytest.raises(aiodaft.exceptions.RuntimeClosed, match="Echo cannot be spawned: its scope is closed"):
        await spawning


@pytest.mark.asyncio(loop_scope="module")
async def test_spawning_that_is_cancelled_leaves_nothing(rt: aiodaft.Runtime) -> None:
    before = await resources_of(rt)
    for delay in (0.0, 0.001, 0.02):
        spawning = asyncio.get_running_loop().create_task(awaited(rt.on(gpus=1).spawn(SlowStart, 60.0)))
        await asyncio.wait([spawning], timeout=delay)
        spawning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await spawning
    assert await resources_of(rt) == before


SCRIPT = """
    import asyncio, os, signal, sys
    # A job in the background, as this test may be, inherits that Ctrl-C is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.insert(0, {support!r})
    import aiodaft
    from actors import Sleeper

    async def main():
        async with aiodaft.Runtime(preload=()) as rt:
            sleeper = await rt.spawn(Sleeper)
            await sleeper.history()
            print("ready", flush=True)
            try:
                await sleeper.sleep(60)
            finally:
                {cleanup}

    aiodaft.run(main())
"""


def start_script(cleanup: str = "pass") -> subprocess.Popen[str]:
    """Run a controller in a process group of its own, and wait until its actor is busy."""
    code = textwrap.dedent(SCRIPT).format(support=str(ROOT / "tests" / "support"), cleanup=cleanup)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    return process


def test_killing_the_controller_ends_every_process() -> None:
    for number in (signal.SIGKILL, signal.SIGTERM):
        process = start_script()
        pids = descendants(process.pid)
        assert len(pids) == 2
        process.send_signal(number)
        process.wait()
        assert wait_gone(pids) == set()
        process.communicate()


@pytest.mark.programs
def test_the_actors_of_a_killed_controller_are_gone_within_two_seconds() -> None:
    seconds: list[float] = []
    for _ in range(3):
        process = start_script()
        pids = descendants(process.pid)
        killed = time.monotonic()
        process.kill()
        assert wait_gone(pids) == set()
        seconds.append(time.monotonic() - killed)
        process.communicate()
    # The fastest one says how it is done; the others, how busy the machine is.
    assert min(seconds) < 2


def test_one_ctrl_c_ends_the_program_in_order() -> None:
    process = start_script(cleanup="print('cleaned up', flush=True)")
    pids = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=50)
    assert "cleaned up" in out
    assert "KeyboardInterrupt" in err
    assert wait_gone(pids) == set()


def test_a_second_ctrl_c_ends_it_at_once() -> None:
    process = start_script(cleanup="print('cleaning', flush=True); await asyncio.sleep(600)")
    pids = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "cleaning\n"
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=50)
    assert process.returncode != 0
    assert wait_gone(pids) == set()


@pytest.mark.parametrize("inner", [True, False])
async def test_an_error_is_raised_as_it_is_also_where_the_runtime_was_closed_before(inner: bool) -> None:
    with pytest.raises(KeyError, match="of the user"):
        async with aiodaft.Runtime(preload=()) as rt, rt.scope() if inner else nullcontext():
            await rt.spawn(Echo)
            await rt.aclose()
            raise KeyError("of the user")


async def test_a_scope_raises_unseen_errors_when_its_runtime_was_closed_before() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with aiodaft.Runtime(preload=()) as rt, rt.scope() as scope:
            ref = (await scope.spawn(Failing)).raise_value_error("no code looked at it")
            await ref.ready()
            await rt.aclose()
    assert caught.group_contains(ValueError, match="no code looked at it")
