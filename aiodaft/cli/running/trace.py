"""`aiodaft trace`: records the work of a running program, for ui.perfetto.dev."""

from __future__ import annotations

import os
from contextlib import aclosing

import click

from aiodaft.cli.options import seconds
from aiodaft.cli.output import Failed, Output, json_option
from aiodaft.program import run

from .programs import one_program, pid_option


@click.command()
@click.option(
    "-o", "--output", "path", type=click.Path(dir_okay=False), default="trace.json", show_default=True, help="The file."
)
@click.option("--seconds", "length", type=seconds(), default=5.0, show_default=True)
@click.option(
    "--limit", type=click.IntRange(1), default=100_000, show_default=True, help="Events that a process keeps."
)
@pid_option
@json_option
def trace(path: str, length: float, limit: int, pid: str | None, as_json: bool) -> None:
    """Record the work of a program, for ui.perfetto.dev.

    The program writes the file. If this command is ended, the file has the events until then.
    """
    path = os.path.abspath(path)
    if not os.path.isdir(folder := os.path.dirname(path)):
        # It would be known when all has been recorded.
        raise Failed(f"{path} cannot be written: there is no folder {folder}")
    run(_record(path, length, limit, pid, Output(as_json=as_json)))


async def _record(path: str, length: float, limit: int, pid: str | None, output: Output) -> None:
    async with (
        one_program(pid) as program,
        aclosing(program.ask("trace", path=path, seconds=length, limit=limit)) as items,
    ):
        await anext(items)
        output.line(f"recording pid {program.pid} for {length:g} s ...")
        found = output.document = await anext(items)
    output.line(f"{found['path']}: drop it on https://ui.perfetto.dev")
    for actor, why in found["left_out"].items():
        output.line(f"it lacks the events of {actor}: {why}")
    for actor, count in found["dropped"].items():
        output.line(f"it lacks the last {count:,} events of {actor}: raise --limit")
    output.end()
