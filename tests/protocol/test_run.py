"""The states of graphs and runs, and what a participant's share of a run waits for."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import pytest
from dataflows import actor, flows, step
from hypothesis import given
from hypothesis import strategies as st

from aiodaft._protocol.plan import Dataflow, SubPlan, make_plan
from aiodaft._protocol.run import (
    GRAPH,
    RUN,
    SHARE,
    UNSENT,
    GraphEvent,
    GraphState,
    Needs,
    RunEvent,
    RunState,
    Share,
    ShareState,
    may_begin,
)


@pytest.mark.parametrize("table", [GRAPH, RUN, SHARE])
def test_every_state_is_in_its_table_and_can_be_reached(table: dict[IntEnum, dict[IntEnum, IntEnum]]) -> None:
    states = type(next(iter(table)))
    assert set(table) == set(states)
    first = {GraphState: GraphState.PREPARING, RunState: RunState.WAITING, ShareState: ShareState.EXPECTED}[states]
    reached, todo = {first}, [first]
    while todo:
        for state in set(table[todo.pop()].values()) - reached:
            reached.add(state)
            todo.append(state)
    assert reached == set(states)


def test_a_graph_that_is_closed_stays_broken_for_the_runs_that_wait() -> None:
    for state in GraphState:
        assert GRAPH[state][GraphEvent.FAILED] is GraphState.BROKEN
        assert GRAPH[state][GraphEvent.MOVED] is GraphState.PREPARING


@pytest.mark.parametrize(
    ("state", "under_way", "begins"),
    [
        (GraphState.PREPARING, 0, False),
        (GraphState.READY, 0, True),
        (GraphState.READY, 1, True),
        (GraphState.READY, 2, False),
        # It fails in its turn.
        (GraphState.BROKEN, 0, True),
    ],
)
def test_a_run_begins_when_the_graph_is_told_and_has_room(state: GraphState, under_way: int, begins: bool) -> None:
    assert may_begin(state, under_way, max_in_flight=2) is begins


@given(events=st.lists(st.sampled_from(RunEvent), max_size=8))
def test_a_run_is_sent_at_most_once_and_never_comes_back(events: list[RunEvent]) -> None:
    state, sent = RunState.WAITING, 0
    for event in events:
        if event not in RUN[state]:
            continue
        before, state = state, RUN[state][event]
        sent += event is RunEvent.SENT
        assert before is not RunState.OVER
        assert not (state in UNSENT and before not in UNSENT)
    assert sent <= 1


def test_inputs_that_are_being_copied_outlive_a_run_that_was_cancelled() -> None:
    abandoned = RUN[RUN[RunState.WAITING][RunEvent.COPY]][RunEvent.ENDED]
    assert abandoned is RunState.ABANDONED
    assert RUN[abandoned] == {RunEvent.COPIED: RunState.OVER}


def foreign_values(plan: SubPlan[Any]) -> list[int]:
    return [*plan.inputs, *(value for values in plan.receives.values() for value in values)]


@given(flow=flows(), data=st.data())
def test_a_share_starts_each_segment_once_with_all_it_needs_whatever_comes_first(
    flow: Dataflow[None], data: st.DataObject
) -> None:
    for plan in make_plan(flow).values():
        share, here, started = Share(Needs(plan)), set[int](), list[int]()
        share.run_came(0)
        todo = data.draw(st.permutations(foreign_values(plan)))
        ready = [index for index, missing in enumerate(share.missing) if not missing]
        while todo or ready:
            assert not share.end()
            if ready and (not todo or data.draw(st.booleans())):
                index = ready.pop()
                started.append(index)
                assert here.issuperset(plan.segments[index].needs)
                values = [plan.values[position] for position in plan.segments[index].steps]
                share.unfinished -= 1
            else:
                values = [todo.pop()]
                share.to_come -= 1
            for value in values:
                here.add(value)
                ready += share.value_came(value)
        assert sorted(started) == list(range(len(plan.segments)))
        assert share.end()
        assert not share.end()


def test_inputs_that_come_at_once_are_as_good_as_one_by_one() -> None:
    a, b = actor(1), actor(2)
    plan = make_plan(Dataflow(2, (step(b), step(a, 0, 2), step(a, 1)), (3, 4)))[a[0]]
    at_once, one_by_one = Share(Needs(plan)), Share(Needs(plan))
    at_once.run_came(2)
    for value in plan.inputs:
        one_by_one.to_come -= 1
        one_by_one.value_came(value)
    assert (at_once.missing, at_once.to_come) == (one_by_one.missing, one_by_one.to_come) == ([1, 0], 1)


def test_shares_of_two_runs_do_not_count_together() -> None:
    a = actor(1)
    needs = Needs(make_plan(Dataflow(1, (step(a, 0),), (1,)))[a[0]])
    first, second = Share(needs), Share(needs)
    assert list(first.value_came(0)) == [0]
    assert second.missing == [1]


def test_a_share_that_was_dropped_before_its_run_came_is_never_done() -> None:
    a = actor(1)
    share = Share(Needs(make_plan(Dataflow(0, (step(a),), (0,)))[a[0]]))
    share.drop()
    share.unfinished = 0
    assert not share.end()
    with pytest.raises(KeyError):
        share.run_came(0)
