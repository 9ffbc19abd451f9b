"""The overviews of a running program, or of a cluster, that `aiodaft top`, `memory` and `ps` show."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, NamedTuple, TypeVar

import click
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from aiodaft._protocol.ids import PeerId, is_node
from aiodaft._protocol.numbers import amount, count
from aiodaft._runtime.platform.tasks import TaskOwner
from aiodaft.cli.cluster import PATIENCE, address_of, answer_of, attached
from aiodaft.cli.options import Failed, Output, address_argument, json_option, key_file_option, print_json, seconds
from aiodaft.cli.running.programs import (
    Plain,
    Program,
    ProgramEnded,
    command_of,
    names_of,
    natural,
    one_program,
    pid_option,
    programs,
    say_what_there_is,
)
from aiodaft.program import run
from aiodaft.survey import overviews

F = TypeVar("F", bound=Callable[..., Any])

_WIDTH: Final = 160


class Where(NamedTuple):
    address: str | None
    key_file: str | None
    pid: str | None

    @property
    def cluster(self) -> str | None:
        if self.address and self.pid:
            raise click.UsageError("ADDRESS and --pid exclude each other")
        return None if self.pid else address_of(self.address)


class Looked(NamedTuple):
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
    async for look in looks:
        look["processes"] = [process for process in look["processes"] if process["id"] != own]
        yield look


def screen() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


_PATIENCE: Final = 2.0
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
    """The last look comes again while the next one is late, with the seconds that it has taken."""

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
    """The processes of a runtime's actors, and of those that these own."""
    mine = {runtime}
    while more := {one["id"] for one in processes if one["owner"] in mine} - mine:
        mine |= more
    return [one for one in processes if one["id"] in mine]


def _processes(actors: Mapping[str, Sequence[Plain]], processes: Iterable[Plain]) -> Iterator[dict[str, Any]]:
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


_STYLES: Final = {"busy": "green", "idle": "dim", "silent": "bold red", "restarting": "yellow", "dead": "red"}
_TEXTS: Final = ("actor", "state", "runs")
_NUMBERS: Final = ("calls/s", "failed", "queued", "pid", "cpu", "memory", "stored", "out/s", "in/s")
_LEAST_FIRST: Final = ("in/s", "out/s", "stored", "pid", "cpu", "failed", "memory", "queued", "runs")
_SHORTEST: Final = 16
_GAP: Final = 2
_ROLES: Final = ("controller", "node", "worker")
_FAILURES: Final = 3
_FIXED: Final = 4


def top_view(title: str, look: Plain, height: int) -> RenderableType:
    nodes = list(_node_lines(look["nodes"]))
    failures = [Text(line, "red", no_wrap=True) for line in _failure_lines(look["failures"][:_FAILURES])]
    room = max(1, height - _FIXED - len(nodes) - len(failures))
    rows = list(_rows(look, room))
    table = _ActorTable(rows[:room])
    left = [Text(f"and {len(rows) - room} more", "dim")] if len(rows) > room else []
    return Group(Text(title, "bold", no_wrap=True), Text(_totals(look)), *nodes, table, *left, *failures)


class _ActorTable(NamedTuple):
    """Leaves out the columns of the least importance for which a terminal has no room."""

    rows: Sequence[Sequence[str | Text]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        names = [*_TEXTS, *_NUMBERS]
        widths = {
            name: max([len(name), *(cell_len(str(row[index])) for row in self.rows)])
            for index, name in enumerate(names)
        }
        needed = {name: min(width, _SHORTEST) if name in _TEXTS else width for name, width in widths.items()}

        def left() -> int:
            return options.max_width - sum(needed.values()) - _GAP * (len(needed) - 1)

        for name in _LEAST_FIRST:
            if left() < 0:
                del needed[name]
        table = _table([name for name in _TEXTS if name in needed], [name for name in _NUMBERS if name in needed])
        for name, column in zip(needed, table.columns, strict=True):
            # Texts are shortened to what the numbers leave.
            column.max_width = needed[name] = needed[name] + max(0, min(widths[name] - needed[name], left()))
        for row in self.rows:
            table.add_row(*(cell for name, cell in zip(names, row, strict=True) if name in needed))
        yield table


def memory_view(title: str, look: Plain, most: int) -> RenderableType:
    processes = _table(["process"], ["pid", "in RAM", "stores", "values", "pools keep"])
    for one in sorted(look["processes"], key=lambda one: -one["stored_bytes"]):
        numbers = [
            amount(one["rss"]),
            amount(one["stored_bytes"]),
            f"{one['stored_values']:,}",
            amount(one["pooled_bytes"]),
        ]
        processes.add_row(one["title"], str(one["pid"] or "?"), *(numbers if one["answered"] else ["?"] * len(numbers)))
    stored, titles = look["stored"], {one["id"]: one["title"] for one in look["processes"]}
    values = _table(["value", "stored by", "held by"], ["size", "readers"])
    for one in stored[:most]:
        where = titles.get(one["process"], one["process"]) + " (device)" * one["on_device"]
        label = one["label"] or "copy to pass on"
        values.add_row(label, where, titles.get(one["owner"], one["owner"]), amount(one["nbytes"]), str(one["readers"]))
    parts: list[RenderableType] = [Text(title, "bold", no_wrap=True), processes]
    if stored:
        parts += ["", values]
    if len(stored) > most:
        parts.append(Text(f"and {len(stored) - most} more", "dim"))
    return Group(*parts)


def _table(texts: Iterable[str], numbers: Iterable[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in texts:
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _totals(look: Plain) -> str:
    actors, rates = look["actors"], look.get("rates", {"calls": 0, "bytes": 0})
    return "  ".join([
        count(len(actors), "actor"),
        count(len(look["processes"]), "process", "processes"),
        f"{rates['calls']:,.0f} calls/s",
        f"{amount(round(rates['bytes']))}/s",
        f"{sum(actor['queued'] for actor in actors):,} queued",
        f"{amount(sum(process['stored_bytes'] for process in look['processes']))} stored",
    ])  # fmt: skip


def _node_lines(nodes: Sequence[Plain]) -> Iterator[Text]:
    for node in nodes if any(node["address"] for node in nodes) else ():
        state = "" if node["state"] == "ready" else f"  {node['state']}"
        used = [
            f"{total - node['free'].get(name, 0):g}/{total:g} {name}" for name, total in node["total"].items() if total
        ]
        text = f"{node['name']}  {node['address']}  in use: {', '.join(used) or 'nothing'}{state}"
        yield Text(text, _STYLES["silent"] if node["state"] == "silent" else "", no_wrap=True)


def grouped(entries: Iterable[Plain], key: str) -> dict[str, list[Plain]]:
    found: dict[str, list[Plain]] = {}
    for one in entries:
        found.setdefault(one[key], []).append(one)
    return found


def _rows(look: Plain, room: int) -> Iterator[list[str | Text]]:
    """A row for each actor, and for each process without one. The first row of a process has its numbers.

    They are in the order of their names, or with the most calls first if there is no room for all.
    """
    by_name = len(look["actors"]) + len(look["processes"]) <= room
    rates = look.get("rates", {"actors": {}, "processes": {}})
    of_process = grouped(look["actors"], "process")

    def calls(actor: Plain) -> float:
        rate: float = rates["actors"].get(actor["name"], {"calls": 0})["calls"]
        return rate

    def order(process: Plain) -> tuple[Any, ...]:
        called = 0.0 if by_name else sum(map(calls, of_process.get(process["id"], ())))
        return _ROLES.index(process["role"]), -called, natural(process["title"])

    def row(actor: Plain, numbers: Sequence[str]) -> list[str | Text]:
        more = actor["running_besides"] + len(actor["running"]) - 1
        runs = actor["running"][0] + (f" +{more}" if more else "") if actor["running"] else ""
        state = Text(actor["state"], _STYLES[actor["state"]])
        counts = [f"{calls(actor):,.0f}", str(actor["failed"] or ""), str(actor["queued"] or "")]
        return [" ".join(names_of(actor)), state, runs, *counts, *numbers]

    for process in sorted(look["processes"], key=order):
        numbers = _numbers(process, rates["processes"].get(process["id"]))
        actors = of_process.pop(process["id"], [])
        if not actors:
            state = "" if process["answered"] else Text("silent", _STYLES["silent"])
            yield [process["title"], state, "", "", "", "", *numbers]
        for number, actor in enumerate(actors):
            yield row(actor, [""] * len(numbers) if number else numbers)
    # Actors that are being restarted have no process.
    for actors in of_process.values():
        yield from (row(actor, [""] * 6) for actor in actors)


def _numbers(process: Plain, rate: Plain | None) -> list[str]:
    memory = [amount(process["rss"]), amount(process["stored_bytes"])] if process["answered"] else ["?", "?"]
    if rate is None:
        return [str(process["pid"] or "?"), "", *memory, "", ""]
    traffic = [amount(round(rate["sent"])), amount(round(rate["received"]))]
    return [str(process["pid"] or "?"), f"{rate['cpu']:.0%}", *memory, *traffic]


def _failure_lines(failures: Iterable[Plain]) -> Iterator[str]:
    for failure in failures:
        cause = failure["causes"][0] if failure["causes"] else {"type": failure["what"], "message": ""}
        times = f"{failure['times']} x " if failure["times"] > 1 else ""
        where = " of ".join(filter(None, [failure["method"], failure["actor"]]))
        error = f"{cause['type']}: {cause['message']}".splitlines()[0]
        yield f"{times}{error}  in {where}  {failure['line']}".rstrip()
