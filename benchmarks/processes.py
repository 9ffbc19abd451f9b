"""Processes: their start, their weight, and the cost of the import."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from aiodaft.runtime import Runtime

from .actors import Echo, WithTorch
from .floors import run_python
from .results import Bench, seconds_of_one

_HELLO: Final = """
import aiodaft
from benchmarks.actors import Echo
async def main():
    async with aiodaft.Runtime() as rt, rt.spawn(Echo) as actor:
        await actor.on_loop("hello")
aiodaft.run(main())
"""
_TURNS: Final = 3


async def run(bench: Bench) -> None:
    """Measure processes."""
    await run_python("import aiodaft")
    # The part of the import beyond that of asyncio, which every program here needs. Milliseconds depend on the machine.
    ours, floor = partial(run_python, "import aiodaft"), partial(run_python, "import asyncio")
    await bench.compare("start Python, import aiodaft", ours, floor, "import asyncio", "<= 2.5", unit="s")
    hello = median([await run_python(_HELLO) for _ in range(_TURNS)])
    bench.add("cold hello: import, start, call, stop", hello, "s", "<= 0.5")
    slow = Bench(_TURNS)
    for count in (1, 8):
        await _spawn(slow, count)
        if importlib.util.find_spec("torch"):
            await _spawn(slow, count, torch=True)
    bench.results += slow.results
    # Of a shared page, each process that shares it has its part.
    async with Runtime() as rt:
        actors = [await rt.spawn(Echo) for _ in range(4)]
        pids = [await actor.pid() for actor in actors]
        weights = list(map(_pss, pids))
    bench.add("idle actor, proportional memory", median(weights), "MiB", "<= 30")


async def _spawn(bench: Bench, count: int, *, torch: bool = False) -> None:
    async def start() -> None:
        async with Runtime(preload=("torch",) if torch else ()) as rt:
            await rt.group(count, WithTorch if torch else Echo)

    def interpreters() -> Awaitable[object]:
        return asyncio.gather(*(run_python("import torch" if torch else "pass") for _ in range(count)))

    ours, floor = partial(seconds_of_one, start, 1), partial(seconds_of_one, interpreters, 1)
    name = f"runtime and {count} actors" + " with torch" * torch
    budget = "<= 2.5" if torch and count == 8 else ""
    await bench.compare(name, ours, floor, "fork+exec of as many", budget, unit="s")


def _pss(pid: int) -> float:
    """Mebibytes of proportional set size."""
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024
