"""`aiodaft stack`: what every process of the running programs does."""

from __future__ import annotations

from typing import Any

import click

from aiodaft.cli.output import FAILED, Failed, json_option, print_json
from aiodaft.program import run

from .programs import check_some, pid_option, programs


@click.command()
@pid_option
@json_option
def stack(pid: str | None, as_json: bool) -> int:
    """Show where processes are, and what they wait for.

    Without --pid, of all programs of this user.
    """
    return run(_show(pid, as_json=as_json))


async def _show(pid: str | None, *, as_json: bool) -> int:
    async with programs(pid) as found:
        check_some(found, pid)
        problems = list(found.problems)
        document: list[Any] = []
        for program in found.programs:
            try:
                shown = await program.answer("stack", as_json=as_json)
            except Failed as error:
                problems.append(error.message)
            else:
                document.append({"pid": program.pid, "runtime": program.id, **shown} if as_json else shown)
    if as_json:
        print_json(document)
    else:
        click.echo("\n".join(document))
    for problem in problems:
        click.echo(f"aiodaft: {problem}", err=True)
    return FAILED if problems else 0
