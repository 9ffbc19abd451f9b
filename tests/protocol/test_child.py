"""The states of a supervised child."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest

from aiodaft._protocol.numbers import next_state
from aiodaft._protocol.supervision import (
    REACHABLE,
    SETTLED,
    STOPPING,
    TRANSITIONS,
    ChildEvent,
    ChildState,
    Fate,
    fate_of,
    next_task,
)


def walk(*events: ChildEvent) -> list[ChildState]:
    states = [ChildState.STARTING]
    for event in events:
        states.append(next_state(TRANSITIONS, states[-1], event))
    return states[1:]


def test_a_child_that_dies_waits_for_its_turn_and_is_made_again() -> None:
    assert walk(ChildEvent.MADE, ChildEvent.FAILED, ChildEvent.TURN, ChildEvent.MADE) == [
        ChildState.UP,
        ChildState.DOWN,
        ChildState.STARTING,
        ChildState.UP,
    ]


def test_a_sibling_of_a_child_that_died_is_stopped_before_it_waits_for_its_turn() -> None:
    assert walk(ChildEvent.MADE, ChildEvent.RESTART, ChildEvent.STOPPED) == [
        ChildState.UP,
        ChildState.LEAVING,
        ChildState.DOWN,
    ]


def test_a_child_that_was_made_in_vain_is_stopped() -> None:
    assert walk(ChildEvent.RESTART, ChildEvent.MADE, ChildEvent.STOPPED)[-2:] == [ChildState.LEAVING, ChildState.DOWN]
    assert walk(ChildEvent.NO_MORE, ChildEvent.MADE, ChildEvent.STOPPED)[-2:] == [ChildState.ENDING, ChildState.OVER]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((ChildEvent.MADE,), ChildState.RETIRED),
        ((ChildEvent.MADE, ChildEvent.FAILED), ChildState.OVER),
        ((ChildEvent.MADE, ChildEvent.RESTART), ChildState.ENDING),
        ((ChildEvent.MADE, ChildEvent.FAILED, ChildEvent.TURN), ChildState.ENDING),
        ((ChildEvent.MADE, ChildEvent.DROP), ChildState.ENDING),
    ],
)
def test_no_more_restarts_leave_a_process_to_stop_only_where_there_is_one(
    before: tuple[ChildEvent, ...], after: ChildState
) -> None:
    assert walk(*before, ChildEvent.NO_MORE)[-1] is after
    # A second wish changes nothing.
    if after is not ChildState.OVER:
        assert walk(*before, ChildEvent.NO_MORE, ChildEvent.NO_MORE)[-1] is after


def test_what_is_over_stays_over() -> None:
    for event in ChildEvent:
        if event is ChildEvent.ENDED:
            assert next_state(TRANSITIONS, ChildState.OVER, event) is ChildState.OVER
        else:
            with pytest.raises(ValueError, match="OVER"):
                next_state(TRANSITIONS, ChildState.OVER, event)


def test_a_child_that_settles_is_never_started_again() -> None:
    for state, event in product(SETTLED, ChildEvent):
        try:
            assert next_state(TRANSITIONS, state, event) in SETTLED
        except ValueError:
            continue


def test_every_state_can_end() -> None:
    assert {next_state(TRANSITIONS, state, ChildEvent.ENDED) for state in ChildState} == {ChildState.OVER}
    assert not REACHABLE & STOPPING


@dataclass
class Sibling:
    state: ChildState
    due: float = 0


def test_siblings_are_stopped_in_reverse_order_before_the_first_is_started_when_all_are_due() -> None:
    first, second, third = Sibling(ChildState.LEAVING, 1), Sibling(ChildState.DOWN, 3), Sibling(ChildState.ENDING, 2)
    siblings = [Sibling(ChildState.UP, 9), first, second, third]
    assert next_task(siblings) == (third, None)
    third.state = ChildState.OVER
    assert next_task(siblings) == (first, None)
    first.state = ChildState.DOWN
    assert next_task(siblings) == (first, 3)
    first.state = second.state = ChildState.UP
    assert next_task(siblings) is None


def test_what_the_end_of_a_process_means_for_its_actors() -> None:
    fates = {ChildState.STARTING: Fate.NOT_MADE, ChildState.UP: Fate.RESTART, ChildState.RETIRED: Fate.OVER}
    assert {state: fate_of(state, wanted=False) for state in ChildState} == {
        state: fates.get(state, Fate.NOTHING) for state in ChildState
    }
    assert fate_of(ChildState.UP, wanted=True) is Fate.OVER
