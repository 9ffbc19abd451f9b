"""The overviews of a running program, or of a cluster, that `aiodaft top`, `memory` and `ps` show."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, TypeVar

import click
from rich.console import Console

from aiodaft.cli.cluster import address_of, attached
from aiodaft.cli.options import address_argument, key_file_option
from aiodaft.questions import overviews

from .programs import command_of, one_program, pid_option

F = TypeVar("F", bound=Callable[..., Any])

# Columns where there is no terminal.
_WIDTH: Final = 160


class Where(NamedTuple):
    """The program or cluster that a command looks at."""

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
        where: The program or cluster.
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
