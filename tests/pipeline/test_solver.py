"""Schedules by a solver: the least idle time that there is for their memory, and never more than known ones have."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence

import pytest

from aiodaft.pipeline import (
    UNIT_COSTS,
    Costs,
    Kind,
    ScheduleError,
    Task,
    simulate,
    solved,
    zb_h1,
    zb_h2,
    zbv,
)

pytest.importorskip("scipy")

F, B, W = Kind


def orders(tasks: Mapping[tuple[int, Kind], int], held: int) -> Iterator[list[Task]]:
    """All orders of a rank's tasks, with micro-batches in their order and at most so many held."""
    left = {key: count for key, count in tasks.items() if count}
    if not left:
        yield []
    for (stage, kind), count in left.items():
        last = 0 if kind is F else left.get((stage, F), 0) if kind is B else left.get((stage, B), 0)
        room = held - (kind is F) + (kind is W)
        if count > last and room >= 0:
            for rest in orders({**left, (stage, kind): count - 1}, room):
                yield [Task(stage, -count, kind), *rest]


def numbered(tasks: Sequence[Task], microbatches: int) -> list[Task]:
    return [task._replace(microbatch=microbatches + task.microbatch) for task in tasks]


def least_idle(microbatches: int, costs: Costs, held: int) -> float:
    rows = [
        [numbered(row, microbatches) for row in orders({(stage, kind): microbatches for kind in Kind}, held)]
        for stage in range(2)
    ]
    found = []
    for schedule in ([first, second] for first in rows[0] for second in rows[1]):
        try:
            found.append(max(simulate(schedule, costs).idle))
        except ScheduleError:
            continue
    return min(found)


@pytest.mark.parametrize(
    ("costs", "held"),
    [
        (UNIT_COSTS, 1),
        ({F: 2.0, B: 3.0, W: 1.0}, 2),
        ({F: [1.0, 3.0], B: [1.0, 2.0], W: [2.0, 1.0]}, 2),
    ],
)
def test_a_schedule_idles_as_little_as_the_best_of_all_orders(costs: Costs, held: int) -> None:
    made = simulate(solved([0, 1], 2, costs, held=held), costs)
    assert max(made.held) <= held
    assert max(made.idle) == pytest.approx(least_idle(2, costs, held))


@pytest.mark.parametrize(("p", "m"), [(2, 6), (4, 8), (3, 9)])
@pytest.mark.parametrize("costs", [UNIT_COSTS, {F: 1.0, B: 1.4, W: 0.7}], ids=["unit", "uneven"])
def test_a_schedule_never_idles_longer_than_a_known_one_of_its_memory(p: int, m: int, costs: Costs) -> None:
    v = [*range(p), *range(p)[::-1]]
    for known, places in ((zb_h1(p, m), range(p)), (zb_h2(p, m), range(p)), (zbv(p, m), v)):
        there = simulate(known, costs)
        here = simulate(solved(places, m, costs, held=max(there.held), seconds=0), costs)
        assert max(here.idle) <= max(there.idle) + 1e-9
        assert max(here.held) <= max(there.held)


def test_memory_between_two_known_schedules_is_used() -> None:
    idle = [max(simulate(solved(range(4), 8, held=held, seconds=0)).idle) for held in (4, 5, 6, 7)]
    assert idle == [3, 2, 1, 0]
    assert max(simulate(zbv(4, 8)).held) == 8  # With less, no known schedule of a V fits.
    assert max(simulate(solved([0, 1, 2, 3, 3, 2, 1, 0], 8, held=6, seconds=0)).held) <= 6


def test_bad_input_is_refused_and_a_missing_solver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="a rank with 2 stages holds at least 2"):
        solved([0, 1, 1, 0], 4, held=1)
    wrong: list[Costs] = [{F: 1, B: 1}, {F: [1], B: [1], W: [1]}, {F: -1, B: 1, W: 1}, {F: math.nan, B: 1, W: 1}]
    for costs in wrong:
        with pytest.raises(ValueError, match="give a time from 0 on for F, B and W, or a list with that of each stage"):
            solved([0, 1], 2, costs, held=2)
    with pytest.raises(ValueError, match="give a stage to each rank"):
        solved([0, 2], 4, held=1)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match=r"pip install 'aiodaft\[plan\]'"):
        solved([0, 1, 2], 4, {F: 1, B: 2, W: 1}, held=3)
