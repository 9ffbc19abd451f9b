"""`aiodaft ps`: the programs of this machine or the nodes of a cluster, and their actors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import click

from aiodaft._protocol.ids import PeerId, is_node
from aiodaft.cli.cluster import PATIENCE, answer_of, attached
from aiodaft.cli.output import Failed, Output, json_option
from aiodaft.program import run

from .looks import Where, where_options
from .programs import Program, ProgramEnded, command_of, programs, say_what_there_is
from .view import Plain, grouped, natural


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
