"""Names that a shell completes: it asks the program or the cluster, but not for long."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import click

from aiodaft.program import run

from .programs import one_program

# Seconds for which a user waits at the most.
_PATIENCE = 1.0


def complete_actor(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The names of the actors of a program that begin like this."""
    with suppress(click.ClickException, TimeoutError):
        return [name for name in run(_actors(context.params.get("pid"))) if name.startswith(incomplete)]
    return []


async def _actors(pid: str | None) -> list[str]:
    async with asyncio.timeout(_PATIENCE), one_program(pid) as program:
        actors = (await program.answer("overview"))["actors"]
    return [name for actor in actors for name in (actor["name"], *actor["names"])]
