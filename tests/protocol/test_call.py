"""A call is answered once, never begins after it was withdrawn, and its first cancellation counts."""

from __future__ import annotations

from itertools import product

import pytest

from aiodaft._protocol.calls.mailbox import (
    ABANDONED,
    ANSWER,
    ANSWERED,
    CANCEL,
    CANCELLED,
    EXPIRE,
    FETCHED,
    FETCHING,
    GIVEN_UP,
    GONE,
    LATE,
    NEXT,
    OVER,
    QUEUED,
    START,
    STARTED,
    WAITING,
    WANTED,
    WITHDRAW,
    WITHDRAWN,
    Event,
    Life,
    Stage,
)


def after(*events: Event, stage: Stage = FETCHING) -> Stage:
    """The stage after these events, none of which comes too late."""
    life = Life()
    life.stage = stage
    for event in events:
        assert life.handle(event), (life.stage, event)
    return life.stage


@pytest.mark.parametrize(
    ("events", "stage"),
    [
        ((FETCHED, START, ANSWER), OVER),
        ((WITHDRAW, ANSWER), OVER),
        ((FETCHED, WITHDRAW, ANSWER), OVER),
        ((FETCHED, START, WITHDRAW, ANSWER), OVER),
        ((FETCHED, START, CANCEL, ANSWER), ABANDONED),
        ((FETCHED, START, CANCEL, EXPIRE, ANSWER), ABANDONED),
        ((ANSWER,), OVER),
    ],
)
def test_every_life_ends_with_one_answer(events: tuple[Event, ...], stage: Stage) -> None:
    assert after(*events) is stage
    assert not any(stage in NEXT[event] for event in Event)


def test_a_call_is_queued_unless_its_arguments_have_to_be_fetched() -> None:
    assert Life().stage is QUEUED


@pytest.mark.parametrize("stage", Stage)
def test_an_answered_call_cannot_be_answered_again(stage: Stage) -> None:
    life = Life()
    life.stage = stage
    assert life.handle(ANSWER) is (stage not in ANSWERED)
    assert life.answered
    assert not life.handle(ANSWER)


def test_a_call_starts_only_from_the_queue() -> None:
    assert NEXT[START].keys() == {QUEUED}
    assert after(START, stage=QUEUED) is STARTED


def test_arguments_that_come_too_late_change_nothing() -> None:
    life = Life()
    life.stage = WITHDRAWN
    assert not life.handle(FETCHED)
    assert life.stage is WITHDRAWN


def test_a_withdrawn_call_never_begins_and_a_begun_one_is_not_withdrawn() -> None:
    assert {event for event in Event if WITHDRAWN in NEXT[event]} == {ANSWER}
    assert not NEXT[WITHDRAW].keys() & GIVEN_UP


def test_a_second_cancellation_changes_nothing_and_a_deadline_still_does() -> None:
    life = Life()
    life.stage = CANCELLED
    assert life.given_up
    assert not life.handle(CANCEL)
    assert life.handle(EXPIRE)
    assert (life.stage, life.given_up, life.answered) == (LATE, True, False)


@pytest.mark.parametrize(("stage", "event"), list(product(Stage, Event)))
def test_what_comes_too_late_is_refused_and_leaves_the_stage(stage: Stage, event: Event) -> None:
    life = Life()
    life.stage = stage
    assert life.handle(event) is (stage in NEXT[event])
    assert life.stage is NEXT[event].get(stage, stage)


def test_the_groups_of_stages_do_not_contradict_each_other() -> None:
    assert WAITING < WANTED
    assert not WANTED & (GIVEN_UP | GONE | ANSWERED)
    assert {*WANTED, *GIVEN_UP, *GONE} == set(Stage)
    assert {ABANDONED, OVER} == ANSWERED
