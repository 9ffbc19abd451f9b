"""Names of actors: those that a shell completes, and those that there are not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import click

from aiodaft.cli.output import Failed
from aiodaft.program import run

from .programs import one_program
from .view import natural

# Seconds for which a user who completes a name waits at the most.
_PATIENCE: Final = 1.0
# The actors that an error lists.
_LISTED: Final = 20


def complete_actor(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The names of the actors of a program that begin like this."""
    with suppress(click.ClickException, TimeoutError):
        return [name for name in run(_actors(context.params.get("pid"))) if name.startswith(incomplete)]
    return []


def no_actor(actors: Sequence[Mapping[str, Any]], name: str) -> Failed:
    """The error that no actor of a program has a name; it lists those that there are."""
    names = sorted((" ".join([actor["name"], *actor["names"]]) for actor in actors), key=natural)
    more = [f"and {len(names) - _LISTED} more"] if len(names) > _LISTED else []
    return Failed(f"there is no actor {name!r}; there are: {', '.join([*names[:_LISTED], *more]) or 'none'}")


async def _actors(pid: str | None) -> list[str]:
    async with asyncio.timeout(_PATIENCE), one_program(pid) as program:
        actors = (await program.answer("overview"))["actors"]
    return [name for actor in actors for name in (actor["name"], *actor["names"])]
