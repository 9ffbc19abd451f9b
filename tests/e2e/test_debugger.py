"""Breakpoints in actors: the debugger at a terminal, by `aiodaft debug`, or none."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "support" / "breakpoints.py"
# From Python 3.13 on, a breakpoint stops at its own line, not at the next one.
TO_NEXT_LINE = ("next",) if sys.version_info >= (3, 13) else ()


class Terminal:
    """The user's side of a terminal with a program, or of two pipes."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._seen = ""

    def shows(self, pattern: str) -> re.Match[str]:
        """Wait until something appears behind the text that was matched before."""
        while (found := re.search(pattern, self._seen, re.DOTALL)) is None:
            # The end of the terminal is an error, and a silent one the time limit of the test.
            self._seen += os.read(self._reading, 1 << 16).decode().replace("\r", "")
        self._seen = self._seen[found.end() :]
        return found

    def type(self, *lines: str) -> None:
        os.write(self._writing, "".join(f"{line}\n" for line in lines).encode())

    def end_input(self) -> None:
        """Ctrl-D."""
        os.write(self._writing, b"\4")


@contextmanager
def at_terminal(plan: str) -> Generator[Terminal]:
    """The program, in the foreground of a terminal of its own."""
    ours, theirs = pty.openpty()
    program = subprocess.Popen([sys.executable, PROGRAM, plan], preexec_fn=lambda: os.login_tty(theirs))
    os.close(theirs)
    try:
        yield Terminal(ours, ours)
        assert program.wait(20) == 0
    finally:
        program.kill()
        program.wait()
        os.close(ours)


def test_the_debugger_of_an_actor_opens_at_the_terminal_of_the_program() -> None:
    with at_terminal("steps") as terminal:
        pid = terminal.shows(r"the breakpoint of Stopper.wait of Stopper-1 \(pid (\d+)\) at \S+breakpoints.py:\d+\n")[1]
        terminal.shows(r"\(Pdb\) ")
        terminal.shows("others go on\n")
        terminal.type(*TO_NEXT_LINE, "p doubled, __import__('os').getpid()")
        assert terminal.shows(r"\((\d+), (\d+)\)\n\(Pdb\) ").groups() == ("2", pid)
        terminal.type("doubled = 42", "next")
        terminal.shows(r"-> return doubled\n\(Pdb\) ")
        # A step out of the method leaves the debugger.
        terminal.type("next")
        terminal.shows("wait gave 42\n.*the breakpoint of Stopper.compute of Stopper-2.*\\(Pdb\\) ")
        terminal.type(*TO_NEXT_LINE, "p doubled")
        terminal.shows(r"4\n\(Pdb\) ")
        terminal.type("continue")
        terminal.shows("compute gave 4\n.*the debugger of Stopper.examine of Stopper-2.*\\(Pdb\\) ")
        terminal.type("p number", "quit")
        terminal.shows("NameError.*examine gave examined\n.*the breakpoint of Stopper.wait.*\\(Pdb\\) ")
        terminal.type("quit")
        terminal.shows("wait again gave 6\n")


def test_two_actors_at_breakpoints_are_debugged_one_after_the_other() -> None:
    with at_terminal("two_at_once") as terminal:
        # The second one may come before the prompt of the first.
        waits, opened = "waits until the debugger of another", r"breakpoint of \S+ of (\S+) \(pid \d+\) at \S+:\d+\n>"
        first = terminal.shows(rf"(?=.*{waits})(?=.*{opened}).*\(Pdb\) ")[1]
        terminal.type("continue")
        second = terminal.shows(r"the breakpoint of Stopper.compute of (\S+) .*\(Pdb\) ")[1]
        assert first != second
        # Ctrl-D leaves the debugger as well.
        terminal.end_input()
        terminal.shows(r"both gave \[6, 6\]\n")


@contextmanager
def without_terminal(environ: Mapping[str, str] | None = None) -> Generator[subprocess.Popen[str]]:
    """The program, once it is ready; it begins when it is sent a line."""
    pipe = subprocess.PIPE
    command = [sys.executable, str(PROGRAM), "all_kinds"]
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **(environ or {})}
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        yield program


def test_without_a_terminal_the_call_goes_on_and_a_warning_says_what_to_do() -> None:
    with without_terminal() as program:
        out, err = program.communicate("go\n")
    assert out == "they gave 2 4 examined\n"
    for name in ("wait", "compute", "examine"):
        assert re.search(rf"of Stopper.{name} of Stopper-1 \(pid \d+\) at \S+:\d+ is passed over.*`aiodaft debug`", err)


def test_breakpoints_can_be_turned_off() -> None:
    with without_terminal({"PYTHONBREAKPOINT": "0"}) as program:
        out, err = program.communicate("go\n")
    assert out == "they gave 2 4 examined\n"
    assert "the breakpoint of Stopper.wait" not in err


def test_aiodaft_debug_opens_the_debuggers_of_a_program() -> None:
    pipe = subprocess.PIPE
    with without_terminal() as program:
        command = [sys.executable, "-m", "aiodaft.cli", "debug", "--pid", str(program.pid)]
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, bufsize=0) as debug:
            assert debug.stderr is not None
            assert debug.stderr.readline().startswith("waiting for breakpoints of process")
            again = subprocess.run(command, capture_output=True, text=True, check=False)
            assert again.returncode == 1
            assert "another `aiodaft debug` waits" in again.stderr
            assert program.stdin is not None
            program.stdin.write("go\n")
            program.stdin.flush()
            assert debug.stdout is not None
            assert debug.stdin is not None
            user = Terminal(debug.stdout.fileno(), debug.stdin.fileno())
            user.shows(r"the breakpoint of Stopper.wait of Stopper-1.*\(Pdb\) ")
            user.type("doubled = 5", "c")
            user.shows(r"the breakpoint of Stopper.compute of Stopper-1.*\(Pdb\) ")
            user.type("doubled = 6")
            user.shows(r"\(Pdb\) ")
            # The end of the input leaves the debugger, here and from now on.
            out, err = debug.communicate()
        assert debug.returncode == 0
        assert "the debugger of Stopper.examine of Stopper-1" in out
        assert err == f"process {program.pid} has ended\n"
        assert program.stdout is not None
        assert program.stdout.readline() == "they gave 5 6 examined\n"


# Waits as another user where `aiodaft debug` does, and gives an order to the actor that comes.
ORDER_AS_NOBODY = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind("\\0aiodaft-debug-" + sys.argv[1])
    listener.listen(1)
    print("ready", flush=True)
    actor, _ = listener.accept()
    print(actor.recv(1000), flush=True)
"""

# Comes as another user to `aiodaft debug`, as an actor does.
COME_AS_NOBODY = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as actor:
    actor.connect("\\0aiodaft-debug-" + sys.argv[1])
    try:
        actor.sendall(b"\\33[2J")
        print(actor.recv(1000))
    except ConnectionError:
        print(b"")
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user")


@needs_root
def test_an_actor_of_root_takes_no_orders_from_another_user() -> None:
    with without_terminal() as program:
        listen = [sys.executable, "-c", ORDER_AS_NOBODY, str(program.pid)]
        with subprocess.Popen(listen, stdout=subprocess.PIPE, text=True) as stranger:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "ready\n"
            debug = [sys.executable, "-m", "aiodaft.cli", "debug", "--pid", str(program.pid)]
            refused = subprocess.run(debug, capture_output=True, text=True, check=False)
            assert f"process {stranger.pid} of another user waits for breakpoints" in refused.stderr
            out, err = program.communicate("go\n")
            stranger.kill()
            assert stranger.stdout.read() in {"", "b''\n"}
    assert out == "they gave 2 4 examined\n"
    assert "is passed over" in err


@needs_root
def test_another_user_shows_nothing_at_the_terminal_of_root() -> None:
    pid = str(os.getpid())
    command, pipe = [sys.executable, "-m", "aiodaft.cli", "debug", "--pid", pid], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as debug:
        assert debug.stderr is not None
        debug.stderr.readline()
        stranger = subprocess.run(
            [sys.executable, "-c", COME_AS_NOBODY, pid], capture_output=True, text=True, check=False
        )
        assert (stranger.stdout, stranger.stderr) == ("b''\n", "")
        debug.kill()
        assert debug.communicate()[0] == ""


def test_aiodaft_debug_of_no_process() -> None:
    command = [sys.executable, "-m", "aiodaft.cli", "debug", "--pid", str(1 << 30)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "there is no process" in done.stderr
