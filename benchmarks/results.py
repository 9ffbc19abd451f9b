"""The measured lines, and their table."""

from __future__ import annotations

import asyncio
import json
import platform
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass
from statistics import median

Sample = Callable[[], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table.

    Attributes:
        name: The measured quantity.
        value: The median, in `unit`.
        unit: The unit of `value` and `floor`.
        floor: The median of the bare floor, measured in turns with it; None if there is nothing to compare with.
        floor_name: The work of the floor.
        ratio: Median of ours / floor over the turns, or of `value` / limit where the budget is a plain limit.
        budget: The bound of the ratio (with a floor) or of the value (without), as in "<= 2.0".
    """

    name: str
    value: float
    unit: str
    floor: float | None = None
    floor_name: str = ""
    ratio: float | None = None
    budget: str = ""

    @property
    def within(self) -> bool | None:
        """Whether the budget is kept; None if there is none."""
        if not self.budget:
            return None
        sign, limit = self.budget.split()
        measured = self.value if self.ratio is None else self.ratio
        return measured <= float(limit) if sign == "<=" else measured >= float(limit)


async def in_turns(ours: Sample, floor: Sample, turns: int) -> tuple[float, float, float]:
    """Measure two things in turns, so that noise hits both: their medians, and the median of the ratios."""
    pairs = [(await ours(), await floor()) for _ in range(turns)]
    mine, theirs = zip(*pairs, strict=True)
    return median(mine), median(theirs), median(our / their for our, their in pairs)


async def timed(work: Awaitable[object]) -> float:
    """Seconds that something takes."""
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


async def seconds_of_one(call: Callable[[], Awaitable[object]], repeats: int) -> float:
    """Seconds that a call takes, of so many made one after the other."""

    async def work() -> None:
        for _ in range(repeats):
            await call()

    return await timed(work()) / repeats


async def rate(call: Callable[[], Awaitable[object]], count: int, in_flight: int) -> float:
    """Calls per second, with so many under way."""
    callers = (seconds_of_one(call, count // in_flight) for _ in range(in_flight))
    return count / await timed(asyncio.gather(*callers))


class Bench:
    """Measures so many turns of everything, and has the results."""

    def __init__(self, turns: int) -> None:
        self.turns = turns
        self.results: list[Result] = []
        # The curves that `--plot` draws; see `dispatch`.
        self.curves: dict[str, list[tuple[float, float]]] = {}

    def add(self, name: str, value: float, unit: str, budget: str = "") -> None:
        """Add a result without a floor."""
        self.results.append(Result(name, value, unit, budget=budget))

    async def median_of(self, sample: Sample) -> float:
        """The median over the turns."""
        return median([await sample() for _ in range(self.turns)])

    async def compare(
        self,
        name: str,
        ours: Sample,
        floor: Sample,
        floor_name: str,
        budget: str = "",
        unit: str = "us",
        size: int = 0,
    ) -> None:
        """Add the time that something takes, or the speed at which `size` bytes move, and that of its floor."""
        # The first ones connect, and fill the pools.
        for _ in range(3 if size else 0 if unit == "s" else 1):
            await ours()
            await floor()
        mine, theirs, ratio = await in_turns(ours, floor, self.turns)
        if size:
            mine, theirs, ratio, unit = size / mine / 1e9, size / theirs / 1e9, 1 / ratio, "GB/s"
        elif unit == "us":
            mine, theirs = mine * 1e6, theirs * 1e6
        self.results.append(Result(name, mine, unit, theirs, floor_name, ratio, budget))


def table(results: Iterable[Result]) -> str:
    """Results for people."""
    lines = [f"{'':44}{'aiodaft':>12}{'floor':>12}{'ratio':>9}  budget"]
    for result in results:
        floor = "" if result.floor is None else f"{result.floor:,.4g}"
        ratio = "" if result.ratio is None else f"{result.ratio:.2f}x"
        verdict = "  MISSED" if result.within is False else ""
        name = f"{result.name} ({result.unit})"
        lines.append(f"{name:44}{result.value:>12,.4g}{floor:>12}{ratio:>9}  {result.budget}{verdict}")
    return "\n".join(lines)


def as_json(results: Iterable[Result]) -> str:
    """Results for programs, with the machine on which they were measured."""
    machine = {"python": platform.python_version(), "machine": platform.machine(), "platform": sys.platform}
    return json.dumps({"machine": machine, "results": [{**asdict(r), "within": r.within} for r in results]}, indent=2)
