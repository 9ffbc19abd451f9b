"""`python -m aiodaft.bench [suite ...]`: run benchmarks and print a table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Awaitable, Callable
from typing import Final

from aiodaft.program import run

from . import calls, graphs, payloads, processes, transports
from .results import Result, as_json, table

_SUITES: Final[dict[str, Callable[[int], Awaitable[list[Result]]]]] = {
    # First, because workers load what the controller has loaded, and payloads are tensors.
    "processes": processes.run,
    "calls": calls.run,
    "graph": graphs.run,
    "payloads": payloads.run,
    "transport": transports.run,
}


async def _measure(suites: list[str], turns: int) -> list[Result]:
    results: list[Result] = []
    for suite in suites:
        print(f"measuring {suite} ...", file=sys.stderr)
        results += await _SUITES[suite](turns)
    return results


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m aiodaft.bench", description=__doc__)
    parser.add_argument("suite", nargs="*", choices=[*_SUITES, []], help=f"which: {', '.join(_SUITES)} (default: all)")
    parser.add_argument("--turns", type=int, default=11, help="how often ours and the floor take turns (default: 11)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    if options.turns < 1:
        parser.error("--turns is a positive number")
    results = run(_measure(options.suite or list(_SUITES), options.turns))
    print(as_json(results) if options.json else table(results))


if __name__ == "__main__":
    main()
