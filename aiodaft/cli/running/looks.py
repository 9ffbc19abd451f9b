"""The overviews of a running program, or of a cluster, that `aiodaft top`, `memory` and `ps` show."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, NamedTuple, TypeVar

import click
from rich.console import Console
from rich.live import Live

from aiodaft._runtime.platform.tasks import TaskOwner
from aiodaft.cli.cluster import address_of, attached
from aiodaft.cli.options import address_argument, key_file_option, seconds
from aiodaft.cli.output import json_option, print_json
from aiodaft.program import run
from aiodaft.questions import overviews

from .programs import ProgramEnded, command_of, one_program, pid_option
from .view import memory_view, top_view

F = TypeVar("F", bound=Callable[..., Any])

# Columns where there is no terminal.
_WIDTH: Final = 160


class Where(NamedTuple):
    address: str | None
    key_file: str | None
    pid: str | None

    @property
    def cluster(self) -> str | None:
        """The address of a node of that cluster; None for a program on this machine."""
        if self.address and self.pid:
            raise click.UsageError("ADDRESS and --pid exclude each other")
        return None if self.pid else address_of(self.address)


class Looked(NamedTuple):
    """The program or cluster: its title, and its overviews, one after the other."""

    title: str
    overviews: AsyncGenerator[dict[str, Any], None]


def where_options(command: F) -> F:
    """Give a command the options for its program or cluster; it gets `address`, `key_file` and `pid`."""
    return address_argument(key_file_option(pid_option(command)))


@asynccontextmanager
async def looking(where: Where, interval: float | None) -> AsyncGenerator[Looked, None]:
    """Overviews of a cluster, or of a program on this machine, for the time of the block.

    Args:
        interval: Seconds between two of them; None for just one.

    Raises:
        Failed: It cannot be looked at.
        ProgramEnded: It has ended meanwhile.
    """
    address = where.cluster
    if address is None:
        async with one_program(where.pid) as program:
            title = f"pid {program.pid}: {command_of(program.pid)}"
            yield Looked(title, program.ask("overview", interval=interval))
    else:
        async with attached(address, where.key_file) as rt:
            looks = overviews(rt._controller, interval=interval)
            yield Looked(f"the cluster at {address}", _without(rt._controller.name, looks))


async def _without(own: str, looks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[dict[str, Any], None]:
    """The same without the process of this command."""
    async for look in looks:
        look["processes"] = [process for process in look["processes"] if process["id"] != own]
        yield look


def screen() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


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
