"""The states of a worker process, and whether its callers or its scope get the error of its end."""

from __future__ import annotations

import pytest

from aiodaft._protocol.node.worker import TRANSITIONS, WorkerEvent, WorkerState, how_it_ended
from aiodaft._protocol.numbers import next_state


def state_after(*events: WorkerEvent) -> WorkerState:
    state = WorkerState.STARTING
    for event in events:
        state = next_state(TRANSITIONS, state, event)
    return state


STARTED, LOST, ALIVE, STOP, ENDED, LATE = (
    WorkerEvent.STARTED,
    WorkerEvent.CALLS_LOST,
    WorkerEvent.ALIVE,
    WorkerEvent.STOP,
    WorkerEvent.ENDED,
    WorkerEvent.BLAME_OVER,
)


@pytest.mark.parametrize("events", [(STARTED, ENDED, LATE), (ENDED, LATE), (STARTED, LOST, ALIVE, ENDED, LATE)])
def test_an_accident_without_callers_belongs_to_the_scope(events: tuple[WorkerEvent, ...]) -> None:
    assert state_after(*events) is WorkerState.UNHANDLED


@pytest.mark.parametrize("events", [(STARTED, LOST, ENDED), (STARTED, ENDED, LOST, LATE), (LOST, STARTED, ENDED)])
def test_an_accident_belongs_to_the_callers_that_lost_calls_before_or_soon_after(
    events: tuple[WorkerEvent, ...],
) -> None:
    assert state_after(*events) is WorkerState.OVER


def test_a_caller_that_is_late_does_not_take_the_error_from_the_scope() -> None:
    assert state_after(STARTED, ENDED, LATE, LOST) is WorkerState.UNHANDLED


@pytest.mark.parametrize("before", [(), (STARTED,), (STARTED, LOST), (STARTED, STOP)])
def test_an_end_that_was_wanted_is_no_accident(before: tuple[WorkerEvent, ...]) -> None:
    assert state_after(*before, STOP) is WorkerState.STOPPING
    assert state_after(*before, STOP, LOST, ALIVE, ENDED) is WorkerState.OVER


def test_a_spawn_that_fails_takes_the_error_of_its_worker() -> None:
    assert state_after(ENDED, STOP, LATE) is WorkerState.OVER


def test_what_comes_after_the_end_changes_nothing() -> None:
    assert state_after(ENDED, STARTED, ALIVE) is WorkerState.DIED
    for end in (WorkerState.OVER, WorkerState.UNHANDLED):
        assert {next_state(TRANSITIONS, end, event) for event in (STARTED, LOST, ALIVE, STOP)} == {end}


def test_a_worker_ends_once() -> None:
    for state in (WorkerState.OVER, WorkerState.UNHANDLED, WorkerState.DIED):
        with pytest.raises(ValueError, match=state.name):
            next_state(TRANSITIONS, state, ENDED)


@pytest.mark.parametrize(
    ("exit_code", "signal", "oom", "how"),
    [
        (None, "SIGKILL", True, "was killed by the kernel (SIGKILL): out of memory"),
        (None, "SIGSEGV", False, "was killed by SIGSEGV"),
        (0, None, False, "ended with exit code 0"),
        (None, None, False, "ended, and its exit status is not known"),
    ],
)
def test_errors_say_how_a_worker_ended(exit_code: int | None, signal: str | None, oom: bool, how: str) -> None:
    assert how_it_ended(exit_code, signal, oom=oom) == how
