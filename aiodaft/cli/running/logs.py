"""`aiodaft logs`: the output and log records of the actors of a running program."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Any

import click

from aiodaft._protocol.diagnostics.printing import member_of
from aiodaft.cli.output import json_option, print_json
from aiodaft.program import run

from .programs import ProgramEnded, called, complete_actor, no_actor, one_program, pid_option


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
        run(_show(pid, actor, last, follow=follow, as_json=as_json))
    except ProgramEnded as error:
        if not follow:
            raise
        click.echo(f"aiodaft: {error.message}", err=True)
    except KeyboardInterrupt:
        if not follow:
            raise
    return 0


async def _show(pid: str | None, actor: str | None, last: int, *, follow: bool, as_json: bool) -> None:
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
