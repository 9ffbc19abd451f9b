"""`aiodaft top`: a live view of a running program or a cluster."""

from __future__ import annotations

from contextlib import aclosing
from typing import Final

import click
from rich.live import Live

from aiodaft.cli.options import seconds
from aiodaft.cli.output import json_option, print_json
from aiodaft.program import run

from .looks import Looked, Where, looking, screen, where_options
from .programs import ProgramEnded
from .view import top_view

# Lines where there is no terminal.
_HEIGHT: Final = 10_000


@click.command()
@where_options
@click.option("--once", is_flag=True, help="Show one look, after one interval.")
@click.option("--interval", type=seconds(0.1), default=1.0, show_default=True, metavar="SECONDS")
@json_option
def top(address: str | None, key_file: str | None, pid: str | None, once: bool, interval: float, as_json: bool) -> int:
    """Show what a program does: actors, calls, queues, memory, bytes.

    It goes on until Ctrl-C, or the end of the program. ADDRESS: where a node of a cluster listens, to show all of that;
    $AIODAFT_ADDRESS by default. --json implies --once.
    """
    try:
        run(_watch(Where(address, key_file, pid), interval, once=once, as_json=as_json))
    except ProgramEnded as error:
        click.echo(f"aiodaft: {error.message}", err=True)
        if once or as_json:
            raise
    except KeyboardInterrupt:
        pass
    return 0


async def _watch(where: Where, interval: float, *, once: bool, as_json: bool) -> None:
    async with looking(where, interval) as looked, aclosing(looked.overviews):
        if once or as_json:
            # Rates need two.
            await anext(looked.overviews)
            look = await anext(looked.overviews)
            if as_json:
                print_json(look)
            else:
                screen().print(top_view(looked.title, look, _HEIGHT))
            return
        await _draw(looked)


async def _draw(looked: Looked) -> None:
    console = screen()
    if not console.is_terminal:
        async for look in looked.overviews:
            console.print(top_view(looked.title, look, _HEIGHT))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        async for look in looked.overviews:
            live.update(top_view(looked.title, look, console.height), refresh=True)
