"""`rt.stack()` and `aiodaft stack` show what every process is in the middle of (point 6 of the failure issue)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cancelled import Stuck, Subject
from inside import errors_kept_by, peer_of
from leaks import descendants, is_alive

import aiodaft
from aiodaft._runtime.platform.linux import address
from aiodaft.actor import target_of
from aiodaft.stack import CallStack, ProcessStack

SUPPORT = Path(__file__).parent.parent / "support"


def lines_in(stack: Any, file: str) -> list[str]:
    """The lines of a stack that are in a file of the tests."""
    return [frame.code for frame in stack.frames if frame.file.endswith(file)]


def call_of(process: ProcessStack, method: str, state: str = "running") -> CallStack:
    (found,) = [call for call in process.calls if (call.method, call.state) == (f"Subject.{method}", state)]
    return found


@pytest.mark.asyncio(loop_scope="module")
async def test_it_shows_what_runs_where_it_is_and_what_it_waits_for(module_rt: aiodaft.Runtime) -> None:
    rt = module_rt
    first, second = await rt.spawn(Subject), await rt.spawn(Subject)
    names = [(await rt.info(one)).name for one in (first, second)]
    await first.remember_loop()
    blocked, calling = first.block(), second.call(first)
    queued, items, without = first.block(), second.stream(), second.use(first.opened())
    await asyncio.gather(second.has_begun(), anext(items))
    while (await first.history()).count("began") < 2:
        pass

    async def waiting() -> None:
        await asyncio.gather(blocked, calling)

    program = asyncio.get_running_loop().create_task(waiting(), name="the program's own")
    await asyncio.sleep(0)
    stack = await rt.stack(patience=20)
    await first.let_go()
    program.cancel()
    without.cancel()
    await asyncio.wait([program, without])
    await queued
    await items.aclose()

    controller, one, other = stack.processes
    assert (one.actors, other.actors) == ((names[0],), (names[1],))
    assert all(process.answered for process in stack.processes)
    (task,) = [task for task in controller.tasks if task.name == "the program's own"]
    assert task.waits_for == (f"Subject.block of {names[0]}", f"Subject.call of {names[1]}")
    assert lines_in(task, "test_stack.py") == ["await asyncio.gather(blocked, calling)"]

    running = call_of(one, "block")
    assert running.caller == controller.id
    assert running.seconds is not None
    assert lines_in(running, "cancelled.py") == ["self.release.wait(20)"]
    assert call_of(one, "block", "queued").waits_for == (f"Subject.block of {names[0]}",)
    assert call_of(one, "run").caller == other.id
    (thread,) = [thread for thread in one.threads if thread.name == names[0]]
    assert lines_in(thread, "cancelled.py") == ["self.release.wait(20)"]

    nested = call_of(other, "call")
    assert nested.waits_for == (f"Subject.run of {names[0]}",)
    assert len(lines_in(nested, "cancelled.py")) == 1
    assert lines_in(call_of(other, "stream"), "cancelled.py") == ["await asyncio.Event().wait()"]
    assert call_of(other, "use", "needs arguments").waits_for == (f"a call in {one.id}",)

    text = str(stack)
    assert f"Subject.run of {names[0]}: running for" in text
    assert f"called by {names[1]}" in text
    assert f"waits for a call in {names[0]}" in text


@pytest.mark.parametrize("how", ["keep_loop", "keep_interpreter"])
async def test_a_process_with_a_blocked_loop_shows_its_threads(rt: aiodaft.Runtime, how: str, fifo: Path) -> None:
    stuck = await rt.spawn(Stuck)
    ref = getattr(stuck, how)(str(fifo))
    stack = await rt.stack(patience=0.2)
    with open(fifo, "w", encoding="utf-8"):
        await ref
    (process,) = stack.processes[1:]
    assert not process.answered
    assert "cancelled.py" in process.dump
    assert f"in {how}" in process.dump
    assert "does not answer" in str(process)
    # Asked again, it tells only of the present.
    stack = await rt.stack(patience=20)
    assert stack.processes[1].answered


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("look", ["patient", "impatient", "cancelled"])
async def test_a_stopped_actor_that_was_looked_at_can_be_killed(module_rt: aiodaft.Runtime, look: str) -> None:
    rt = module_rt
    stuck = await rt.spawn(Subject)
    os.kill((await rt.info(stuck)).pid, signal.SIGSTOP)
    looking = asyncio.get_running_loop().create_task(rt.stack(patience=0 if look == "impatient" else 60))
    if look == "impatient":
        assert not (await looking).processes[1].answered
    else:
        while not asked_of(rt, stuck):
            await asyncio.sleep(0)
    if look == "cancelled":
        looking.cancel()
        await asyncio.wait([looking])
    # A later question: when that is answered, the one of the stack is.
    ref = stuck.history()
    await rt.kill(stuck)
    with pytest.raises(aiodaft.ActorDied):
        await ref
    if look == "patient":
        assert len((await looking).processes) == 1
    assert len(errors_kept_by(rt)) == 0


def asked_of(rt: aiodaft.Runtime, actor: object) -> bool:
    """Whether calls of an actor's process are under way."""
    return bool(peer_of(rt).connections[target_of(actor).remote].session.calls)


_CONTROLLER = """
import asyncio, os
import aiodaft
from actors import Sleeper
async def main():
    async with aiodaft.Runtime(preload=()) as rt:
        sleeper = await rt.spawn(Sleeper)
        ref = sleeper.sleep(60)
        await sleeper.history()
        print("ready", flush=True)
        await ref
aiodaft.run(main())
"""


def test_the_command_asks_a_running_controller_and_nothing_is_left_after_a_kill(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{SUPPORT}", "TMPDIR": str(tmp_path)}
    environment["XDG_RUNTIME_DIR"] = str(tmp_path)

    def asked() -> set[str]:
        """The addresses of the commands that have asked one of these processes, among which is the fork server."""
        found = set()
        for pid in processes:
            with suppress(FileNotFoundError):
                found.add(address(pid))
        return found

    def ask(pid: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "aiodaft.cli", "stack", "--pid", str(pid)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=50, check=False)

    with subprocess.Popen([sys.executable, "-c", _CONTROLLER], stdout=subprocess.PIPE, env=environment) as controller:
        try:
            assert controller.stdout is not None
            assert controller.stdout.readline() == b"ready\n"
            processes = descendants(controller.pid)
            assert asked() == {""}
            found = ask(controller.pid)
            assert found.returncode == 0, found.stderr
            assert "waits for Sleeper.sleep of Sleeper-1" in found.stdout
            assert "Sleeper.sleep of Sleeper-1: running for" in found.stdout
            assert is_alive(controller.pid)
            (place,) = asked()
            # Nothing listens there any more. The kernel shows the zero byte of an abstract name as @.
            assert place.replace("\0", "@") not in Path("/proc/net/unix").read_text()
        finally:
            controller.kill()
    assert list(tmp_path.iterdir()) == []
    found = ask(controller.pid)
    assert found.returncode == 1
    assert "there is no aiodaft program" in found.stderr
