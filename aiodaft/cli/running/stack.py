"""`aiodaft stack`: the stacks of every process of the running programs."""

from __future__ import annotations

import os
from functools import partial
from textwrap import indent
from typing import Any

import click

from aiodaft._runtime.diagnostics.loop_watch import take_dump
from aiodaft.cli.output import FAILED, Failed, json_option, print_json
from aiodaft.program import run

from .programs import Program, Silent, pid_option, programs, say_what_there_is


@click.command()
@pid_option
@json_option
def stack(pid: str | None, as_json: bool) -> int:
    """Show the stacks of processes, and the calls they wait for.

    Without --pid, of all programs of this user.
    """
    return run(_show(pid, as_json=as_json))


async def _show(pid: str | None, *, as_json: bool) -> int:
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
