"""Finds the running programs of this machine, and asks them; see `_runtime/diagnostics/attach.py`."""

from __future__ import annotations

import asyncio
import os
import pwd
import re
import shlex
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, suppress
from typing import Any, Final, NamedTuple

import click
from click.shell_completion import CompletionItem

from aiodaft._runtime.diagnostics.attach import END, FAILED, ITEM, Messages, encoded
from aiodaft._runtime.diagnostics.await_chains import offers_dump
from aiodaft._runtime.platform.capabilities import can_be_asked, missing
from aiodaft._runtime.platform.linux import VISIT, asking, other_end
from aiodaft.cli.options import Failed, completing, escaped

Plain = Mapping[str, Any]

# Seconds until a program connects: its event loop may be busy.
_PATIENCE: Final = 5.0
# The same for a program that is attached to a node which has connected.
_ATTACHED_PATIENCE: Final = 2.0
_PAUSE: Final = 0.05
_BACKLOG: Final = 64
_FORK_SERVER: Final = b"aiodaft._runtime.node.forkserver"
_ROOT: Final = 0
_SHOWN: Final = 100


class ProgramEnded(Failed):
    """The program has ended while it was asked."""


class Program:
    """A running program, which answers this command.

    Attributes:
        listens: Its address, if this is no program but a node of a cluster; "" otherwise.
        leads_to: The number of processes that its fork server leads to; 0 if that is the one of a node.
    """

    def __init__(self, connection: socket.socket, messages: Messages, greeting: dict[str, Any]) -> None:
        self._connection = connection
        self._messages = messages
        self.pid, uid = other_end(connection)
        self._of_another_user = uid != os.geteuid()
        self.id: str = escaped(greeting["id"])
        self.listens: str = escaped(greeting["listens"])
        self.leads_to: int = 1 + greeting["attached"] if greeting["id"] == greeting["node"] else 0

    async def ask(self, question: str, **arguments: Any) -> AsyncGenerator[Any, None]:
        """The items of its answer.

        Raises:
            ProgramEnded: It has ended.
            Failed: It has no answer; the message says why.
        """
        with suppress(ConnectionError):
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(self._connection, encoded((question, arguments)))
        while (message := await self._messages.receive()) is not None:
            kind, value = message
            if self._of_another_user:
                value = escaped(value)
            if kind == ITEM:
                yield value
            elif kind == FAILED:
                raise Failed(f"the program (pid {self.pid}) has no answer: {value}")
            elif kind == END:
                return
        raise ProgramEnded(f"the program (pid {self.pid}) has ended")

    async def answer(self, question: str, **arguments: Any) -> Any:
        async with aclosing(self.ask(question, **arguments)) as items:
            (item,) = [item async for item in items]
            return item


class Silent(NamedTuple):
    pid: int
    why: str

    def __str__(self) -> str:
        return f"the program (pid {self.pid}) does not answer: {self.why}"


class Found(NamedTuple):
    """The programs and nodes on this machine.

    Attributes:
        silent: The programs that do not answer.
    """

    programs: Sequence[Program]
    nodes: Sequence[str]
    silent: Sequence[Silent]


@asynccontextmanager
async def programs(wanted: str | None) -> AsyncGenerator[Found, None]:
    """The programs of this user, for the time of the block.

    Args:
        wanted: The pid of a program, which root may ask whosever it is, or the id of one of its runtimes; None for all.

    Raises:
        Failed: The process belongs to another user, or this system has no way to programs.
    """
    check_can_ask()
    pid = int(wanted) if wanted is not None and wanted.isdecimal() else 0
    # Programs of others are asked by root alone, which names them: they may be made to look like one.
    user = check_may_ask(pid) if pid else os.geteuid()
    servers = [server for server in _fork_servers() if server.uid == user]
    leading = [server for server in servers if wanted == str(server.program)]
    # A program that is attached to a cluster has no fork server: that of its node leads to it. So may any.
    searching = wanted is not None and not leading
    if not leading and (not pid or _status(pid)):
        leading = servers
    silent: list[Silent] = []
    patience = _ATTACHED_PATIENCE if searching else _PATIENCE
    with ExitStack() as opened:
        visits = await asyncio.gather(*(_visit(server, opened, patience, silent) for server in leading))
        answering = [program for visited in visits for program in visited]
        nodes = [one.listens for one in answering if one.listens]
        chosen = [one for one in answering if not one.listens and wanted in {None, str(one.pid), one.id}]
        if searching:
            # Others are not meant. One that is attached to a node does not count for its fork server.
            silent = [] if chosen or not offers_dump(pid) else [_silent(pid)]
        yield Found(chosen, nodes, silent)


@asynccontextmanager
async def one_program(wanted: str | None) -> AsyncGenerator[Program, None]:
    """The program that is wanted, or the only one that this user may ask, for the time of the block.

    Raises:
        Failed: There is none, or there are several, which the message lists.
    """
    async with programs(wanted) as found:
        if not found.programs:
            raise Failed(say_what_there_is(found, wanted))
        if len(found.programs) + len(found.silent) > 1:
            pids = Counter(program.pid for program in found.programs)
            listed = [
                f"  --pid {program.pid if pids[program.pid] == 1 else program.id}  {command_of(program.pid)}"
                for program in found.programs
            ]
            listed += [f"  --pid {silent.pid}  {command_of(silent.pid)} ({silent.why})" for silent in found.silent]
            raise Failed("\n".join(["there are several programs, say which one:", *listed]))
        yield found.programs[0]


def say_what_there_is(found: Found, wanted: str | None) -> str:
    if found.silent:
        return "\n".join(map(str, found.silent))
    where = "on this machine" if wanted is None else f"in process {wanted}"
    nodes = [f"a node of a cluster listens at {listens}: see `aiodaft ps {listens}`" for listens in found.nodes]
    return "\n".join([f"there is no aiodaft program with actors {where}", *nodes])


def command_of(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read().decode(errors="replace").rstrip("\0").split("\0")
        shown: str = escaped(" ".join(shlex.join(words).split())[:_SHOWN])
        return shown
    return ""


def _complete_pid(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    servers = _fork_servers() if can_be_asked() else []
    pids = {server.program for server in servers if server.uid == os.geteuid()}
    return [CompletionItem(str(pid), help=command_of(pid)) for pid in sorted(pids) if str(pid).startswith(incomplete)]


pid_option: Final = click.option(
    "--pid",
    metavar="PID",
    shell_complete=_complete_pid,
    help="The program, or the id of one of its runtimes.  [default: the only one of this user]",
)


def check_can_ask() -> None:
    if not can_be_asked():
        raise Failed(f"this system lacks a function that this command needs: {missing()['commands']}")


def check_may_ask(pid: int) -> int:
    """The user of a process, that of this command if it is gone.

    Raises:
        Failed: This user may not ask it.
    """
    uid = _uid_of(_status(pid), os.geteuid())
    if os.geteuid() not in {uid, _ROOT}:
        user = "root"
        with suppress(KeyError):
            user = pwd.getpwuid(uid).pw_name
        users = " or ".join(dict.fromkeys([user, "root"]))
        raise Failed(f"process {pid} belongs to another user: only {users} may ask it")
    return uid


class _Server(NamedTuple):
    """A fork server: its process, its user, and the process that has started it."""

    pid: int
    uid: int
    program: int


async def _visit(server: _Server, opened: ExitStack, patience: float, silent: list[Silent]) -> list[Program]:
    """Have the node behind a fork server, and the programs that are attached to it, connect to this command."""
    found: list[Program] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.setblocking(False)
        place = f"\0aiodaft-command-{os.urandom(8).hex()}"
        listener.bind(place)
        listener.listen(_BACKLOG)
        try:
            async with asyncio.timeout(patience) as timeout, _alone(server.pid, place):
                os.kill(server.pid, VISIT)
                expected = 0
                while not expected or len(found) < expected:
                    program = await _accepted(listener, server, opened)
                    found.append(program)
                    if program.leads_to:
                        expected = program.leads_to
                        timeout.reschedule(asyncio.get_running_loop().time() + _ATTACHED_PATIENCE)
        except (ProcessLookupError, FileNotFoundError):
            pass
        except TimeoutError:
            if not found:
                silent.append(_silent(server.program))
    return found


def _silent(pid: int) -> Silent:
    is_stopped = _status(pid).get("State", "")[:1] == "T"
    return Silent(pid, "it is stopped" if is_stopped else "its event loop is blocked")


@asynccontextmanager
async def _alone(server: int, place: str) -> AsyncGenerator[None]:
    """Be the only command that asks what a fork server leads to; raises as `asking` does."""
    with ExitStack() as stack:
        while True:
            with suppress(BlockingIOError):
                stack.enter_context(asking(server, place))
                break
            await asyncio.sleep(_PAUSE)
        yield


async def _accepted(listener: socket.socket, server: _Server, opened: ExitStack) -> Program:
    loop = asyncio.get_running_loop()
    while True:
        connection, _ = await loop.sock_accept(listener)
        opened.enter_context(connection)
        messages = Messages(connection)
        if (
            other_end(connection).uid in {server.uid, os.geteuid()}
            and (greeting := await messages.receive()) is not None
        ):
            return Program(connection, messages, greeting)


def _fork_servers() -> list[_Server]:
    found: list[_Server] = []
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        with suppress(OSError, KeyError):
            status = _status(pid)
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read()
            # Forked workers have the same command line. The signal ends a process that does not catch it.
            if _FORK_SERVER in command and int(status["SigCgt"], 16) >> (VISIT - 1) & 1:
                found.append(_Server(pid, _uid_of(status), int(status["PPid"])))
    return found


def _uid_of(status: dict[str, str], default: int = -1) -> int:
    return int(status["Uid"].split()[1]) if "Uid" in status else default


def _status(pid: int) -> dict[str, str]:
    with suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        return {key: value.strip() for key, _, value in (line.partition(":") for line in file)}
    return {}


def names_of(actor: Plain) -> list[str]:
    return [actor["name"], *actor["names"]]


def natural(name: str) -> list[tuple[int, str]]:
    """Orders names with numbers as people do: Model-2 before Model-10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


_LISTED: Final = 20


@completing
async def complete_actor(context: click.Context) -> list[str]:
    async with one_program(context.params.get("pid")) as program:
        return [name for actor in (await program.answer("overview"))["actors"] for name in names_of(actor)]


def called(actors: Sequence[Plain], name: str) -> list[Plain]:
    return [actor for actor in actors if name in names_of(actor)]


def no_actor(actors: Sequence[Plain], name: str) -> Failed:
    names = sorted((" ".join(names_of(actor)) for actor in actors), key=natural)
    more = [f"and {len(names) - _LISTED} more"] if len(names) > _LISTED else []
    return Failed(f"there is no actor {name!r}; there are: {', '.join([*names[:_LISTED], *more]) or 'none'}")
