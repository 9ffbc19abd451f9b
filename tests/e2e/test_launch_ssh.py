"""Nodes that are started by ssh, on a real sshd of this machine."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lone_launcher
import pytest
from leaks import descendants, is_alive
from sshd import Sshd, running_sshd, why_not
from travellers import Traveller

import aiodaft
from aiodaft import launch
from aiodaft._runtime.connections.identity import load_identity
from aiodaft._runtime.platform.tasks import TaskOwner
from aiodaft.launch.nodes import StartedNode

PAGE = Path(__file__).parents[2] / "docs" / "ssh.md"
MISSING = why_not()
pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cluster") / "key"
    made = subprocess.run([sys.executable, "-m", "aiodaft.cli", "key", "new", str(path)], capture_output=True)
    assert made.returncode == 0, made.stderr
    return path


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@contextmanager
def lone_launcher_of(key_file: Path, sshd: Sshd) -> Generator[list[int]]:
    """A program that has started nodes by ssh, and an actor on each of them: their pids."""
    program = [sys.executable, lone_launcher.__file__, str(key_file), *sshd.command]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield [process.pid, *map(int, process.stdout.readline().split())]
        finally:
            process.kill()


async def all_ended(sshd: Sshd) -> None:
    """Wait until no session of the server is left, and nothing that one has started."""
    while descendants(sshd.process.pid):
        await asyncio.sleep(0.01)


def key_of(key_file: Path) -> bytes:
    return key_file.read_bytes().splitlines()[1]


def what_others_see(pid: int) -> bytes:
    return b"".join((Path("/proc") / str(pid) / name).read_bytes() for name in ("cmdline", "environ"))


async def test_nodes_run_on_the_hosts_and_end_with_the_block(key_file: Path, sshd: Sshd) -> None:
    async with (
        launch.ssh(["n1", "n2"], key_file=key_file, command=sshd.command) as address,
        aiodaft.Runtime(address, key_file=key_file) as rt,
    ):
        first, second = await rt.on(node="n1").spawn(Traveller), await rt.on(node="n2").spawn(Traveller)
        assert await second.ask(first, first.increment(1)) == 3
        here = descendants(sshd.process.pid)
        assert {await first.pid(), await second.pid()} <= here
        secret = key_of(key_file)
        # The key is in no argument and no variable.
        assert [pid for pid in {*here, *descendants()} if secret in what_others_see(pid)] == []
    await all_ended(sshd)


async def test_nodes_end_when_the_controller_is_killed(key_file: Path, sshd: Sshd) -> None:
    with lone_launcher_of(key_file, sshd) as (launcher, *workers):
        assert [is_alive(pid) for pid in workers] == [True, True]
        os.kill(launcher, signal.SIGKILL)
        await all_ended(sshd)


@pytest.mark.programs
def test_the_program_of_the_page_runs(key_file: Path, sshd: Sshd, tmp_path: Path) -> None:
    (program,) = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "program.py").write_text(program)
    # An `ssh` whose hosts are this machine.
    (tmp_path / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} {shlex.join(sshd.command[1:])} "$@"\n')
    (tmp_path / "ssh").chmod(0o700)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "AIODAFT_KEY_FILE": str(key_file)}
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")], env=environment, stdout=subprocess.PIPE, text=True, timeout=50
    )
    assert (ended.returncode, ended.stdout) == (0, "1\n")
    asyncio.run(all_ended(sshd))


async def test_a_host_that_cannot_be_reached_is_named_and_the_other_nodes_end(key_file: Path, sshd: Sshd) -> None:
    with pytest.raises(aiodaft.exceptions.LaunchFailed, match="the node nowhere did not come up: .* status 255"):
        async with launch.ssh(["n1", "nowhere"], key_file=key_file, command=sshd.command):
            pass
    await all_ended(sshd)


async def test_a_host_without_that_interpreter_is_named(key_file: Path, sshd: Sshd) -> None:
    with pytest.raises(aiodaft.exceptions.LaunchFailed, match="the node n1 did not come up: .* status 12[67]"):
        async with launch.ssh(["n1"], key_file=key_file, command=sshd.command, python="/no/python"):
            pass
    await all_ended(sshd)


async def test_an_error_has_what_ssh_said(key_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = "ssh: connect to host n1 port 22: No route to host"
    for ending, status in (("exit 255", "ended with status 255"), ("cat >/dev/null", "not all nodes came up")):
        command = ["sh", "-c", f"echo 'a banner\n{refused}' >&2; {ending}"]
        with pytest.raises(aiodaft.exceptions.LaunchFailed, match=f"{status}[^\n]*\n  a banner\n  {refused}$"):
            async with launch.ssh(["n1"], key_file=key_file, command=command, patience=1):
                pass
        assert capsys.readouterr().err == f"a banner\n{refused}\n"


async def test_a_command_that_has_ended_before_it_gets_the_key_is_named(
    key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = asyncio.create_subprocess_exec

    async def start_and_end(*command: Any, **options: Any) -> asyncio.subprocess.Process:
        process = await start(*command, **options)
        assert process.stdin is not None
        while not process.stdin.is_closing():
            await asyncio.sleep(0)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_and_end)
    with pytest.raises(aiodaft.exceptions.LaunchFailed, match="the node n1 did not come up: .* status 3$"):
        async with launch.ssh(["n1"], key_file=key_file, command=["sh", "-c", "exit 3"]):
            pass


async def test_a_command_that_is_missing_is_named(key_file: Path) -> None:
    with pytest.raises(aiodaft.exceptions.LaunchFailed, match="the node n1: no-ssh cannot be started: No such file"):
        async with launch.ssh(["n1"], key_file=key_file, command=["no-ssh"]):
            pass


@pytest.mark.parametrize("patience", [0.1, 0])
async def test_nodes_that_take_too_long_are_given_up(key_file: Path, patience: float) -> None:
    # It never says where it listens, and ends with its standard input.
    with pytest.raises(aiodaft.exceptions.LaunchFailed, match=f"not all nodes came up within {patience} s"):
        async with launch.ssh(["n1"], key_file=key_file, command=["sh", "-c", "cat >/dev/null"], patience=patience):
            pass


async def test_a_command_whose_start_is_cancelled_again_and_again_has_ended_when_that_is_raised(
    key_file: Path, tmp_path: Path
) -> None:
    tasks = TaskOwner("test")
    command = ["sh", "-c", f"echo $$ >{tmp_path}/pid; cat >/dev/null; sleep 0.3; exit 0"]
    starting = tasks.start(StartedNode.start("n1", command, load_identity(key_file), tasks), name="start")
    while not starting.done():
        await asyncio.sleep(0.01)
        starting.cancel()
    assert starting.cancelled()
    assert not is_alive(int((tmp_path / "pid").read_text()))
    await tasks.aclose()


async def test_a_command_that_leaves_its_output_to_others_is_not_waited_for(
    key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiodaft.launch.nodes._PATIENCE", 0.2)
    left = f"sleep 1000 & echo $! >{tmp_path}/pid; cat >/dev/null"
    with pytest.raises(aiodaft.exceptions.LaunchFailed, match=r"not all nodes came up"):
        async with launch.ssh(["n1"], key_file=key_file, command=["sh", "-c", left], patience=3):
            pass
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


@pytest.mark.parametrize("hosts", [[], ["n1", "user@n1"], ["n 1"], "n1"])
async def test_hosts_need_different_names_that_nodes_may_have(key_file: Path, hosts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"different hosts|cannot name a node"):
        async with launch.ssh(hosts, key_file=key_file):
            pass
