"""The overviews of a running program, or of a cluster, that `aiodaft top`, `memory` and `ps` show."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, NamedTuple, TypeVar

import click
from rich.console import Console
from rich.live import Live

from aiodaft._protocol.ids import PeerId, is_node
from aiodaft._runtime.platform.tasks import TaskOwner
from aiodaft.cli.cluster import PATIENCE, address_of, answer_of, attached
from aiodaft.cli.options import Failed, Output, address_argument, json_option, key_file_option, print_json, seconds
from aiodaft.program import run
from aiodaft.survey import overviews

from .programs import Program, ProgramEnded, command_of, one_program, pid_option, programs, say_what_there_is
from .view import Plain, grouped, memory_view, natural, top_view

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


@click.command()
@where_options
@json_option
def ps(address: str | None, key_file: str | None, pid: str | None, as_json: bool) -> None:
    """Show programs or nodes, and their actors.

    ADDRESS: the address of a node of a cluster; $AIODAFT_ADDRESS by default. Without both: the programs of this user on
    this machine.
    """
    where, output = Where(address, key_file, pid), Output(as_json=as_json)
    run(_show_programs(pid, output) if where.cluster is None else _show_cluster(where, output))


async def _show_programs(pid: str | None, output: Output) -> None:
    shown: list[dict[str, Any]] = []
    output.document = {"programs": shown}
    async with programs(pid) as found:
        if not found.programs and not found.silent:
            if pid is not None:
                raise Failed(say_what_there_is(found, pid))
            click.echo(f"aiodaft: {say_what_there_is(found, pid)}", err=True)
        looks = await asyncio.gather(*map(_look_at, found.programs))
        shown += [look for look in looks if look is not None]
    for silent in found.silent:
        shown.append(_document(silent.pid) | {"problem": f"it does not answer: {silent.why}"})
    for one in shown:
        lines = [
            f"pid {one['pid']}: {one['command']}",
            *filter(None, [one["problem"]]),
            *map(_line_of, one["processes"]),
        ]
        output.line("\n    ".join(lines))
    output.end()


async def _look_at(program: Program) -> dict[str, Any] | None:
    document = _document(program.pid) | {"runtime": program.id}
    try:
        look = await program.answer("overview")
        owned = _owned_by(program.id, look["processes"])
        return document | {"processes": list(_processes(grouped(look["actors"], "process"), owned))}
    except ProgramEnded:
        return None
    except Failed as error:
        return document | {"problem": error.message}


def _document(pid: int) -> dict[str, Any]:
    return {"pid": pid, "command": command_of(pid), "runtime": None, "problem": None, "processes": []}


async def _show_cluster(where: Where, output: Output) -> None:
    async with attached(where.cluster, where.key_file) as rt:
        look = (await rt.overview(patience=PATIENCE)).as_dict()
        actors, of_node = grouped(look["actors"], "process"), grouped(look["processes"], "node")
        shown = [
            {**node, "processes": list(_processes(actors, of_node.get(node["name"], ())))} for node in look["nodes"]
        ]
        output.document = {"nodes": shown}
        for node in shown:
            output.line("\n    ".join([_node_line(node), *_said_of(node)]))
        output.end()
        # After a start with --recover it answers this at once, and gives names when the nodes have told it theirs.
        if await answer_of(rt._controller.coordinator.members()) is None:
            raise Failed("the coordinator does not answer: names may be missing")


def _owned_by(runtime: str, processes: Sequence[Plain]) -> list[Plain]:
    """The processes of a runtime's actors, and of those that these own: others of its cluster are of other programs."""
    mine = {runtime}
    while more := {one["id"] for one in processes if one["owner"] in mine} - mine:
        mine |= more
    return [one for one in processes if one["id"] in mine]


def _processes(actors: Mapping[str, Sequence[Plain]], processes: Iterable[Plain]) -> Iterator[dict[str, Any]]:
    """The shown facts about an overview's processes that have actors; `actors`: those of each process."""
    for process in sorted(processes, key=lambda process: natural(process["title"])):
        if process["role"] == "worker":
            names = [name for actor in actors.get(process["id"], ()) for name in actor["names"]]
            owner = "the cluster" if is_node(PeerId(process["owner"])) else process["owner"]
            yield {"pid": process["pid"], "actors": process["actors"], "names": names, "owner": owner}


def _line_of(process: Plain) -> str:
    actors = ", ".join(process["actors"]) or "no actors"
    named = f", named {', '.join(process['names'])}" if process["names"] else ""
    return f"pid {process['pid'] or '?'}: {actors}{named}"


def _node_line(node: Plain) -> str:
    amounts = [f"{node['free'].get(name, 0):g}/{total:g} {name}" for name, total in node["total"].items() if total]
    labels = [f"{name}={value}" for name, value in node["labels"].items()]
    return "  ".join([node["name"], node["address"], f"free: {', '.join(amounts) or 'nothing'}", *labels])


def _said_of(node: Plain) -> Iterator[str]:
    if node["state"] == "silent":
        yield "does not answer"
    elif node["state"] == "draining":
        yield "is being drained"
    for process in node["processes"]:
        yield f"{_line_of(process)} (of {process['owner']})"
