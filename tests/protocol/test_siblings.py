"""When the error of a call is no news, because an await has raised the error of a sibling."""

from __future__ import annotations

import pytest

from aiodaft._protocol.ids import CallId, sibling_ids
from aiodaft._protocol.supervision import FailedAwaits

# a, b = one(), two(): calls 1 and 2 of one task; the error of `a` is raised at 10.
A, B, RAISED = CallId(1), CallId(2), 10


@pytest.fixture
def awaits() -> FailedAwaits[str]:
    failed: FailedAwaits[str] = FailedAwaits()
    failed.note("task", A, RAISED)
    return failed


@pytest.mark.parametrize("failed", [5, 15, 25])
def test_a_sibling_that_is_dropped_after_the_error_is_excused_whenever_it_fails(
    awaits: FailedAwaits[str], failed: int
) -> None:
    assert awaits.excuse("task", B, failed, dropped=20)


def test_a_sibling_may_have_been_made_first() -> None:
    failed: FailedAwaits[str] = FailedAwaits()
    failed.note("task", B, RAISED)
    assert failed.excuse("task", A, 12, dropped=20)


def test_a_call_of_another_task_is_not_excused(awaits: FailedAwaits[str]) -> None:
    assert not awaits.excuse("other task", B, 15, dropped=20)


def test_a_ref_that_was_dropped_before_the_error_is_not_excused(awaits: FailedAwaits[str]) -> None:
    assert not awaits.excuse("task", B, 15, dropped=3)


def test_a_call_that_was_made_after_the_error_is_not_excused(awaits: FailedAwaits[str]) -> None:
    assert not awaits.excuse("task", CallId(11), 15, dropped=20)


def test_a_call_that_had_failed_before_the_other_was_made_is_not_excused() -> None:
    failed: FailedAwaits[str] = FailedAwaits()
    failed.note("task", CallId(8), RAISED)
    assert not failed.excuse("task", B, 5, dropped=20)


def test_a_call_is_not_excused_by_a_wait_for_itself_that_was_given_up(awaits: FailedAwaits[str]) -> None:
    assert not awaits.excuse("task", A, 15, dropped=20)


def test_calls_of_one_call_of_a_group_are_siblings() -> None:
    first, second = sibling_ids(A, 2)
    failed: FailedAwaits[str] = FailedAwaits()
    failed.note("task", first, RAISED)
    assert failed.excuse("task", second, 15, dropped=20)
    assert not failed.excuse("task", first, 15, dropped=20)


def test_nothing_is_excused_where_nothing_was_raised() -> None:
    failed: FailedAwaits[str] = FailedAwaits()
    assert not failed.excuse("task", B, 15, dropped=20)


def test_any_failed_sibling_will_do(awaits: FailedAwaits[str]) -> None:
    awaits.note("other task", CallId(3), 11)
    awaits.note("task", CallId(12), 14)
    assert awaits.excuse("task", B, 15, dropped=20)
    assert awaits.excuse("task", CallId(13), 15, dropped=20)


def test_what_is_remembered_is_bounded(awaits: FailedAwaits[str]) -> None:
    for number in range(100, 5000):
        awaits.note("other task", CallId(number), number + 1)
    assert not awaits.excuse("task", B, 15, dropped=20)
