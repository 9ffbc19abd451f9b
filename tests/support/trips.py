"""Prints what one trip of each kind enters in the program's process: functions of aiodaft, and the files of these.

`python tests/support/trips.py` prints the table of docs/architecture.md; names of trips print their files instead. Each
trip is made before it is measured, so that imports and first connections do not count.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from actors import Echo, Sleeper

import aiodaft
import aiodaft_transport
from aiodaft.collectives import all_reduce

Trip: TypeAlias = Callable[[], Awaitable[object]]

_ROOTS = tuple(str(Path(package.__file__ or "").parent) for package in (aiodaft, aiodaft_transport))


async def entered(trip: Trip) -> Counter[str]:
    """The functions that this thread enters until a trip is over, counted by their files."""
    counts: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_ROOTS):
            counts[frame.f_code.co_filename] += 1

    sys.setprofile(note)
    try:
        await trip()
    finally:
        sys.setprofile(None)
    return counts


async def measured() -> dict[str, Counter[str]]:
    async with aiodaft.Runtime(preload=()) as rt:
        first, second = await rt.spawn(Echo), await rt.spawn(Echo)
        group = await rt.group(3, Echo)
        spare = [await rt.spawn(Sleeper) for _ in range(4)]
        under_way = [actor.sleep(60) for actor in spare]

        async def spawn() -> None:
            await rt.spawn(Echo)

        async def kill() -> None:
            actor, call = spare.pop(), under_way.pop()
            await rt.kill(actor)
            await asyncio.gather(call, return_exceptions=True)

        trips: dict[str, Trip] = {
            "call": lambda: first.echo(1),
            "ref": lambda: second.echo(first.echo(bytes(1024))),
            "all_reduce": lambda: all_reduce([member.echo(1) for member in group]).gather(),
            "spawn": spawn,
            "stop": lambda: rt.stop(spare.pop(0)),
            "kill": kill,
        }
        found: dict[str, Counter[str]] = {}
        for name, trip in trips.items():
            if name == "stop":
                for call in under_way[:2]:
                    call.cancel()
                await asyncio.gather(*under_way[:2], return_exceptions=True)
            await trip()
            # Messages that follow the first one do not count for the second.
            await asyncio.sleep(0.3)
            found[name] = await entered(trip)
    return found


def main(shown: list[str]) -> None:
    found = asyncio.run(measured())
    for name in shown:
        for file, count in sorted(found[name].items()):
            print(f"{count:4} {file}")
    if not shown:
        print("| Trip | Functions | Files |\n|---|---|---|")
        for name, counts in found.items():
            print(f"| {name} | {counts.total()} | {len(counts)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
