"""A value settles once, lives while it has holders, and its error is reported if no code can be told of it any more."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.objects.value import (
    FAILED,
    FREED,
    HERE,
    PENDING,
    THERE,
    Status,
    Value,
    Verdict,
    Where,
    first_error,
)

A, B = PeerId("a"), PeerId("b")


def settled() -> Value:
    value = Value()
    value.advance(HERE)
    return value


@pytest.mark.parametrize("status", [HERE, THERE, FAILED])
def test_a_value_settles_once(status: Status) -> None:
    value = Value()
    assert not value.settled
    assert value.advance(status)
    assert value.settled
    assert [late for late in (HERE, THERE, FAILED, PENDING) if value.advance(late)] == []
    assert value.status is status


@pytest.mark.parametrize("status", [HERE, THERE, FAILED])
def test_a_settled_value_is_freed_as_often_as_a_user_likes(status: Status) -> None:
    value = Value()
    assert not value.advance(FREED)
    value.advance(status)
    assert value.advance(FREED)
    assert value.advance(FREED)


def test_a_value_that_was_never_held_is_free_once_it_is_there() -> None:
    value = Value()
    assert not value.free
    value.advance(THERE)
    assert value.free


def test_every_kind_of_holder_keeps_it() -> None:
    value = settled()
    value.handles = 1
    assert not value.free
    value.uses, value.handles = 1, 0
    assert not value.free
    value.borrow(A)
    value.uses = 0
    assert value.held
    value.give_back(A)
    assert value.free


def test_a_value_that_all_holders_dropped_is_free_when_it_comes() -> None:
    value = Value()
    value.borrow(A)
    value.give_back(A)
    assert not value.held
    assert not value.free
    value.advance(HERE)
    assert value.free


def test_a_borrower_gives_back_as_often_as_it_borrowed() -> None:
    value = settled()
    value.borrow(A)
    value.borrow(A)
    value.give_back(A)
    assert value.held
    value.give_back(A)
    assert value.free


def test_giving_back_what_one_does_not_have_takes_nothing_from_others() -> None:
    value = settled()
    value.give_back(A)
    value.borrow(B)
    value.give_back(A)
    value.forget(A)
    assert value.held
    value.give_back(B)
    value.give_back(B)
    value.borrow(B)
    assert value.held


def test_a_borrower_that_is_gone_holds_nothing_however_often_it_borrowed() -> None:
    value = settled()
    value.forget(A)
    value.borrow(A)
    value.borrow(A)
    value.forget(A)
    assert value.free


def test_refs_do_not_share_their_holders() -> None:
    one, other = settled(), settled()
    one.borrow(A)
    one.handles += 1
    assert other.free


@pytest.mark.parametrize(
    ("status", "lost", "where"),
    [
        (HERE, True, Where.HERE),
        (HERE, False, Where.HERE),
        (THERE, True, Where.LOST),
        (THERE, False, Where.PRODUCER),
    ],
)
def test_the_owner_names_the_producer_while_that_lives(status: Status, lost: bool, where: Where) -> None:
    value = Value()
    value.handles = 1
    value.advance(status)
    assert value.where(producer_lost=lost) is where
    # This process could not have it; how the producer ended says more.
    value.error = ValueError()
    assert value.where(producer_lost=lost) is (Where.LOST if where is Where.LOST else Where.FAILED)
    value.handles = 0
    assert value.where(producer_lost=lost) is Where.NOWHERE


def test_a_value_is_in_use_by_calls_and_other_processes_not_by_the_refs_of_its_owner() -> None:
    value = settled()
    value.handles = 1
    assert not value.in_use
    value.uses = 1
    assert value.in_use
    value.uses = 0
    value.borrow(A)
    assert value.in_use
    value.give_back(A)
    assert not value.in_use


def failed_value(*, handles: int = 0, uses: int = 0, seen: bool = False) -> Value:
    value = Value()
    value.handles, value.uses, value.seen = handles, uses, seen
    value.error = ValueError()
    value.advance(FAILED)
    return value


def test_an_error_is_reported_when_the_last_ref_is_dropped_before_code_saw_it() -> None:
    assert failed_value(handles=1).judge_error() is Verdict.HOLD
    assert failed_value().judge_error() is Verdict.REPORT
    assert failed_value(seen=True).judge_error() is Verdict.WAIT


def test_an_error_belongs_to_the_call_that_uses_the_value() -> None:
    value = failed_value(uses=1)
    assert value.judge_error() is Verdict.WAIT
    assert value.end_use(None)


@pytest.mark.parametrize(("handles", "failed", "seen"), [(0, True, True), (1, True, False), (0, False, False)])
def test_a_call_that_fails_before_its_argument_does_tells_of_both(handles: int, failed: bool, seen: bool) -> None:
    value = Value()
    value.handles, value.uses = handles, 1
    assert value.end_use(ValueError("no") if failed else None) is seen


@pytest.mark.parametrize(("own", "verdict"), [(ValueError("no"), Verdict.WAIT), (ValueError("so"), Verdict.REPORT)])
def test_an_error_that_a_call_with_the_value_had_before_is_not_told_again(own: Exception, verdict: Verdict) -> None:
    value = Value()
    value.handles = value.uses = 1
    value.end_use(ValueError("no"))
    value.advance(FAILED)
    value.error, value.handles = own, 0
    assert value.judge_error() is verdict


@settings(deadline=None, derandomize=True, database=None, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(["borrow", "give_back", "forget"]), st.sampled_from([A, B])), max_size=30))
def test_any_borrowing_is_counted_by_borrower(steps: list[tuple[str, PeerId]]) -> None:
    value, model = settled(), Counter[PeerId]()
    for verb, peer in steps:
        getattr(value, verb)(peer)
        if verb == "borrow":
            model[peer] += 1
        elif verb == "forget":
            model[peer] = 0
        else:
            model[peer] = max(0, model[peer] - 1)
        assert value.held is (model.total() > 0)
        assert (value.borrowers or {}) == +model


def test_a_call_goes_on_while_anything_but_its_refs_needs_it() -> None:
    value = Value()
    value.handles = 1
    assert not value.goes_on(waiters=False)
    assert value.goes_on(waiters=True)
    value.interested = 1
    assert value.goes_on(waiters=False)
    value.interested, value.uses = 0, 1
    assert value.goes_on(waiters=False)
    # The owner decides.
    borrowed = Value()
    borrowed.own = False
    assert borrowed.goes_on(waiters=False)


def test_a_list_fails_with_its_first_error() -> None:
    assert first_error([settled(), settled()]) == (None, False)
    one, other = failed_value(seen=True), failed_value()
    assert first_error([settled(), one, other]) == (one.error, True)
    assert first_error([other, one]) == (other.error, False)
