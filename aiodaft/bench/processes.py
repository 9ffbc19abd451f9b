"""Processes: starting them, what they weigh, and what the import costs."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from aiodaft.actor import Actor
from aiodaft.runtime import Runtime

from .actors import Echo, WithTorch
from .floors import run_python
from .results import Result, compare_times, timed

_HELLO: Final = """
import aiodaft
from aiodaft.bench.actors import Echo
async def main():
    async with aiodaft.Runtime() as rt, rt.spawn(Echo) as actor:
        await actor.on_loop("hello")
aiodaft.run(main())
"""
_TURNS: Final = 3


async def run(turns: int) -> list[Result]:
    """Measure processes."""
    results: list[Result] = []
    await run_python("import aiodaft")
    results.append(await _importing(turns))
    hello = median([await run_python(_HELLO) for _ in range(_TURNS)])
    results.append(Result("cold hello: import, start, call, stop", hello, "s", budget="<= 0.5"))
    for count in (1, 8):
        results.append(await _spawn(count, Echo, "", "pass", ""))
        if importlib.util.find_spec("torch"):
            budget = "<= 2.5" if count == 8 else ""
            results.append(await _spawn(count, WithTorch, " with torch", "import torch", budget, preload=("torch",)))
    return [*results, await _weight()]


async def _importing(turns: int) -> Result:
    """What the import adds to that of asyncio, which every program here needs. Milliseconds depend on the machine."""
    ours, floor = partial(run_python, "import aiodaft"), partial(run_python, "import asyncio")
    return await compare_times("start Python, import aiodaft", ours, floor, "import asyncio", turns, "<= 2.5", unit="s")


async def _spawn(
    count: int, cls: type[Actor], what: str, floor_code: str, budget: str, preload: tuple[str, ...] = ()
) -> Result:
    async def ours() -> float:
        async def work() -> None:
            async with Runtime(preload=preload) as rt:
                await rt.group(count, cls)

        return await timed(work())

    async def floor() -> float:
        return await timed(asyncio.gather(*(run_python(floor_code) for _ in range(count))))

    name = f"runtime and {count} actors{what}"
    return await compare_times(name, ours, floor, "fork+exec of as many", _TURNS, budget, unit="s")


async def _weight() -> Result:
    """Proportional set size of idle actors: a shared page is divided among the processes that share it."""
    async with Runtime() as rt:
        actors = [await rt.spawn(Echo) for _ in range(4)]
        pids = [await actor.pid() for actor in actors]
        weights = [_pss(pid) for pid in pids]
    return Result("idle actor, proportional memory", median(weights), "MiB", budget="<= 30")


def _pss(pid: int) -> float:
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024
