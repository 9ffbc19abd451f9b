"""Commands that ask a running program: real programs, and real commands."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from leaks import descendants, open_files
from rich.console import Console

from aiodaft._runtime.platform.linux import VISIT, address, asking
from aiodaft.cli.__main__ import main
from aiodaft.cli.running.looks import top_view

PROGRAM = """
import asyncio, itertools, logging, os, aiodaft

class Model(aiodaft.Actor):
    @aiodaft.method
    async def wait(self) -> None:
        await asyncio.Event().wait()

    @aiodaft.method
    async def make(self, size: int) -> bytes:
        print("made", size, flush=True)
        logging.getLogger("app").warning("large: %d", size)
        return bytes(size)

    @aiodaft.method
    async def count(self) -> None:
        for number in itertools.count():
            print("count", number, flush=True)
            # The test does not read it all: the pipe must have room.
            await asyncio.sleep(0.1)

async def main():
    async with aiodaft.Runtime(preload=(), unhandled="log") as rt:
        first, second = await rt.spawn(Model), await rt.spawn(Model)
        await rt.name(second, "second")
        large = second.make(8 << 20)
        await large.ready()
        waiting, counting = first.wait(), first.count()
        print(os.getpid(), flush=True)
        await waiting

aiodaft.run(main())
"""

# Runs a command as another user; that one cannot read the modules any more.
AS_NOBODY = """
import os, sys, uvloop
from aiodaft.cli.__main__ import main
from aiodaft.cli.running.looks import top_view
from aiodaft.cli.running import actors
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
    print(os.getpid(), flush=True)
    connection, _ = listener.accept()
    with connection:
        print(connection.recv(1000), flush=True)
"""

# A program of another user that looks like one of aiodaft: it has a fork server, itself, and answers with escape codes.
FAKE_AS_NOBODY = """'\x1b[31m'
import json, os, signal, socket, sys
from aiodaft._runtime.platform.linux import VISIT, address, open_board
board = open_board()
os.setuid(65534)
# As an exec does: the kernel then shows its files to its user and to root.
import ctypes; ctypes.CDLL(None).prctl(4, 1)
def visit(*_):
    with socket.socket(socket.AF_UNIX) as command:
        command.connect(address(os.getpid()))
        command.sendall(json.dumps({"id": "x", "node": "x", "listens": "", "attached": 0}).encode() + b"\\n")
        command.recv(1000)
        command.sendall(json.dumps(["failed", "no \\x1b]0;owned\\x07"]).encode() + b"\\n")
        command.recv(1000)
signal.signal(VISIT, visit)
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""

pytestmark = pytest.mark.timeout(180)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user")


@contextmanager
def running(*arguments: str, code: str = PROGRAM) -> Generator[subprocess.Popen[str]]:
    """A program that has said that it is ready."""
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_ready(process)
            yield process
        finally:
            process.kill()


def wait_ready(process: subprocess.Popen[str]) -> int:
    """Wait until a program says its pid, among the output of its actors."""
    assert process.stdout is not None
    while not (line := process.stdout.readline()).strip().isdecimal():
        assert line
    return int(line)


@pytest.fixture(scope="module")
def program() -> Iterator[subprocess.Popen[str]]:
    with running() as process:
        yield process


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "aiodaft.cli", *arguments]


@contextmanager
def started(*arguments: str, stderr: int | None = None) -> Generator[subprocess.Popen[bytes]]:
    """A command that goes on by itself, for the time of the block."""
    with subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=stderr) as process:
        try:
            yield process
        finally:
            process.kill()


def ran(*arguments: str, typed: str | None = None) -> Result:
    """A command that has ended; in this process, which is as good and quick to start."""
    return CliRunner().invoke(main, arguments, input=typed, env={"AIODAFT_ADDRESS": None})


def fork_server_of(program: subprocess.Popen[str]) -> int:
    return next(
        pid for pid in descendants(program.pid) if f"PPid:\t{program.pid}\n" in Path(f"/proc/{pid}/status").read_text()
    )


def sockets_of(pid: int) -> int:
    return sum(target.startswith("socket:") for target in open_files(pid).values())


def test_the_document_of_stack_has_every_process(program: subprocess.Popen[str]) -> None:
    ended = ran("stack", "--json", "--pid", str(program.pid))
    assert (ended.exit_code, ended.stderr) == (0, "")
    ((document),) = json.loads(ended.stdout)
    assert document["pid"] == program.pid
    actors = [process["actors"] for process in document["processes"]]
    assert sorted(actors) == [[], ["Model-1"], ["Model-2"]]
    # A runtime has an id, too, which tells two in one process apart.
    assert json.loads(ran("stack", "--json", "--pid", document["runtime"]).stdout)[0]["pid"] == program.pid


def test_ps_shows_the_actors_of_a_program(program: subprocess.Popen[str]) -> None:
    ended = ran("ps", "--pid", str(program.pid))
    assert (ended.exit_code, ended.stderr) == (0, "")
    title, first, second = ended.stdout.splitlines()
    assert title.startswith(f"pid {program.pid}: ")
    assert first.endswith(": Model-1")
    assert second.endswith(": Model-2, named second")
    ((document),) = json.loads(ran("ps", "--pid", str(program.pid), "--json").stdout)["programs"]
    assert [process["names"] for process in document["processes"]] == [[], ["second"]]


def test_top_shows_what_the_overview_has(program: subprocess.Popen[str]) -> None:
    shown = ran("top", "--once", "--interval", "0.2", "--pid", str(program.pid)).stdout
    title, totals, head, controller, first, second = shown.splitlines()
    assert title.startswith(f"pid {program.pid}: ")
    assert totals.startswith("2 actors  3 processes  ")
    assert totals.endswith("  0 queued  8 MiB stored")
    assert head.split() == [
        "actor",
        "state",
        "runs",
        "calls/s",
        "failed",
        "queued",
        "pid",
        "cpu",
        "memory",
        "stored",
        "out/s",
        "in/s",
    ]
    assert controller.split()[:3] == ["the", "controller", str(program.pid)]
    assert first.split()[:4] == ["Model-1", "busy", "Model.wait", "+1"]
    assert second.split()[:4] == ["Model-2", "second", "idle", "0"]
    document = json.loads(ran("top", "--json", "--interval", "0.2", "--pid", str(program.pid)).stdout)
    assert {actor["name"] for actor in document["actors"]} == {"Model-1", "Model-2"}
    assert set(document["rates"]["actors"]) == {"Model-1", "Model-2"}
    assert document["rates"]["seconds"] >= 0.2


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (110, "actor state runs calls/s failed queued pid cpu memory stored out/s in/s"),
        (80, "actor state runs calls/s failed queued cpu memory"),
        (60, "actor state runs calls/s queued"),
        (40, "actor state calls/s"),
    ],
)
def test_top_leaves_out_what_a_narrow_terminal_has_no_room_for(width: int, columns: str) -> None:
    actor = {
        "name": "Trainer-1", "names": [], "class_name": "Trainer", "state": "restarting", "process": "worker-1",
        "running": ["Trainer.train_one_epoch"], "running_besides": 0, "failed": 3, "queued": 12,
    }  # fmt: skip
    process = {
        "id": "worker-1", "title": "Trainer-1", "role": "worker", "pid": 123_456, "answered": True, "rss": 123 << 20,
        "stored_bytes": 10 << 20,
    }  # fmt: skip
    rate = {"cpu": 0.5, "sent": 10 << 20, "received": 99 << 20}
    rates = {"actors": {"Trainer-1": {"calls": 1234}}, "processes": {"worker-1": rate}, "calls": 1234, "bytes": 1}
    look = {"actors": [actor], "processes": [process], "nodes": [], "failures": [], "rates": rates}
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(top_view("a program", look, 20))
    *_, head, row = console.export_text().splitlines()
    assert head.split() == columns.split()
    assert len(row.rstrip()) <= width
    assert row.startswith("Trainer-1  restarting  ")
    assert " 1,234" in row


def test_memory_shows_who_stores_and_who_holds_what(program: subprocess.Popen[str]) -> None:
    shown = ran("memory", "--pid", str(program.pid)).stdout.splitlines()
    assert shown[-2].split() == ["value", "stored", "by", "held", "by", "size", "readers"]
    assert shown[-1].split() == ["Model.make", "Model-2", "the", "controller", "8", "MiB", "0"]
    document = json.loads(ran("memory", "--json", "--pid", str(program.pid)).stdout)
    assert [(value["label"], value["nbytes"] >= 8 << 20) for value in document["stored"]] == [("Model.make", True)]


def test_logs_shows_what_actors_print_and_log(program: subprocess.Popen[str]) -> None:
    pid = ("--pid", str(program.pid))
    printed, logged = sorted(ran("logs", "second", *pid).stdout.splitlines(), key=lambda line: "WARNING" in line)
    assert re.fullmatch(r"\d\d:\d\d:\d\d \(Model-2 pid=\d+\) made 8388608", printed)
    assert re.fullmatch(r"\d\d:\d\d:\d\d \(Model-2 pid=\d+\) WARNING app: large: 8388608", logged)
    (document,) = [one for one in json.loads(ran("logs", "Model-2", "--json", *pid).stdout) if "level" in one]
    assert (document["level"], document["method"], document["actor"]) == ("WARNING", "Model.make", "Model-2")
    missing = ran("logs", "nobody", *pid)
    assert (missing.exit_code, missing.stdout) == (1, "")
    assert missing.stderr == "aiodaft: there is no actor 'nobody'; there are: Model-1, Model-2 second\n"
    with started("logs", "-f", "nobody", *pid, stderr=subprocess.PIPE) as following:
        assert following.stderr is not None
        assert following.stderr.readline() == missing.stderr.replace("\n", ": waiting for it\n").encode()
        following.send_signal(signal.SIGINT)
        assert following.wait(20) == 0
    with started("logs", "-f", "-n", "0", "--json", *pid) as following:
        assert following.stdout is not None
        one, two = (json.loads(following.stdout.readline()) for _ in range(2))
        following.send_signal(signal.SIGINT)
        assert following.wait(20) == 0
    first, second = (int(line["message"].removeprefix("count ")) for line in (one, two))
    assert second == first + 1


def test_top_draws_on_a_terminal_until_the_program_ends() -> None:
    primary, secondary = pty.openpty()
    with running() as program:
        arguments = command("top", "--interval", "0.1", "--pid", str(program.pid))
        drawn = b""
        with subprocess.Popen(arguments, stdout=secondary, stderr=subprocess.PIPE, text=True) as drawing:
            os.close(secondary)
            # Drawn more than once on the other screen of the terminal.
            while drawn.count(b"Model-2") < 3:
                drawn += os.read(primary, 4096)
            program.send_signal(signal.SIGSTOP)
            while b"(no answer for 2 s)" not in drawn:
                drawn += os.read(primary, 4096)
            program.kill()
            with suppress(OSError):
                while data := os.read(primary, 4096):
                    drawn += data
            assert drawing.stderr is not None
            assert drawing.stderr.read() == f"aiodaft: the program (pid {program.pid}) has ended\n"
    os.close(primary)
    assert drawing.returncode == 0
    enter, leave = b"\x1b[?1049h", b"\x1b[?1049l"
    assert drawn.count(enter) == drawn.count(leave) == 1


def test_an_actor_is_killed_after_a_question() -> None:
    with running() as program:
        pid = ("--pid", str(program.pid))
        unknown = ran("kill", "Model", "--yes", *pid)
        assert (unknown.exit_code, unknown.stdout) == (1, "")
        assert unknown.stderr == "aiodaft: there is no actor 'Model'; there are: Model-1, Model-2 second\n"
        unanswered = ran("kill", "second", *pid)
        assert unanswered.exit_code == 1
        assert "kill Model-2 (pid " in unanswered.stderr
        answered = ran("kill", "second", *pid, typed="y\n")
        assert answered.exit_code == 0
        assert answered.stdout.startswith("killed Model-2 (pid ")
        assert json.loads(ran("kill", "Model-1", "--yes", "--json", *pid).stdout)["killed"] == ["Model-1"]
        # A call was under way.
        assert program.stderr is not None
        assert "killed by `aiodaft kill`" in program.stderr.read()
        assert program.wait(20) == 1


def test_a_trace_is_recorded_of_a_program_that_runs(program: subprocess.Popen[str], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    ended = ran("trace", "--seconds", "0.1", "-o", str(path), "--json", "--pid", str(program.pid))
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert json.loads(ended.stdout) == {"path": str(path), "left_out": {}, "dropped": {}}
    assert json.loads(path.read_text())["traceEvents"]


def test_a_question_that_fails_says_why(program: subprocess.Popen[str], tmp_path: Path) -> None:
    nowhere = ran("trace", "-o", str(tmp_path / "none" / "run.json"), "--pid", str(program.pid))
    assert (nowhere.exit_code, nowhere.stdout) == (1, "")
    assert nowhere.stderr.endswith(f"cannot be written: there is no folder {tmp_path / 'none'}\n")
    ended = ran("trace", "--seconds", "0", "-o", "/proc/run.json", "--pid", str(program.pid), "--json")
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert f"aiodaft: the program (pid {program.pid}) has no answer: [Errno 2]" in ended.stderr


def test_a_command_that_is_killed_leaves_nothing_in_the_program(program: subprocess.Popen[str], tmp_path: Path) -> None:
    before, path = sockets_of(program.pid), str(tmp_path / "run.json")
    pid = ("--pid", str(program.pid))
    with (
        started("top", "--interval", "0.1", *pid) as watching,
        started("logs", "--follow", *pid) as following,
        started("trace", "--seconds", "60", "-o", path, *pid) as recording,
    ):
        # In a pipe, look after look.
        for process, line in ((watching, b"Model-1"), (following, b""), (recording, b"recording")):
            assert process.stdout is not None
            while not process.stdout.readline().startswith(line):
                pass
        while "cannot be recorded: another trace is" not in ran("trace", "--seconds", "0", "-o", path, *pid).stderr:
            pass
    # Its trace ends, so that there can be another one.
    while ran("trace", "--seconds", "0", "-o", path, *pid).exit_code:
        pass
    # The program closes the socket of a command after the command has its answer.
    while sockets_of(program.pid) != before:
        pass


def test_the_stacks_of_a_program_with_a_blocked_loop_are_shown() -> None:
    blocked = PROGRAM.replace("await waiting", "signal.pause()").replace("import asyncio", "import signal, asyncio")
    with running(code=blocked) as program:
        pid = ("--pid", str(program.pid))
        ended = ran("stack", *pid)
        assert "in main\n" in ended.stdout
        assert (ended.exit_code, ended.stderr) == (
            1,
            f"aiodaft: the program (pid {program.pid}) does not answer: its event loop is blocked\n",
        )


def test_a_process_that_is_no_program_is_named() -> None:
    for pid in (str(os.getpid()), "controller-none"):
        ended = ran("trace", "--pid", pid)
        assert (ended.exit_code, ended.stdout) == (1, "")
        assert f"aiodaft: there is no aiodaft program with actors in process {pid}" in ended.stderr


def test_several_programs_are_listed(program: subprocess.Popen[str]) -> None:
    with running() as other:
        ended = ran("trace")
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert "there are several programs, say which one:" in ended.stderr
    for one in (program, other):
        assert f"  --pid {one.pid}  " in ended.stderr


def test_a_program_that_is_attached_to_a_node_of_this_machine_is_found(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PROGRAM)
    arguments = [sys.executable, "-m", "aiodaft.cli", "run", "--name", "here", str(tmp_path / "script.py")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as engine:
        try:
            pid = wait_ready(engine)
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
    ended = subprocess.run(strange, capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"process {program.pid} belongs to another user: only root may ask it" in ended.stderr


@needs_root
def test_a_program_does_not_answer_another_user(program: subprocess.Popen[str]) -> None:
    server = fork_server_of(program)
    with running("of a stranger", code=LISTEN_AS_NOBODY) as listener, asking(server, "\0of a stranger"):
        os.kill(server, VISIT)
        assert listener.stdout is not None
        assert listener.stdout.readline() == "b''\n"
    assert json.loads(ran("stack", "--json", "--pid", str(program.pid)).stdout)


@needs_root
def test_another_user_cannot_take_the_place_where_commands_listen(program: subprocess.Popen[str]) -> None:
    server = fork_server_of(program)
    assert json.loads(ran("stack", "--json", "--pid", str(program.pid)).stdout)
    with running(address(server)[1:], code=LISTEN_AS_NOBODY):
        assert json.loads(ran("stack", "--json", "--pid", str(program.pid)).stdout)
    # The place is written where that user cannot read it.
    looking = f"import os; os.setuid(65534); os.listdir('/proc/{server}/fd')"
    refused = subprocess.run([sys.executable, "-c", looking], capture_output=True, text=True, check=False)
    assert "PermissionError" in refused.stderr


@needs_root
def test_what_a_program_of_another_user_says_is_shown_to_root_only_if_asked_for_and_escaped() -> None:
    with running("aiodaft._runtime.node.forkserver", code=FAKE_AS_NOBODY) as fake:
        pid = str(fake.pid)
        assert pid not in ran("ps").stdout
        shown = ran("ps", "--pid", pid).stdout
        assert f"pid {pid}: " in shown
        assert "\\x1b[31m" in shown
        assert "has no answer: no \\x1b]0;owned\\x07" in shown
        assert "\x1b" not in shown
