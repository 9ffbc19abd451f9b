"""The states of graphs and runs, and the waits of a participant's share of a run."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import pytest
from dataflows import actor, flows, step
from hypothesis import given
from hypothesis import strategies as st

from aiodaft._protocol.graphs.plan import Dataflow, SubPlan, make_plan
from aiodaft._protocol.graphs.run import (
    GRAPH,
    RUN,
    SHARE,
    UNSENT,
    GraphEvent,
    GraphRuns,
    GraphState,
    Needs,
    OwnedRun,
    RunEvent,
    RunState,
    Share,
    ShareState,
)
from aiodaft._protocol.ids import CallId, PeerId

OWNER = PeerId("owner")


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


def told(max_in_flight: int = 2) -> GraphRuns[OwnedRun]:
    runs: GraphRuns[OwnedRun] = GraphRuns(max_in_flight)
    runs.on(GraphEvent.INSTALLED)
    return runs


def entered(runs: GraphRuns[OwnedRun], *, must_wait: bool = False) -> OwnedRun:
    """A run that was sent if it could begin at once."""
    run = OwnedRun()
    if runs.enter(run, must_wait=must_wait):
        send(run)
    return run


def send(run: OwnedRun, deployment: object = "deployed") -> None:
    run.on(RunEvent.SENT)
    run.deployment = deployment


def test_runs_begin_at_once_while_there_is_room_and_then_in_their_order() -> None:
    runs = told()
    first, second, third, fourth = (entered(runs) for _ in range(4))
    assert [run.number for run in (first, second, third, fourth)] == [1, 2, 3, 4]
    assert list(runs.waiting) == [third, fourth]
    assert not runs.may_begin()
    assert runs.over(first)
    assert runs.may_begin()
    assert runs.turn_came() is None
    send(third)
    assert (list(runs.waiting), list(runs.all)) == ([fourth], [2, 3, 4])
    assert not runs.may_begin()
    assert second.state is third.state is RunState.UNDER_WAY


def test_a_run_waits_behind_one_that_waits_even_if_there_is_room() -> None:
    runs = told()
    behind_a_call = entered(runs, must_wait=True)
    assert entered(runs).state is RunState.WAITING
    assert runs.may_begin()
    assert runs.waiting[0] is behind_a_call


def test_runs_wait_until_the_processes_are_told_and_fail_in_their_turn_if_that_failed() -> None:
    runs: GraphRuns[OwnedRun] = GraphRuns(1)
    first, second = entered(runs), entered(runs)
    assert not runs.may_begin()
    broken = ValueError("gone")
    runs.on(GraphEvent.FAILED, broken)
    for run in (first, second):
        assert runs.may_begin()
        assert runs.turn_came() is broken
        assert runs.over(run)
        assert run.state is RunState.OVER
    runs.on(GraphEvent.MOVED)
    assert runs.broken is None
    assert not runs.may_begin()


def test_a_run_that_is_withdrawn_gives_way_and_is_over_once() -> None:
    runs = told(1)
    under_way, withdrawn, last = (entered(runs) for _ in range(3))
    runs.withdraw(withdrawn)
    assert runs.over(withdrawn)
    assert not runs.over(withdrawn)
    assert (withdrawn.state, list(runs.waiting)) == (RunState.OVER, [last])
    assert runs.sent_with("deployed") == [under_way]
    assert runs.sent_with("another") == []


def test_the_inputs_of_a_run_that_is_withdrawn_are_copied_to_the_end() -> None:
    runs = told()
    run = entered(runs, must_wait=True)
    run.on(RunEvent.COPY)
    runs.withdraw(run)
    assert runs.over(run)
    states = [run.state]
    run.on(RunEvent.COPIED)
    assert [*states, run.state] == [RunState.ABANDONED, RunState.OVER]


def test_each_missing_report_counts_once_and_the_last_one_ends_the_run() -> None:
    run = OwnedRun()
    send(run)
    a, b = actor(1)[0], actor(2)[0]
    run.missing = {3: a, 4: a, 5: b}
    plain, note = (3, "x"), (4,)
    assert [run.report(item) for item in (plain, note, (9, "of another deployment"))] == [True, True, False]
    assert not run.report(plain)
    assert not run.is_reported
    assert run.lose(b) == [5]
    assert run.is_reported


def test_a_lost_process_ends_what_it_had_and_not_what_begins_meanwhile() -> None:
    runs, process = told(1), actor(1)[0]
    under_way, waiting = entered(runs), entered(runs)
    under_way.missing = {3: process}
    lost = runs.lose(process)
    assert lost == [(under_way, [3])]
    runs.over(under_way)
    runs.turn_came()
    send(waiting)
    waiting.missing = {3: process}
    assert [run for run, _ in lost] == [under_way]
    assert runs.lose(actor(2)[0]) == []


def test_a_result_with_refs_stays_missing_until_they_are_registered() -> None:
    run = OwnedRun()
    run.missing = {3: actor(1)[0], 4: actor(1)[0]}
    with_refs, without = (3, b"", None, ("a ref",), ()), (4, b"", None, (), ())
    assert [run.report(item) for item in (with_refs, without)] == [True, True]
    assert list(run.missing) == [3]


def test_a_run_that_was_not_sent_expects_nothing_and_is_not_reported() -> None:
    run = OwnedRun()
    assert run.lose(actor(1)[0]) == []
    assert not run.is_reported


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


def share_of(plan: SubPlan[Any]) -> Share[str]:
    return Share(Needs(plan, OWNER, 1))


def foreign_values(plan: SubPlan[Any]) -> list[int]:
    return [*plan.inputs, *(value for values in plan.receives.values() for value in values)]


@given(flow=flows(), data=st.data())
def test_a_share_starts_each_segment_once_with_all_it_needs_whatever_comes_first(
    flow: Dataflow[None], data: st.DataObject
) -> None:
    for plan in make_plan(flow).values():
        share, started = share_of(plan), list[int]()
        left = [len(strand) for strand in plan.strands]
        assert share.run_came(()) == ()
        todo = data.draw(st.permutations(foreign_values(plan)))
        ready = [index for index, missing in enumerate(share.missing) if not missing]
        while todo or ready:
            assert not share.end()
            if ready and (not todo or data.draw(st.booleans())):
                index = ready.pop()
                started.append(index)
                assert share.values.keys() >= set(plan.segments[index].needs)
                for position in plan.segments[index].steps:
                    ready += share.put(plan.results[position].value, "made")
                left[share.needs.strands[index]] -= 1
                share.unfinished = len([segments for segments in left if segments])
            else:
                value = todo.pop()
                ready += share.take(value, "sent")
                assert share.take(value, "again") == ()
        assert sorted(started) == list(range(len(plan.segments)))
        assert share.end()
        assert not share.end()


def test_inputs_that_come_at_once_are_as_good_as_one_by_one() -> None:
    a, b = actor(1), actor(2)
    plan = make_plan(Dataflow(2, (step(b), step(a, 0, 2), step(a, 1)), (3, 4)))[a[0]]
    at_once, one_by_one = share_of(plan), share_of(plan)
    items = tuple((value, "x") for value in plan.inputs)
    assert at_once.run_came(items) == ()
    for value, content in items:
        one_by_one.take(value, content)
    assert (at_once.missing, at_once.to_come) == (one_by_one.missing, one_by_one.to_come) == ([1, 0], 1)
    assert at_once.values == one_by_one.values


@pytest.mark.parametrize("first", ["an encoded input", "a value of another participant"])
def test_inputs_are_taken_one_by_one_if_one_is_encoded_or_a_value_came_before_run(first: str) -> None:
    a, b = actor(1), actor(2)
    plan = make_plan(Dataflow(1, (step(b), step(a, 0, 1)), (2,)))[a[0]]
    share = share_of(plan)
    items: tuple[Any, ...] = ((0, "x"),)
    if first == "an encoded input":
        items = ((0, b"", None, (), ()),)
    else:
        assert share.take(1, "early") == []
    assert share.run_came(items) == items
    assert share.to_come == (2 if first == "an encoded input" else 1)
    ready = [*share.take(0, "x"), *share.take(1, "late")]
    assert ready == [0]
    assert share.to_come == 0


def test_shares_of_two_runs_do_not_count_together() -> None:
    a = actor(1)
    needs = Needs(make_plan(Dataflow(1, (step(a, 0),), (1,)))[a[0]], OWNER, 1)
    first, second = Share[str](needs), Share[str](needs)
    assert first.put(0, "x") == [0]
    assert second.missing == [1]


def test_a_share_knows_what_a_lost_process_has_not_sent() -> None:
    a, b = actor(1), actor(2)
    share = share_of(make_plan(Dataflow(0, (step(b), step(b), step(a, 0, 1)), (2,)))[a[0]])
    share.take(1, "x")
    assert share.expected_from(b[0]) == [0]
    assert share.expected_from(a[0]) == []


def test_a_segment_waits_for_the_makers_of_its_values_if_no_input_is_missing() -> None:
    a, b = actor(1), actor(2)
    share = share_of(make_plan(Dataflow(1, (step(b), step(a, 0, 1)), (2,)))[a[0]])
    assert share.awaits((0, 1)) == []
    share.take(0, "x")
    assert share.awaits((0, 1)) == [1]


def test_the_deadlock_search_finds_strands_by_their_values_and_by_the_numbers_of_outputs() -> None:
    a, b = actor(1), actor(2)
    plan = make_plan(Dataflow(1, (step(a, 0), step(a, 1), step(b, 2), step(actor(1, 17), 3)), (2, 4)))[a[0]]
    needs, another = Needs(plan, OWNER, 5), Needs(plan, OWNER, 6)
    assert needs.maker_of(7, 3)[:2] == (b[0], OWNER)
    host, owner, number, *_ = needs.maker_of(7, 2)
    assert (host, owner) == (a[0], OWNER)
    outputs = (CallId(40), CallId(41))
    assert needs.strand_with(number, 7, outputs) == 0
    assert needs.strand_with(needs.maker_of(7, 4).number, 7, outputs) == 1
    # Of another process, another run, another graph; an ordinary call.
    assert needs.strand_with(needs.maker_of(7, 3).number, 7, outputs) is None
    assert needs.strand_with(number, 8, outputs) is None
    assert another.strand_with(number, 7, outputs) is None
    assert needs.strand_with(CallId(2), 7, outputs) is None
    assert [needs.strand_with(output, 7, outputs) for output in outputs] == [0, 1]


def test_a_share_that_was_dropped_before_its_run_came_is_never_done() -> None:
    a = actor(1)
    share = share_of(make_plan(Dataflow(0, (step(a),), (0,)))[a[0]])
    share.drop()
    share.unfinished = 0
    assert not share.end()
    with pytest.raises(KeyError):
        share.run_came(())
