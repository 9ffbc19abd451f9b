"""Commands on the actors of a running program: `aiodaft logs`, `stack`, `trace`, `debug` and `kill`."""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from datetime import datetime
from functools import partial
from textwrap import indent
from typing import Any, Final

import click

from aiodaft._protocol.diagnostics.printing import member_of
from aiodaft._runtime.diagnostics.await_chains import take_dump
from aiodaft._runtime.platform.linux import debug_address, other_end
from aiodaft.cli.options import FAILED, Failed, Output, json_option, print_json, seconds
from aiodaft.cli.running.programs import (
    Program,
    ProgramEnded,
    Silent,
    called,
    check_can_ask,
    check_may_ask,
    complete_actor,
    no_actor,
    one_program,
    pid_option,
    programs,
    say_what_there_is,
)
from aiodaft.program import run


@click.command()
@click.argument("actor", required=False, shell_complete=complete_actor)
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines, until Ctrl-C or the end of the program.")
@click.option("-n", "--lines", "last", type=click.IntRange(0), default=100, show_default=True, help="The last lines.")
@pid_option
@json_option
def logs(actor: str | None, follow: bool, last: int, pid: str | None, as_json: bool) -> int:
    """Show the output and the log records of actors.

    ACTOR: its name, or that of its group; by default all actors. With --follow, --json prints an object in each line.
    """
    try:
        run(_show_lines(pid, actor, last, follow=follow, as_json=as_json))
    except ProgramEnded as error:
        if not follow:
            raise
        click.echo(f"aiodaft: {error.message}", err=True)
    except KeyboardInterrupt:
        if not follow:
            raise
    return 0


async def _show_lines(pid: str | None, actor: str | None, last: int, *, follow: bool, as_json: bool) -> None:
    found: list[Any] = []
    async with one_program(pid) as program:
        actors = [] if actor is None else (await program.answer("overview"))["actors"]
        name = None if actor is None else _name_in_errors(actors, actor)
        if actor is not None and follow and not _is_there(actors, actor):
            click.echo(f"aiodaft: {no_actor(actors, actor).message}: waiting for it", err=True)
        async with aclosing(program.ask("logs", actor=name, last=last, follow=follow)) as items:
            async for item in items:
                if isinstance(item, int):
                    click.echo(f"aiodaft: {item} lines were left out: they are read too slowly", err=True)
                elif follow:
                    click.echo(item if as_json else _text_of(json.loads(item)))
                else:
                    found.append(json.loads(item))
    if actor is not None and last and not follow and not found and not _is_there(actors, actor):
        raise no_actor(actors, actor)
    if as_json and not follow:
        print_json(found)
    for one in [] if as_json else found:
        click.echo(_text_of(one))


def _name_in_errors(actors: Sequence[Mapping[str, Any]], name: str) -> str:
    """The name of an actor in errors, as in its output; an actor that is gone has no other name."""
    return next((actor["name"] for actor in actors if name in actor["names"]), name)


def _is_there(actors: Sequence[Mapping[str, Any]], name: str) -> bool:
    groups = {member.group for actor in actors if (member := member_of(actor["name"]))}
    return name in groups or bool(called(actors, name))


def _text_of(said: dict[str, Any]) -> str:
    at = datetime.fromisoformat(said["time"]).astimezone()
    level = f"{said['level']} {said['logger']}: " if "level" in said else ""
    text = f"{at:%H:%M:%S} ({said['actor']} pid={said['pid']}) {level}{said['message']}"
    return "\n".join(filter(None, [text, said.get("error")]))


@click.command()
@pid_option
@json_option
def stack(pid: str | None, as_json: bool) -> int:
    """Show the stacks of processes, and the calls they wait for.

    Without --pid, of all programs of this user.
    """
    return run(_show_stacks(pid, as_json=as_json))


async def _show_stacks(pid: str | None, *, as_json: bool) -> int:
    async with programs(pid) as found:
        shown: list[Any] = []
        problems: list[str] = []
        for program in found.programs:
            try:
                shown.append(await _stacks_of(program, as_json=as_json))
            except Failed as error:
                problems.append(error.message)
    for silent in found.silent:
        shown += await _dump_of(silent, as_json=as_json)
        problems.append(str(silent))
    if not shown:
        raise Failed("\n".join(problems) or say_what_there_is(found, pid))
    if as_json:
        print_json(shown)
    else:
        click.echo("\n".join(shown))
    for problem in problems:
        click.echo(f"aiodaft: {problem}", err=True)
    return FAILED if problems else 0


async def _stacks_of(program: Program, *, as_json: bool) -> Any:
    stacks = await program.answer("stack", as_json=as_json)
    return {"pid": program.pid, "runtime": program.id, **stacks} if as_json else stacks


async def _dump_of(silent: Silent, *, as_json: bool) -> list[Any]:
    """The threads of a program whose event loop is blocked; nothing if it is stopped."""
    dump = await take_dump(silent.pid, partial(os.kill, silent.pid))
    if not dump:
        return []
    text = f"the controller (pid {silent.pid}) does not answer\n{indent(dump.rstrip(), '    ')}"
    return [{"pid": silent.pid, "dump": dump} if as_json else text]


@click.command()
@click.option(
    "-o", "--output", "path", type=click.Path(dir_okay=False), default="trace.json", show_default=True, help="The file."
)
@click.option("--seconds", "length", type=seconds(), default=5.0, show_default=True)
@click.option(
    "--limit", type=click.IntRange(1), default=100_000, show_default=True, help="Events that a process keeps."
)
@pid_option
@json_option
def trace(path: str, length: float, limit: int, pid: str | None, as_json: bool) -> None:
    """Record the work of a program, for ui.perfetto.dev.

    The program writes the file. If this command is ended, the file has the events until then.
    """
    path = os.path.abspath(path)
    if not os.path.isdir(folder := os.path.dirname(path)):
        # It would be known when all has been recorded.
        raise Failed(f"{path} cannot be written: there is no folder {folder}")
    run(_record(path, length, limit, pid, Output(as_json=as_json)))


async def _record(path: str, length: float, limit: int, pid: str | None, output: Output) -> None:
    async with (
        one_program(pid) as program,
        aclosing(program.ask("trace", path=path, seconds=length, limit=limit)) as items,
    ):
        await anext(items)
        output.line(f"recording pid {program.pid} for {length:g} s ...")
        found = output.document = await anext(items)
    output.line(f"{found['path']}: drop it on https://ui.perfetto.dev")
    for actor, why in found["left_out"].items():
        output.line(f"it lacks the events of {actor}: {why}")
    for actor, count in found["dropped"].items():
        output.line(f"it lacks the last {count:,} events of {actor}: raise --limit")
    output.end()


_READ_SIZE: Final = 64 << 10
_BACKLOG: Final = 4096


@click.command()
@click.option("--pid", type=int, help="A program, or one of its actors.  [default: all programs of this user]")
def debug(pid: int | None) -> int:
    """Open the debugger here when an actor comes to a breakpoint.

    It waits until Ctrl-C, or until the process ends. Of several actors at breakpoints, one is debugged after the other.
    """
    check_can_ask()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        whose = "all programs of this user" if pid is None else f"process {pid}"
        process = _opened(pid)
        user = os.geteuid() if pid is None else check_may_ask(pid)
        _bind(listener, debug_address(pid), whose)
        listener.listen(_BACKLOG)
        click.echo(f"waiting for breakpoints of {whose}; Ctrl-C ends this", err=True)
        watched: list[socket.socket | int] = [listener, *process]
        while listener in select.select(watched, [], [])[0]:
            connection, _ = listener.accept()
            with connection:
                if other_end(connection).uid == user:
                    _debug(connection)
        click.echo(f"{whose} has ended", err=True)
    return 0


def _bind(listener: socket.socket, address: str, whose: str) -> None:
    try:
        listener.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        who = "another process"
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as question:
            question.setblocking(False)
            question.connect(address)
            holder = other_end(question)
            who = "another `aiodaft debug`" if holder.uid == os.geteuid() else f"process {holder.pid} of another user"
        raise Failed(f"{who} waits for breakpoints of {whose}") from None


def _opened(pid: int | None) -> list[int]:
    if pid is None:
        return []
    try:
        return [os.pidfd_open(pid)]
    except OSError as error:
        raise Failed(f"there is no process {pid}: {error.strerror}") from None


def _debug(connection: socket.socket) -> None:
    watched: list[socket.socket | int] = [connection, sys.stdin.fileno()]
    with suppress(ConnectionError):
        while True:
            ready, _, _ = select.select(watched, [], [])
            if connection in ready:
                shown = connection.recv(_READ_SIZE)
                if not shown:
                    return
                sys.stdout.buffer.write(shown)
                sys.stdout.flush()
            elif typed := os.read(sys.stdin.fileno(), _READ_SIZE):
                connection.sendall(typed)
            else:
                # The end of the input, or Ctrl-D: the call goes on.
                connection.shutdown(socket.SHUT_WR)
                watched.pop()


@click.command()
@click.argument("actor", shell_complete=complete_actor)
@click.option("--yes", is_flag=True, help="Do not ask.")
@pid_option
@json_option
def kill(actor: str, yes: bool, pid: str | None, as_json: bool) -> None:
    """Kill an actor of a program, with its process.

    ACTOR: its name; `aiodaft ps` shows it. As `rt.kill`: calls under way fail with ActorDied, and it is not restarted.
    """
    run(_kill(actor, pid, Output(as_json=as_json), ask=not yes))


async def _kill(name: str, pid: str | None, output: Output, *, ask: bool) -> None:
    async with one_program(pid) as program:
        look = await program.answer("overview")
        actor = _one_of(look["actors"], name)
        (process,) = (one for one in look["processes"] if one["id"] == actor["process"])
        victims = f"{' and '.join(process['actors'])} (pid {process['pid'] or '?'} on {process['node']})"
        if ask:
            click.confirm(f"kill {victims}?", abort=True, err=True)
        await program.answer("kill", process=process["id"])
        output.document = {"killed": process["actors"], "pid": process["pid"], "node": process["node"]}
        output.line(f"killed {victims}")
        output.end()


def _one_of(actors: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    found = called(actors, name)
    if not found:
        raise no_actor(actors, name)
    if len(found) > 1:
        where = ", ".join(f"pid {actor['pid'] or '?'} on {actor['node']}" for actor in found)
        raise Failed(
            f"{len(found)} actors are called {name!r}: {where}. Kill one by a name that `rt.name` has given it"
        )
    if not found[0]["process"]:
        state = "dead" if found[0]["state"] == "dead" else "being restarted"
        raise Failed(f"{name} has no process: it is {state}")
    return found[0]
