"""`aiodaft top`: a live view of a running program or a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

import click
from rich.live import Live

from aiodaft._runtime.platform.tasks import TaskOwner
from aiodaft.cli.options import seconds
from aiodaft.cli.output import json_option, print_json
from aiodaft.program import run

from .looks import Looked, Where, looking, screen, where_options
from .programs import ProgramEnded
from .view import top_view

# Seconds for which a look may be late.
_PATIENCE: Final = 2.0
# Lines where there is no terminal.
_HEIGHT: Final = 10_000


@click.command()
@where_options
@click.option("--once", is_flag=True, help="Show one look, after one interval.")
@click.option("--interval", type=seconds(0.1), default=1.0, show_default=True)
@json_option
def top(address: str | None, key_file: str | None, pid: str | None, once: bool, interval: float, as_json: bool) -> int:
    """Show a program at work: actors, calls, queues, memory, bytes.

    It goes on until Ctrl-C, or the end of the program. ADDRESS: the address of a node of a cluster, to show all of
    that; $AIODAFT_ADDRESS by default. --json implies --once.
    """
    try:
        run(_watch(Where(address, key_file, pid), interval, once=once, as_json=as_json))
    except ProgramEnded as error:
        if once or as_json:
            raise
        click.echo(f"aiodaft: {error.message}", err=True)
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
        await _draw(looked, interval)


async def _draw(looked: Looked, interval: float) -> None:
    console = screen()
    if not console.is_terminal:
        async for look in looked.overviews:
            console.print(top_view(looked.title, look, _HEIGHT))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        async for look, late in _with_delays(looked.overviews, interval + _PATIENCE):
            title = f"(no answer for {late:.0f} s) {looked.title}" if late else looked.title
            live.update(top_view(title, look, console.height), refresh=True)


async def _with_delays(
    looks: AsyncGenerator[dict[str, Any], None], patience: float
) -> AsyncGenerator[tuple[dict[str, Any], float], None]:
    """Looks as they come, and the last one again while the next one is late, with the seconds that it has taken."""

    async def next_look() -> dict[str, Any]:
        return await anext(looks)

    loop, tasks, last = asyncio.get_running_loop(), TaskOwner("aiodaft top"), None
    try:
        while True:
            coming, asked = tasks.start(next_look(), name="look"), loop.time()
            while not (await asyncio.wait([coming], timeout=patience))[0]:
                if last is not None:
                    yield last, loop.time() - asked
            last = coming.result()
            yield last, 0.0
    finally:
        await tasks.aclose()
