"""`python -m benchmarks [suite ...]`: run benchmarks and print a table."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Final

from aiodaft.program import run

from . import (
    calls,
    collectives,
    compare,
    dispatch,
    gpu,
    graphs,
    hosts,
    payloads,
    processes,
    refs,
    reshard,
    scale,
    searched,
    simulated,
    telemetry,
    tensors,
    torch_steps,
    tracing,
    transports,
    values,
    web,
    workflows,
)
from .results import Bench, as_json, table

_SUITES: Final[dict[str, Callable[[Bench], Awaitable[None]]]] = {
    # First, because workers load the modules that the controller has loaded, and payloads are tensors.
    "processes": processes.run,
    "calls": calls.run,
    "refs": refs.run,
    "workflows": workflows.run,
    "values": values.run,
    "graph": graphs.run,
    "dispatch": dispatch.run,
    "trace": tracing.run,
    "telemetry": telemetry.run,
    "payloads": payloads.run,
    "reshard": reshard.run,
    "transport": transports.run,
    "collective": collectives.run,
    "tensor": tensors.run,
    "searched": searched.run,
    "simulated": simulated.run,
    "torch": torch_steps.run,
    "scale": scale.run,
    "hosts": hosts.run,
    "web": web.run,
    "gpu": gpu.run,
}


async def _measure(bench: Bench, suites: list[str]) -> None:
    for suite in suites:
        print(f"measuring {suite} ...", file=sys.stderr)
        await _SUITES[suite](bench)


def _compare(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    peers = options.compare.split(",")
    pythons = dict(pair.partition("=")[::2] for pair in options.python)
    for name in {*peers, *pythons} - {*compare.PEERS}:
        parser.error(f"{name!r} cannot be compared; choose from {', '.join(compare.PEERS)}")
    samples = run(compare.compare(peers, pythons, options.turns))
    print(json.dumps(samples, indent=2) if options.json else compare.comparison(samples, peers))
    if options.plot:
        compare.plot(samples, peers, options.plot)


def main() -> None:
    """Measure as the arguments of the process say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run benchmarks and print a table.")
    parser.add_argument("suite", nargs="*", metavar="SUITE", help=f"{', '.join(_SUITES)}; all by default")
    parser.add_argument("--turns", type=int, default=11, help="how often ours and the floor take turns (default: 11)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--compare", metavar="NAMES", help=f"measure other frameworks, as in {','.join(compare.PEERS)}")
    parser.add_argument(
        "--python", metavar="NAME=PATH", action="append", default=[], help="the interpreter of a framework to compare"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the comparison, or dispatch (needs matplotlib)")
    options = parser.parse_args()
    if options.turns < 1:
        parser.error("--turns is a positive number")
    for suite in options.suite:
        if suite not in _SUITES:
            parser.error(f"{suite!r} is no suite; choose from {', '.join(_SUITES)}")
    if options.compare:
        _compare(parser, options)
        return
    suites = options.suite or list(_SUITES)
    if options.plot and "dispatch" not in suites:
        parser.error("--plot draws a comparison, or the suite dispatch")
    bench = Bench(options.turns)
    try:
        run(_measure(bench, suites))
    finally:
        # The lines that were measured before an error are worth their time.
        print(as_json(bench.results) if options.json else table(bench.results))
    if options.plot:
        dispatch.plot(bench.curves, options.plot)


if __name__ == "__main__":
    main()
