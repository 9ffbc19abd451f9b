"""The orders to the fork server, also when the tasks that give them are cancelled."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.logs.console import Console
from aiodaft._runtime.logs.options import Source
from aiodaft._runtime.logs.worker_output import OutputReader
from aiodaft._runtime.node import launcher as launching
from aiodaft._runtime.node.launcher import WorkerLauncher
from aiodaft._runtime.node.worker import (
    NodeOptions,
    Spawned,
    Worker,
    WorkerEnvironment,
    WorkerSettings,
    packed,
    unpacked,
)
from aiodaft._runtime.process import ProcessOptions, Timeouts
from aiodaft.exceptions import SpawnFailed
from aiodaft.logs import Logs

_numbers = itertools.count(1)


def launcher_with(preload: tuple[str, ...], timeouts: Timeouts) -> WorkerLauncher:
    """A launcher of the running loop."""
    loop, console = asyncio.get_running_loop(), Console(Logs())
    return WorkerLauncher(loop, NodeOptions(True, preload, False), timeouts, console)


@asynccontextmanager
async def launcher_and_server(
    timeouts: Timeouts | None = None,
) -> AsyncGenerator[tuple[WorkerLauncher, socket.socket], None]:
    """A launcher, and the fork server's end of the socket."""
    servers: list[socket.socket] = []

    def start(command: list[str], *, pass_fds: tuple[int], **_: object) -> Any:
        servers.append(socket.socket(fileno=os.dup(*pass_fds)))
        return SimpleNamespace(pid=0, kill=lambda: None, poll=lambda: 0)

    launcher = launcher_with((), timeouts or Timeouts())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching.__dict__["subprocess"], "Popen", start)
        await spawn(launcher)
    (server,) = servers
    server.setblocking(False)
    with server:
        assert [order.directory for order in received(server)] == [os.getcwd()]
        try:
            yield launcher, server
        finally:
            await launcher.aclose()


async def spawn(launcher: WorkerLauncher) -> Worker:
    """Order a worker."""
    number = next(_numbers)
    here = PeerId("here")
    options = ProcessOptions(PeerId(f"worker-{number}"), "node", here, here, here, here, "none", False, 1, 1)
    settings = WorkerSettings(options, bytes(32), False, {}, [])
    worker, connection = await launcher.spawn(settings, WorkerEnvironment.here(), {}, "actor")
    connection.close()
    return worker


def received(server: socket.socket) -> list[Any]:
    """The orders that have come."""
    orders: list[Any] = []
    with suppress(BlockingIOError):
        while True:
            data, fds, _, _ = socket.recv_fds(server, 1 << 20, 4)
            for fd in fds:
                os.close(fd)
            orders.append(unpacked(data))
    return orders


async def test_a_path_that_is_too_long_to_be_told_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async with launcher_and_server() as (launcher, server):
        monkeypatch.syspath_prepend("/" + "x" * (4 << 20))
        with pytest.raises(SpawnFailed, match=r"4,\d+,\d+ bytes \(sys.path, the environment\) are too many"):
            await spawn(launcher)
        assert received(server) == []


async def test_no_answer_is_expected_to_an_order_that_could_not_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = asyncio.Event()
    monkeypatch.setattr(launching, "signs_of_life", lambda pid, others: looked.set())
    async with launcher_and_server(Timeouts(fork_server_look=0)) as (launcher, server):
        (worker,) = launcher.workers.values()
        server.send(packed(Spawned(worker.id, 1)))
        await worker.started
        looked.clear()
        with monkeypatch.context() as patch:
            patch.syspath_prepend("/" + "x" * (4 << 20))
            with pytest.raises(SpawnFailed, match="are too many"):
                await spawn(launcher)
        for _ in range(3):
            await asyncio.sleep(0)
        assert not looked.is_set()
        await spawn(launcher)
        await looked.wait()


async def test_only_what_has_changed_in_the_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODAFT_TEST_MARK", "")
    monkeypatch.setenv("AIODAFT_TEST_GONE", "1")
    async with launcher_and_server() as (launcher, server):
        monkeypatch.delenv("AIODAFT_TEST_GONE")
        monkeypatch.setenv("AIODAFT_TEST_MARK", "changed")
        await spawn(launcher)
        assert received(server)[0].changes == {"AIODAFT_TEST_GONE": None, "AIODAFT_TEST_MARK": "changed"}


def test_the_last_lines_are_known_before_the_thread_that_passes_them_on_has_seen_them() -> None:
    reader = OutputReader(Console(Logs()))
    for number in range(20):
        output, out, err = reader.open(Source(PeerId("worker"), "Model-1"))
        os.write(err, b"one\ntwo\nthr" if number % 2 else b"one\ntwo\nthree\n")
        assert output.last_lines == (("one", "two") if number % 2 else ("one", "two", "three"))
        os.close(err)
        assert output.last_lines == ("one", "two", "thr" if number % 2 else "three")
        os.close(out)
    reader.close()


def test_looking_for_children_imports_nothing() -> None:
    """The fork server does it in a signal handler, in the middle of anything: of the same import, for instance."""
    code = (
        "import sys; from aiodaft._runtime.platform import linux as processes; known = set(sys.modules); "
        "processes.children(); assert set(sys.modules) == known"
    )
    subprocess.run([sys.executable, "-c", code], timeout=50, check=True)


@pytest.mark.parametrize("how", ["close", "abandon"])
async def test_a_fork_server_that_imports_what_takes_long_is_not_waited_for(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # It has all the time in the world to end by itself.
    monkeypatch.syspath_prepend(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "endless.py").write_text(f"open({str(tmp_path / 'fifo')!r}).read()")
    timeouts = Timeouts(fork_server_end=3600)
    launcher = launcher_with(("endless",), timeouts)
    worker = await spawn(launcher)
    writing = await asyncio.to_thread(os.open, tmp_path / "fifo", os.O_WRONLY)
    # Now it imports.
    if how == "close":
        await launcher.aclose()
    else:
        launcher.abandon()
    os.close(writing)
    assert not worker.started.done() or worker.started.cancelled()
