"""Names of actors: those that a shell completes, those that have one, and those that there are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import click

from aiodaft.cli.options import completing
from aiodaft.cli.output import Failed

from .programs import one_program
from .view import Plain, names_of, natural

# The actors that an error lists.
_LISTED: Final = 20


@completing
async def complete_actor(context: click.Context) -> list[str]:
    async with one_program(context.params.get("pid")) as program:
        return [name for actor in (await program.answer("overview"))["actors"] for name in names_of(actor)]


def called(actors: Sequence[Plain], name: str) -> list[Plain]:
    return [actor for actor in actors if name in names_of(actor)]


def no_actor(actors: Sequence[Plain], name: str) -> Failed:
    """The error that no actor of a program has a name; it lists those that there are."""
    names = sorted((" ".join(names_of(actor)) for actor in actors), key=natural)
    more = [f"and {len(names) - _LISTED} more"] if len(names) > _LISTED else []
    return Failed(f"there is no actor {name!r}; there are: {', '.join([*names[:_LISTED], *more]) or 'none'}")
