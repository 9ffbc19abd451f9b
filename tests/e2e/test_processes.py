"""Processes that are cancelled while they start, and processes that actors start."""

from __future__ import annotations

import asyncio
import atexit
import gzip
import os
import signal
import socket
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from actors import Echo, Entered, Sleeper
from inside import agent_of, awaited, controller_of, fork_server_of, resources_of, timeouts_of
from leaks import descendants, ended, is_alive
from odd_actors import Parent
from stuck import Stuck
from supervised import AT_ONCE
from transport_probes import no_more_files

import aiodaft
from aiodaft import Restart
from aiodaft._runtime.node.workers import condition_of
from aiodaft._runtime.platform import linux as processes
from aiodaft._runtime.process import Env, Timeouts


class Orders(socket.socket):
    """The controller's end of the connection to the fork server; `full` is set when it has no room for an order."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(fileno=end.detach())
        self.full = asyncio.Event()

    def sendmsg(self, *args: Any) -> int:
        try:
            return super().sendmsg(*args)
        except BlockingIOError:
            self.full.set()
            raise


class Writer(aiodaft.Actor):
    """Leaves work to the end of its process that can be done there."""

    @aiodaft.method
    def open(self, folder: Path) -> None:
        self.log = open(folder / "log", "w")  # noqa: SIM115 - stays open
        self.packed = gzip.open(folder / "packed", "wt")  # noqa: SIM115 - the same
        for file in (self.log, self.packed):
            file.write("data")
        atexit.register((folder / "report").write_text, "data")
        weakref.finalize(type(self), (folder / "finalized").touch)
        # So torch would withdraw each operator from itself.
        withdraw: Any = partial((folder / "withdrawn").touch)
        withdraw.__module__ = "torch.library"
        weakref.finalize(type(self), withdraw)

    @aiodaft.method
    async def blocked(self) -> set[int]:
        return signal.pthread_sigmask(signal.SIG_BLOCK, ())


async def gone(*pids: int) -> None:
    await ended(*pids)


async def test_a_stop_in_order_runs_atexit_and_writes_out_files(rt: aiodaft.Runtime, tmp_path: Path) -> None:
    async with rt.spawn(Writer) as writer:
        await writer.open(tmp_path)
    assert (tmp_path / "log").read_text() == (tmp_path / "report").read_text() == "data"
    with gzip.open(tmp_path / "packed", "rt") as packed:
        assert packed.read() == "data"
    assert set(os.listdir(tmp_path)) == {"log", "packed", "report", "finalized"}


async def test_signals_of_a_batch_system_to_all_processes_end_no_actor(rt: aiodaft.Runtime) -> None:
    writer = await rt.spawn(Writer)
    pid = (await rt.info(writer)).pid
    assert pid is not None
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        os.kill(fork_server_of(rt), number)
        os.kill(pid, number)
    assert await writer.blocked() == set()
    assert await (await rt.spawn(Writer)).blocked() == set()


async def test_actors_block_no_signals_that_their_program_was_started_with() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        async with aiodaft.Runtime(preload=()) as rt, rt.spawn(Parent) as parent, rt.spawn(Writer) as writer:
            assert await writer.blocked() == set()
            orphan = await parent.start_in_background()
            await rt.stop(parent)
            await gone(orphan)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def test_spawns_that_are_cancelled_at_any_moment_leave_nothing(rt: aiodaft.Runtime) -> None:
    await rt.spawn(Echo)
    loop = asyncio.get_running_loop()
    _, free = await resources_of(rt)
    before = len(descendants())
    for turns in range(1, 60, 2):
        spawning = loop.create_task(awaited(rt.on(gpus=1).spawn(Echo)))
        for _ in range(turns):
            await asyncio.sleep(0)
        spawning.cancel()
        await asyncio.wait([spawning])
        if not spawning.cancelled():
            await rt.stop(spawning.result())
    async with asyncio.timeout(30):
        while len(descendants()) > before:
            await asyncio.sleep(0.01)
    assert (await resources_of(rt))[1] == free


async def spawn_more_than_there_is_room_for(rt: aiodaft.Runtime, count: int) -> list[asyncio.Task[Echo]]:
    """Stop the fork server and order more workers than its socket can hold: the tasks that wait for them."""
    made: list[Orders] = []

    def watched_pair(*args: int) -> tuple[socket.socket, socket.socket]:
        ours, theirs = pair(*args)
        made.append(Orders(ours))
        return made[-1], theirs

    pair = socket.socketpair
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "socketpair", watched_pair)
        await rt.stop(await rt.spawn(Echo))
    # The connection to the fork server is made first.
    orders = made[0]
    os.kill(fork_server_of(rt), signal.SIGSTOP)
    orders.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    spawning = [asyncio.get_running_loop().create_task(awaited(rt.spawn(Echo))) for _ in range(count)]
    await orders.full.wait()
    return spawning


async def test_more_spawns_than_the_fork_server_has_room_for(rt: aiodaft.Runtime) -> None:
    spawning = await spawn_more_than_there_is_room_for(rt, 320)
    os.kill(fork_server_of(rt), signal.SIGKILL)
    done, pending = await asyncio.wait(spawning, timeout=30)
    assert not pending
    assert {type(task.exception()) for task in done} == {aiodaft.SpawnFailed}


async def test_spawns_that_are_cancelled_leave_no_process_also_if_the_fork_server_hears_of_it_too_late(
    rt: aiodaft.Runtime,
) -> None:
    # There is no room for the orders to kill workers either.
    spawning = await spawn_more_than_there_is_room_for(rt, 20)
    before = len(descendants())
    for task in spawning:
        task.cancel()
    await asyncio.wait(spawning)
    assert await agent_of(rt).processes() == ()
    os.kill(fork_server_of(rt), signal.SIGCONT)
    # It has followed its earlier orders.
    await rt.stop(await rt.spawn(Echo))
    async with asyncio.timeout(30):
        while len(descendants()) > before:
            await asyncio.sleep(0.01)


async def test_a_runtime_can_be_closed_when_its_fork_server_died_before_it_said_anything() -> None:
    async with aiodaft.Runtime() as rt:
        spawning = asyncio.get_running_loop().create_task(awaited(rt.spawn(Echo)))
        while controller_of(rt).site.launcher.pid is None:
            await asyncio.sleep(0)
        os.kill(fork_server_of(rt), signal.SIGKILL)
        with pytest.raises(aiodaft.SpawnFailed):
            await spawning


async def test_c41_an_actor_dies_with_its_family_and_its_callers_hear(rt: aiodaft.Runtime) -> None:
    parent = await rt.spawn(Parent)
    family = [*await parent.fork_a_family(), await parent.start_a_daemon()]
    pid = await parent.pid()
    ref = parent.hold_interpreter()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(aiodaft.ActorDied):
        await ref
    await gone(pid, *family)
    # The family held the link: the end of the process was reported before that of the link. One of them is news.
    assert await (await rt.spawn(Sleeper)).sleep(0.2) == "sleep"


async def test_what_an_actor_put_into_the_background_ends_with_it_and_not_before(rt: aiodaft.Runtime) -> None:
    parent, other = await rt.spawn(Parent), await rt.spawn(Echo)
    child = await parent.start_in_background()
    await rt.stop(other)
    assert await parent.pid()
    assert is_alive(child)
    await rt.stop(parent)
    await gone(child)


async def test_a_runtime_that_ends_during_a_large_copy_ends_well() -> None:
    value = np.zeros(256 << 20, np.uint8)
    with pytest.raises(ZeroDivisionError):
        async with aiodaft.Runtime(preload=(), stop_grace=0, cancel_grace=0) as rt:
            ref = (await rt.spawn(Echo)).echo(value)
            await asyncio.sleep(0)
            raise ZeroDivisionError
    assert ref.done()


async def test_a_fork_server_that_is_stopped_does_not_hold_up_the_end() -> None:
    env = Env(timeouts=Timeouts(fork_server_end=0.2, kill=0.2))
    async with asyncio.timeout(30):
        async with aiodaft.Runtime(preload=(), cancel_grace=0.1, stop_grace=0.1, env=env) as rt:
            pid = (await rt.info(await rt.spawn(Echo))).pid
            os.kill(fork_server_of(rt), signal.SIGSTOP)
    await gone(pid)


async def test_a_stopped_fork_server_is_reported_and_then_fails_what_waits_for_it(
    rt: aiodaft.Runtime, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, loop = await rt.spawn(Echo), asyncio.get_running_loop()
    fork_server = fork_server_of(rt)
    assert fork_server is not None
    with pytest.raises(ExceptionGroup) as limit, monkeypatch.context() as patch:
        async with rt.scope(restart=Restart(intensity=2, backoff=AT_ONCE)) as scope:
            supervised = await scope.spawn(Echo)
            pid = await supervised.pid()
            os.kill(fork_server, signal.SIGSTOP)
            patch.setattr(timeouts_of(rt), "fork_server_look", 0.01)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(aiodaft.ActorDied):
                await supervised.echo("to the first incarnation")
            call = supervised.echo("to the next one")
            spawning = [loop.create_task(awaited(rt.spawn(Echo))) for _ in range(3)]
            # The limit of restarts ends the block.
            await asyncio.Event().wait()
    advice = f"it is stopped (SIGSTOP); continue it with `kill -CONT {fork_server}`"
    await asyncio.wait(spawning)
    with pytest.raises(aiodaft.exceptions.RestartLimitReached):
        await call
    (reached,) = limit.value.exceptions
    assert isinstance(reached, aiodaft.exceptions.RestartLimitReached)
    for error in (*(task.exception() for task in spawning), *reached.attempts[1:]):
        assert isinstance(error, aiodaft.SpawnFailed)
        assert error.executed is False
        assert advice in str(error)
    told = [record.levelname for record in caplog.records if record.module == "launcher"]
    assert told == ["WARNING", "ERROR"]
    # Calls that need no fork server go on, and so does everything once it is continued.
    assert await other.echo("goes on") == "goes on"
    os.kill(fork_server, signal.SIGCONT)
    while f"the fork server (pid {fork_server}) answers again" not in caplog.text:
        await asyncio.sleep(0.01)
    assert await (await rt.spawn(Echo)).echo("works again") == "works again"
    assert len(await agent_of(rt).processes()) == 2


async def test_a_fork_server_that_is_stuck_in_an_import_fails_what_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "endless.py").write_text(f"open({str(fifo)!r}).read()")
    async with aiodaft.Runtime(preload=("endless",)) as rt:
        spawning = asyncio.get_running_loop().create_task(awaited(rt.spawn(Echo)))
        # Now it is in the import.
        writing = await asyncio.to_thread(os.open, fifo, os.O_WRONLY)
        monkeypatch.setattr(timeouts_of(rt), "fork_server_look", 0.01)
        with pytest.raises(aiodaft.SpawnFailed, match=r"has not answered for \d+ s: it imports endless; .*preload="):
            await spawning
        os.close(writing)


@pytest.mark.parametrize("how", ["stopped", "busy with an import", "deaf"])
async def test_what_actors_had_started_ends_with_the_runtime_though_the_fork_server_is(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    go, reached, fifo = tmp_path / "go", tmp_path / "reached", tmp_path / "fifo"
    os.mkfifo(fifo)
    # Until there is the file `go`, the import fails, which the fork server tries again for the next worker.
    begin = f"import ctypes; open({str(go)!r}).close(); open({str(reached)!r}, 'w').close(); "
    # A lock in C that is taken twice: no signal ends the wait.
    deaf = "lock = ctypes.create_string_buffer(64); take = ctypes.CDLL(None).pthread_mutex_lock; take(lock); take(lock)"
    (tmp_path / "endless.py").write_text(begin + (deaf if how == "deaf" else f"open({str(fifo)!r}).read()"))
    # It is killed only where nothing else helps.
    env = Env(timeouts=Timeouts(fork_server_end=0.1 if how == "deaf" else 3600))
    async with aiodaft.Runtime(preload=("endless",), stop_grace=0.1, cancel_grace=0.1, env=env) as rt:
        parent = await rt.spawn(Parent)
        pids = [await parent.pid(), *await parent.fork_a_family(), await parent.start_a_daemon()]
        if how == "stopped":
            os.kill(fork_server_of(rt), signal.SIGSTOP)
        else:
            go.touch()
            spawning = asyncio.get_running_loop().create_task(awaited(rt.spawn(Echo)))
            while not reached.exists():
                await asyncio.sleep(0.01)
            spawning.cancel()
            await asyncio.wait([spawning])
    await gone(*pids)


def test_a_process_that_computes_or_has_a_child_that_does_shows_signs_of_life() -> None:
    loop = "while True: pass"
    for command in (loop, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {loop!r}])"):
        with subprocess.Popen([sys.executable, "-c", command], start_new_session=True) as process:
            while not (known := set(processes.process_tree(process.pid)[1:])) and command != loop:
                pass
            before = processes.signs_of_life(process.pid, ())
            while processes.signs_of_life(process.pid, ()) == before:
                pass
            if known:
                # Of a worker that computes, the fork server shows nothing.
                assert len(processes.signs_of_life(process.pid, known)) == 1  # type: ignore[arg-type]
            os.kill(process.pid, signal.SIGSTOP)
            while processes.signs_of_life(process.pid, ()) is not None:
                pass
            processes.kill_tree(process.pid)


def test_a_process_is_not_taken_for_dead_because_there_is_no_descriptor_to_look_at_it_with() -> None:
    with no_more_files():
        assert processes.signs_of_life(os.getpid(), ()) != processes.signs_of_life(os.getpid(), ())


async def test_the_end_of_a_block_kills_actors_that_do_not_answer_and_stops_the_others_in_order(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    env = Env(timeouts=Timeouts(answer=0))
    async with aiodaft.Runtime(preload=(), stop_grace=0.1, cancel_grace=0, env=env) as rt:
        await rt.spawn(Entered, str(log), "first")
        stuck = [await rt.spawn(Stuck) for _ in range(3)]
        await rt.spawn(Entered, str(log), "last")
        pids = [(await rt.info(actor)).pid for actor in stuck]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    assert log.read_text() == "last\nfirst\n"
    assert not any(map(is_alive, pids))


async def test_a_block_that_fails_ends_within_the_two_grace_times_though_an_actor_does_not_answer() -> None:
    with pytest.raises(ZeroDivisionError):
        async with asyncio.timeout(None) as limit, aiodaft.Runtime(preload=(), stop_grace=3, cancel_grace=1) as rt:
            stuck = await rt.spawn(Stuck)
            pid, ref = (await rt.info(stuck)).pid, stuck.stop_itself()
            while "(SIGSTOP)" not in condition_of(pid):
                await asyncio.sleep(0.01)
            limit.reschedule(asyncio.get_running_loop().time() + 4)
            raise ZeroDivisionError
    assert not limit.expired()
    with pytest.raises(aiodaft.ActorDied):
        await ref
    assert not is_alive(pid)
