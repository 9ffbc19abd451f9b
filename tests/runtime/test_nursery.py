"""What the fork server is told, whatever becomes of those who wanted it told."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from aiodaft._protocol.codec import unpack
from aiodaft._runtime import forkserver as order
from aiodaft._runtime import nursery as nursery_module
from aiodaft._runtime.logs import LogPump
from aiodaft._runtime.nursery import Nursery
from aiodaft.exceptions import SpawnFailed


@asynccontextmanager
async def nursery_and_server() -> AsyncGenerator[tuple[Nursery, socket.socket], None]:
    """A nursery, and what would be its fork server's end of the socket."""
    loop = asyncio.get_running_loop()
    nursery: Any = Nursery(loop, fork=True, preload=())
    nursery._socket, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    nursery._socket.setblocking(False)
    server.setblocking(False)
    nursery._starting = loop.create_future()
    nursery._starting.set_result(None)
    with server:
        try:
            yield nursery, server
        finally:
            await nursery.aclose()


def received(server: socket.socket) -> list[int]:
    """The kinds of the orders that have come."""
    kinds: list[int] = []
    with suppress(BlockingIOError):
        while True:
            data, fds, _, _ = socket.recv_fds(server, 1 << 20, 3)
            for fd in fds:
                os.close(fd)
            kinds.append(unpack(data, lambda code, content: None)[0])
    return kinds


async def test_the_paths_are_told_before_the_first_spawn_and_not_again() -> None:
    async with nursery_and_server() as (nursery, server):
        for expected in ([order.CONFIGURE, order.SPAWN], [order.SPAWN]):
            _, connection = await nursery.spawn(b"", {}, "actor")
            connection.close()
            assert received(server) == expected


async def test_a_path_that_is_too_long_to_be_told_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async with nursery_and_server() as (nursery, server):
        monkeypatch.syspath_prepend("/" + "x" * (4 << 20))
        with pytest.raises(SpawnFailed, match=r"4,\d+,\d+ bytes \(sys.path, the environment\) are too many"):
            await nursery.spawn(b"", {}, "actor")
        assert received(server) == []


async def test_what_a_cancelled_spawn_could_not_tell_is_told_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async with nursery_and_server() as (nursery, server):
        _, connection = await nursery.spawn(b"", {}, "actor")
        connection.close()
        monkeypatch.syspath_prepend("/notebook")
        assert nursery._socket is not None
        with suppress(BlockingIOError):
            while True:
                nursery._socket.send(b"\x91\x09")
        spawning = asyncio.get_running_loop().create_task(nursery.spawn(b"", {}, "cancelled"))
        while not nursery._sending.locked():
            await asyncio.sleep(0)
        spawning.cancel()
        await asyncio.wait([spawning])
        assert spawning.cancelled()
        received(server)
        _, connection = await nursery.spawn(b"", {}, "actor")
        connection.close()
        assert received(server) == [order.CONFIGURE, order.SPAWN]


def test_the_last_lines_are_known_before_the_thread_that_passes_them_on_has_seen_them() -> None:
    pump = LogPump()
    for number in range(20):
        output, out, err = pump.open()
        os.write(err, b"one\ntwo\nthr" if number % 2 else b"one\ntwo\nthree\n")
        assert output.last_lines == (("one", "two") if number % 2 else ("one", "two", "three"))
        os.close(err)
        assert output.last_lines == ("one", "two", "thr" if number % 2 else "three")
        os.close(out)
    pump.close()


def test_looking_for_children_imports_nothing() -> None:
    """The fork server does it in a signal handler, in the middle of anything: of the same import, for instance."""
    code = (
        "import sys; from aiodaft._runtime import processes; known = set(sys.modules); "
        "processes.children(); processes.visible_pid(1); processes._pid_inside(1); assert set(sys.modules) == known"
    )
    subprocess.run([sys.executable, "-c", code], timeout=25, check=True)


@pytest.mark.parametrize("how", ["close", "abandon"])
async def test_a_fork_server_that_imports_what_takes_long_is_not_waited_for(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # It has all the time in the world to end by itself.
    monkeypatch.setattr(nursery_module, "_PATIENCE", 3600)
    monkeypatch.syspath_prepend(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "endless.py").write_text(f"open({str(tmp_path / 'fifo')!r}).read()")
    nursery = Nursery(asyncio.get_running_loop(), fork=True, preload=("endless",))
    child, connection = await nursery.spawn(b"", {}, "actor")
    connection.close()
    writing = await asyncio.to_thread(os.open, tmp_path / "fifo", os.O_WRONLY)
    # Now it imports.
    if how == "close":
        await nursery.aclose()
    else:
        nursery.abandon()
    os.close(writing)
    assert not child.started.done() or child.started.cancelled()
