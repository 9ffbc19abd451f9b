"""`aiodaft plan`: strategies for a program, and what a step takes, before anything runs."""

from __future__ import annotations

import json
import math
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from aiodaft import tensor
from aiodaft.program import run
from aiodaft.runtime import Runtime
from aiodaft.tensor.hardware import PRESETS, Hardware

from .options import Failed, Output, json_option

if TYPE_CHECKING:
    from aiodaft.tensor import Found, Plan, Program, Simulation, Strategy

_GB: Final = 1e9
_FILE: Final = click.Path(path_type=Path, dir_okay=False)
_SCRIPT: Final = click.Path(path_type=Path, dir_okay=False, exists=True)


@click.command()
@click.argument("script", type=_SCRIPT, required=False)
@click.option("--gpus", type=click.IntRange(min=1), help="Search the fastest strategies for so many devices.")
@click.option("--strategy", type=_SCRIPT, help="In place of a search, a strategy for --axes, a file of JSON.")
@click.option("--axes", metavar="NAME=SIZE,...", default="", help="The axes of the devices, such as dp=8,tp=8.")
@click.option("--memory", type=float, metavar="GB", help="The memory of a device.  [default: that of --hardware]")
@click.option("--hardware", metavar="NAME|FILE", help=f"{', '.join(PRESETS)}, or JSON.  [default: one of these]")
@click.option("--measure", type=_FILE, help="Measure this machine, and write the file for --hardware.")
@click.option("--write", type=_FILE, help="Write the best strategy, for --strategy.")
@click.option("--draw", type=_FILE, help="Draw the time line of its step, as SVG.")
@click.option("--trace", type=_FILE, help="Write the time line for Perfetto.")
@json_option
def plan(
    script: Path | None,
    measure: Path | None,
    write: Path | None,
    draw: Path | None,
    trace: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Find strategies for a program, and what a step takes.

    SCRIPT has a function `program` that returns `tensor.capture(...)`. The script is run, but not as "__main__".
    """
    output = Output(as_json=as_json)
    if measure is not None:
        measured: Hardware = run(_measured())
        measure.write_text(measured.to_json(), encoding="utf-8")
        output.line(f"measured this machine: {measure}")
    elif script is None:
        raise click.UsageError("Missing argument 'SCRIPT'.")
    if script is not None:
        chosen, done = _plan(output, script, **options)
        if write is not None:
            write.write_text(chosen.to_json(), encoding="utf-8")
        if draw is not None:
            draw.write_text(done.draw(), encoding="utf-8")
        if trace is not None:
            done.trace(trace)
    output.end()


async def _measured() -> Hardware:
    async with Runtime() as rt:
        return await tensor.measure_hardware(rt)


def _plan(
    output: Output, script: Path, gpus: int | None, strategy: Path | None, axes: str, hardware: str | None, memory: Any
) -> tuple[Strategy, Simulation]:
    from aiodaft.tensor.operations import size_text  # noqa: PLC0415 - it loads torch

    sizes = _sizes(axes)
    if (gpus is None) == (strategy is None) or (strategy is None) != (not sizes):
        raise click.UsageError("give --gpus, or --strategy and --axes")
    machine = _hardware(hardware, gpus or math.prod(sizes.values()))
    limit = machine.memory if memory is None else memory * _GB
    program = _program(script)
    if strategy is None:
        found: Found = _or_failed(lambda: tensor.search(program, gpus or 1, machine, memory=limit))
        best = found.best
        chosen, made, done = best.strategy, best.plan, best.simulation
        output.line(found.describe())
    else:
        chosen = _or_failed(lambda: tensor.Strategy.from_json(strategy.read_text(encoding="utf-8")))
        made = _or_failed(lambda: program.plan(chosen, sizes))
        done = _or_failed(lambda: made.simulate(machine))
        output.line(f"{made.describe()}\n{done.describe()}")
        over = [peak - limit * machine.factor("memory", rank) for rank, peak in enumerate(done.peak)]
        if (most := max(over)) > 0:
            rank = over.index(most)
            raise Failed(f"rank {rank} takes {size_text(done.peak[rank])}: {size_text(most)} more than it has")
    _answer(output, chosen, made, done)
    return chosen, done


def _answer(output: Output, strategy: Strategy, made: Plan, done: Simulation) -> None:
    output.document = {
        "seconds": done.seconds,
        "memory": max(done.peak),
        "received": {axis: max(by) for axis, by in made.bytes.items()},
        "waits": {axis: max(by) for axis, by in done.waits.items()},
        "axes": dict(made.axes),
        "strategy": json.loads(strategy.to_json()),
    }


def _sizes(axes: str) -> dict[str, int]:
    try:
        return {name: int(size) for name, _, size in (one.partition("=") for one in axes.split(",") if one)}
    except ValueError:
        raise click.UsageError(f"--axes is {axes!r}: give names and sizes, such as dp=8,tp=8") from None


def _hardware(name: str | None, devices: int) -> Hardware:
    """That of a name or of a file, or the smallest known one with so many devices."""
    if name is None:
        return next((one for one in PRESETS.values() if one.devices >= devices), PRESETS["h100-racks"])
    if name in PRESETS:
        return PRESETS[name]
    read: Hardware = _or_failed(lambda: Hardware.from_json(Path(name).read_text(encoding="utf-8")))
    return read


def _program(script: Path) -> Program:
    sys.path.insert(0, str(script.resolve().parent))
    found = runpy.run_path(str(script)).get("program")
    found = found() if callable(found) else found
    if not isinstance(found, tensor.Program):
        raise Failed(f"{script} has no program: write `def program(): return tensor.capture(...)`")
    return found


def _or_failed(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise Failed(str(error.args[0] if isinstance(error, KeyError) else error)) from error
