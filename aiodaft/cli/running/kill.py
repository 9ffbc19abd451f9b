"""`aiodaft kill`: kills an actor of a running program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from aiodaft.cli.output import Failed, Output, json_option
from aiodaft.program import run

from .programs import called, complete_actor, no_actor, one_program, pid_option


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
    """The actor with a name.

    Raises:
        Failed: There is none, there are several, or it has no process.
    """
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
