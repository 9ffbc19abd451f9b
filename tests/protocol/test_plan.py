"""Plans: every step once, every value to the processes that need it, in an order that can be kept, or refused."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import replace
from itertools import pairwise

import pytest
from dataflows import BOUNDED, THREAD, actor, flows, step
from hypothesis import given, settings

from aiodaft._protocol.graphs.plan import Dataflow, Report, Result, Step, SubPlan, make_plan
from aiodaft._protocol.ids import PeerId
from aiodaft.exceptions import CyclicGraph


def run(plans: dict[PeerId, SubPlan[None]], inputs: int) -> tuple[list[int], set[int]]:
    """Play a run, each segment as late as its needs and its actor's order make it: the steps done, the reports.

    A process that follows hears of the run with the first value that comes.
    """
    has: dict[PeerId, set[int]] = {process: set(plan.inputs) for process, plan in plans.items()}
    waiting = {
        (process, key): deque(segment for segment in plan.segments if plan.steps[segment.steps[0]].actor == key)
        for process, plan in plans.items()
        for key in {step.actor for step in plan.steps}
    }
    awake = {process for process, plan in plans.items() if not plan.follows}
    done: list[int] = []
    reports: set[int] = set()
    progress = True
    while progress:
        progress = False
        for (process, _), segments in waiting.items():
            plan = plans[process]
            if process not in awake or not segments or not has[process].issuperset(segments[0].needs):
                continue
            progress = True
            made = set(segments[0].needs)
            for position in segments.popleft().steps:
                result = plan.results[position]
                value = result.value
                assert made.issuperset(plan.steps[position].needs), "a segment has the values that its steps need"
                made.add(value)
                has[process].add(value)
                done.append(value - inputs)
                reports |= {value} if result.reported else set()
                for other in result.sends:
                    assert value in plans[other].receives[process]
                    has[other].add(value)
                    awake.add(other)
    return done, reports


@given(flow=flows())
@settings(max_examples=300, deadline=None)
def test_every_plan_runs_each_step_once_and_reports_outputs_and_ends(flow: Dataflow[None]) -> None:
    plans = make_plan(flow)
    done, reports = run(plans, flow.inputs)
    assert sorted(done) == list(range(len(flow.steps)))
    used = {value for step in flow.steps for value in step.needs}
    ends = {flow.inputs + index for index in range(len(flow.steps))} - used
    assert reports == ends | set(flow.outputs)
    for process, plan in plans.items():
        assert process not in plan.receives
        assert sum(len(values) for values in plan.receives.values()) == len(
            {value for step in plan.steps for value in step.needs if value >= flow.inputs}
            - {result.value for result in plan.results}
        )


@given(flow=flows())
@settings(max_examples=100, deadline=None)
def test_steps_of_an_actor_keep_their_order(flow: Dataflow[None]) -> None:
    for plan in make_plan(flow).values():
        for key in {planned.actor for planned in plan.steps}:
            order = [
                position for segment in plan.segments for position in segment.steps if plan.steps[position].actor == key
            ]
            assert order == sorted(order)


def test_a_chain_on_one_actor_is_one_segment() -> None:
    a = actor(1)
    plan = make_plan(Dataflow(1, tuple(step(a, index) for index in range(128)), (128,)))[a[0]]
    assert [len(segment.steps) for segment in plan.segments] == [128]
    assert plan.segments[0].needs == (0,)


@pytest.mark.parametrize(
    ("steps", "lengths"),
    [
        ((step(actor(1), 0), step(actor(1), 1, rules=THREAD)), [1, 1]),  # the loop, then the thread
        ((step(actor(1), 0, rules=BOUNDED), step(actor(1), 1, rules=BOUNDED)), [1, 1]),  # each counts by itself
        ((step(actor(1), 0), step(actor(1), 0)), [1, 1]),  # they may overlap
        ((step(actor(1), 0), step(actor(2), 1), step(actor(1), 1, 2)), [1, 1]),  # the second waits for another actor
        ((step(actor(1)), step(actor(1), 1, 0)), [1, 1]),  # the first does not wait for the input
        ((step(actor(1), 0), step(actor(1), 1, 0)), [2]),
    ],
)
def test_a_segment_is_what_could_not_overlap_and_waits_for_no_other_value(
    steps: tuple[Step[None], ...], lengths: list[int]
) -> None:
    plan = make_plan(Dataflow(1, steps, (len(steps),)))[actor(1)[0]]
    assert [len(segment.steps) for segment in plan.segments] == lengths


@given(flow=flows())
@settings(max_examples=100, deadline=None)
def test_strands_are_the_segments_of_an_actor_in_their_order_each_behind_the_one_before(flow: Dataflow[None]) -> None:
    for plan in make_plan(flow).values():
        assert sorted(segment for strand in plan.strands for segment in strand) == [*range(len(plan.segments))]
        actors = [plan.steps[segment.steps[0]].actor for segment in plan.segments]
        for key in set(actors):
            mine = [segment for strand in plan.strands for segment in strand if actors[segment] == key]
            assert mine == sorted(mine)
        for before, after in (pair for strand in plan.strands for pair in pairwise(strand)):
            last, first = plan.segments[before].steps[-1], plan.segments[after].steps[0]
            assert needs_result(flow, plan.results[first].value, plan.results[last].value)
            assert not (plan.steps[first].rules.on_thread)
            assert not (plan.steps[last].rules.on_thread)


def needs_result(flow: Dataflow[None], later: int, earlier: int) -> bool:
    """Whether a result needs another one, directly or not."""
    if later < flow.inputs:
        return False
    needs = flow.steps[later - flow.inputs].needs
    return earlier in needs or any(needs_result(flow, value, earlier) for value in needs)


def test_a_chain_over_two_actors_is_one_strand_of_each() -> None:
    a, b = actor(1), actor(2)
    plans = make_plan(Dataflow(1, tuple(step((a, b)[index % 2], index) for index in range(8)), (8,)))
    assert [(len(plan.segments), plan.strands) for plan in plans.values()] == [(4, ((0, 1, 2, 3),))] * 2


@pytest.mark.parametrize(
    "steps",
    [
        (step(actor(1), 0), step(actor(2), 0), step(actor(1), 2)),  # they may overlap
        (step(actor(1), 0, rules=THREAD), step(actor(2), 1), step(actor(1), 2, rules=THREAD)),  # others use the thread
        (step(actor(1), 0), step(actor(2), 1), step(actor(1), 2, rules=BOUNDED)),  # others wait for its place
    ],
)
def test_what_may_overlap_or_keeps_others_waiting_is_no_strand(steps: tuple[Step[None], ...]) -> None:
    assert make_plan(Dataflow(1, steps, (3,)))[actor(1)[0]].strands == ((0,), (1,))


def test_orders_that_wait_for_each_other_are_refused_with_the_circle_and_its_lines() -> None:
    # The order in which two ranks that both send first would get stuck.
    a, b = actor(1), actor(2)
    steps = (
        step(a, line="pipe.py:10"),
        step(b, 0, line="pipe.py:11"),
        step(b, line="pipe.py:12"),
        step(a, 2, line="pipe.py:13"),
        step(a, 3, line="pipe.py:14"),
    )
    assert set(make_plan(Dataflow(0, steps, (1, 4)))) == {a[0], b[0]}
    stuck = Dataflow(0, steps, (1, 4), {a: [3, 0, 4], b: [1, 2]})
    with pytest.raises(CyclicGraph, match="cycle") as caught:
        make_plan(stuck)
    assert sorted(re.findall(r"pipe\.py:\d+", str(caught.value))) == [f"pipe.py:{line}" for line in (10, 11, 12, 13)]


def test_an_order_of_other_steps_is_refused() -> None:
    a = actor(1)
    with pytest.raises(CyclicGraph, match=r"names \[0, 0\]"):
        make_plan(Dataflow(0, (step(a), step(a)), (1,), {a: [0, 0]}))


def test_a_given_order_is_kept() -> None:
    a = actor(1)
    plan = make_plan(Dataflow(0, (step(a), step(a)), (0, 1), {a: [1, 0]}))[a[0]]
    assert [result.value for result in plan.results] == [1, 0]


def test_another_actor_takes_the_place_of_one() -> None:
    flow = Dataflow(1, (step(actor(1), 0), step(actor(2), 1)), (2,), {actor(1): [0]})
    moved = flow.with_actors([(actor(3), "B-1"), (actor(2), "C-1")])
    assert moved.orders == {actor(3): [0]}
    assert set(make_plan(moved)) == {actor(2)[0], actor(3)[0]}


def test_the_process_of_the_first_step_comes_first() -> None:
    a, b = actor(1), actor(2)
    # The second process is met first, and does nothing before the first has.
    plans = make_plan(Dataflow(2, (step(b, 3), step(a, 0)), (2, 3)))
    assert list(plans) == [a[0], b[0]]
    assert [plan.follows for plan in plans.values()] == [False, True]


@pytest.mark.parametrize(
    ("output", "failed", "stays", "report"),
    [
        (None, False, False, Report.NOTE),
        # Its size does not matter: the owner does not need the value.
        (None, False, True, Report.NOTE),
        (None, True, False, Report.VALUE),
        (0, False, False, Report.VALUE),
        (0, True, False, Report.VALUE),
        (0, False, True, Report.STORED),
    ],
)
def test_what_is_reported_of_a_result(output: int | None, failed: bool, stays: bool, report: Report) -> None:
    result = Result(3, (), used=False, awaited=False, reported=True, output=output)
    assert result.report(failed=failed, stays=stays) is report


def test_an_output_that_its_process_still_uses_is_copied_if_the_owner_may_free_it() -> None:
    shared = Result(3, (), used=True, awaited=False, reported=True, output=0)
    assert shared.outlives(is_inline=False)
    # A small one travels to the owner.
    assert not shared.outlives(is_inline=True)
    assert not replace(shared, used=False).outlives(is_inline=False)
    assert not replace(shared, output=None).outlives(is_inline=False)


def test_where_results_go() -> None:
    a, b = actor(1), actor(2)
    # 1: used in its segment only; 2: awaited here and sent; 3: the output; 4: of the other process, used by no step.
    steps = (step(a, 0), step(a, 1), step(actor(1, 17), 2), step(b, 2))
    plans = make_plan(Dataflow(1, steps, (3,)))
    assert plans[a[0]].results == (
        Result(1, (), used=True, awaited=False, reported=False, output=None),
        Result(2, (b[0],), used=True, awaited=True, reported=False, output=None),
        Result(3, (), used=False, awaited=False, reported=True, output=0),
    )
    assert plans[b[0]].results == (Result(4, (), used=False, awaited=False, reported=True, output=None),)
    assert [result.leaves_segment for result in plans[a[0]].results] == [False, True, True]
