"""`aiodaft memory`: which process stores how much, and the largest values."""

from __future__ import annotations

from contextlib import aclosing

import click

from aiodaft.cli.output import json_option, print_json
from aiodaft.program import run

from .looks import Where, looking, screen, where_options
from .view import memory_view


@click.command()
@where_options
@click.option("-n", "most", type=click.IntRange(0), default=20, show_default=True, help="The values to show.")
@json_option
def memory(address: str | None, key_file: str | None, pid: str | None, most: int, as_json: bool) -> None:
    """Show the bytes that processes store, and the largest values.

    ADDRESS: the address of a node of a cluster, to show all of that; $AIODAFT_ADDRESS by default.
    """
    run(_show(Where(address, key_file, pid), most, as_json=as_json))


async def _show(where: Where, most: int, *, as_json: bool) -> None:
    async with looking(where, None) as looked, aclosing(looked.overviews):
        look = await anext(looked.overviews)
        if as_json:
            print_json({"processes": look["processes"], "stored": look["stored"]})
        else:
            screen().print(memory_view(looked.title, look, most))
