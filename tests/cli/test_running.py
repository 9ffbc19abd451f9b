"""Commands that ask a running program: real programs, and real commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from leaks import descendants, open_files

from aiodaft._runtime.platform.meeting_place import VISIT, address

PROGRAM = """
import asyncio, os, aiodaft

class Model(aiodaft.Actor):
    @aiodaft.method
    async def wait(self) -> None:
        await asyncio.Event().wait()

    @aiodaft.method
    async def make(self, size: int) -> bytes:
        return bytes(size)

async def main():
    async with aiodaft.Runtime(preload=(), unhandled="log") as rt:
        first, second = await rt.spawn(Model), await rt.spawn(Model)
        await rt.name(second, "second")
        large = second.make(8 << 20)
        await large.ready()
        waiting = first.wait()
        print(os.getpid(), flush=True)
        await waiting

aiodaft.run(main())
"""

# Runs a command as another user; that one cannot read the modules any more.
AS_NOBODY = """
import os, sys, uvloop
from aiodaft.cli.__main__ import main
from aiodaft.cli.running import stack
os.setuid(65534)
main(sys.argv[1:])
"""

# Waits as a command does, as another user, for a program that is told to connect.
LISTEN_AS_NOBODY = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind("\\0" + sys.argv[1])
    listener.listen(1)
    print("listening", flush=True)
    connection, _ = listener.accept()
    with connection:
        print(connection.recv(1000), flush=True)
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user")


@contextmanager
def running(*arguments: str, code: str = PROGRAM) -> Generator[subprocess.Popen[str]]:
    """A program that has said that it is ready."""
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def program() -> Iterator[subprocess.Popen[str]]:
    with running() as process:
        yield process


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "aiodaft.cli", *arguments]


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=25, check=False)


def fork_server_of(program: subprocess.Popen[str]) -> int:
    return next(
        pid for pid in descendants(program.pid) if f"PPid:\t{program.pid}\n" in Path(f"/proc/{pid}/status").read_text()
    )


def sockets_of(pid: int) -> int:
    return sum(target.startswith("socket:") for target in open_files(pid).values())


def test_the_document_of_stack_has_every_process(program: subprocess.Popen[str]) -> None:
    ended = ran("stack", "--json", "--pid", str(program.pid))
    assert (ended.returncode, ended.stderr) == (0, "")
    ((document),) = json.loads(ended.stdout)
    assert document["pid"] == program.pid
    actors = [process["actors"] for process in document["processes"]]
    assert sorted(actors) == [[], ["Model-1"], ["Model-2"]]
    # A runtime has an id, too, which tells two in one process apart.
    assert json.loads(ran("stack", "--json", "--pid", document["runtime"]).stdout)[0]["pid"] == program.pid


def test_a_trace_is_recorded_of_a_program_that_runs(program: subprocess.Popen[str], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    ended = ran("trace", "--seconds", "0.1", "-o", str(path), "--json", "--pid", str(program.pid))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads(ended.stdout) == {"path": str(path), "left_out": {}, "dropped": {}}
    assert json.loads(path.read_text())["traceEvents"]


def test_a_question_that_fails_says_why(program: subprocess.Popen[str], tmp_path: Path) -> None:
    ended = ran("trace", "-o", str(tmp_path / "none" / "run.json"), "--pid", str(program.pid), "--json")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"aiodaft: the program (pid {program.pid}) has no answer: [Errno 2]" in ended.stderr


def test_a_command_that_is_killed_leaves_nothing_in_the_program(program: subprocess.Popen[str], tmp_path: Path) -> None:
    before, path = sockets_of(program.pid), str(tmp_path / "run.json")
    pid = ("--pid", str(program.pid))
    with subprocess.Popen(command("trace", "--seconds", "60", "-o", path, *pid), stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline().startswith(b"recording")
        while "cannot be recorded: another trace is" not in ran("trace", "--seconds", "0", "-o", path, *pid).stderr:
            pass
        killed.kill()
    # Its trace ends, so that there can be another one.
    while ran("trace", "--seconds", "0", "-o", path, *pid).returncode:
        pass
    assert sockets_of(program.pid) == before


def test_the_stacks_of_a_program_with_a_blocked_loop_are_shown() -> None:
    blocked = PROGRAM.replace("await waiting", "signal.pause()").replace("import asyncio", "import signal, asyncio")
    with running(code=blocked) as program:
        pid = ("--pid", str(program.pid))
        ended = ran("stack", *pid)
        assert "in main\n" in ended.stdout
        assert (ended.returncode, ended.stderr) == (
            1,
            f"aiodaft: the program (pid {program.pid}) does not answer: its event loop is blocked\n",
        )


def test_a_process_that_is_no_program_is_named() -> None:
    for pid in (str(os.getpid()), "controller-none"):
        ended = ran("trace", "--pid", pid)
        assert (ended.returncode, ended.stdout) == (1, "")
        assert f"aiodaft: there is no aiodaft program with actors in process {pid}" in ended.stderr


def test_several_programs_are_listed(program: subprocess.Popen[str]) -> None:
    with running() as other:
        ended = ran("trace")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "there are several programs, say which one:" in ended.stderr
    for one in (program, other):
        assert f"  --pid {one.pid}  " in ended.stderr


def test_a_program_that_is_attached_to_a_node_of_this_machine_is_found(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PROGRAM)
    arguments = [sys.executable, "-m", "aiodaft.cli", "run", "--name", "here", str(tmp_path / "script.py")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as engine:
        try:
            assert engine.stdout is not None
            pid = int(engine.stdout.readline())
            (document,) = json.loads(ran("stack", "--json", "--pid", str(pid)).stdout)
            assert document["runtime"].endswith("@here")
            assert sorted(one["actors"] for one in document["processes"])[-2:] == [["Model-1"], ["Model-2"]]
            ended = ran("trace", "--pid", str(engine.pid))
            assert "a node of a cluster listens at tcp://127.0.0.1:" in ended.stderr
        finally:
            engine.terminate()


@needs_root
def test_another_user_may_not_ask(program: subprocess.Popen[str]) -> None:
    strange = [sys.executable, "-c", AS_NOBODY, "stack", "--pid", str(program.pid)]
    ended = subprocess.run(strange, capture_output=True, text=True, timeout=25)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"process {program.pid} belongs to another user: only root may ask it" in ended.stderr


@needs_root
def test_a_program_does_not_answer_another_user(program: subprocess.Popen[str]) -> None:
    server = fork_server_of(program)
    with running(address(server)[1:], code=LISTEN_AS_NOBODY) as listener:
        os.kill(server, VISIT)
        assert listener.stdout is not None
        assert listener.stdout.readline() == "b''\n"
    assert json.loads(ran("stack", "--json", "--pid", str(program.pid)).stdout)
