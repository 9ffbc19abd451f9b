"""A value lives while anybody holds it, and is free once it is there and nobody does."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.ownership import Holders

A, B = PeerId("a"), PeerId("b")


def settled() -> Holders:
    """The holders of a value that is there."""
    tenure = Holders()
    tenure.settled = True
    return tenure


def test_a_value_that_nobody_ever_held_is_free_once_it_is_there() -> None:
    tenure = Holders()
    assert not tenure.free
    tenure.settled = True
    assert tenure.free


def test_every_kind_of_holder_keeps_it() -> None:
    tenure = settled()
    tenure.handles = 1
    assert not tenure.free
    tenure.uses, tenure.handles = 1, 0
    assert not tenure.free
    tenure.borrow(A)
    tenure.uses = 0
    assert tenure.held
    tenure.give_back(A)
    assert tenure.free


def test_a_value_that_everybody_dropped_is_free_when_it_comes() -> None:
    tenure = Holders()
    tenure.borrow(A)
    tenure.give_back(A)
    assert not tenure.held
    assert not tenure.free
    tenure.settled = True
    assert tenure.free


def test_a_borrower_gives_back_as_often_as_it_borrowed() -> None:
    tenure = settled()
    tenure.borrow(A)
    tenure.borrow(A)
    tenure.give_back(A)
    assert tenure.held
    tenure.give_back(A)
    assert tenure.free


def test_giving_back_what_one_does_not_have_takes_nothing_from_others() -> None:
    tenure = settled()
    tenure.give_back(A)
    tenure.borrow(B)
    tenure.give_back(A)
    tenure.forget(A)
    assert tenure.held
    tenure.give_back(B)
    tenure.give_back(B)
    tenure.borrow(B)
    assert tenure.held


def test_a_borrower_that_is_gone_holds_nothing_however_often_it_borrowed() -> None:
    tenure = settled()
    tenure.forget(A)
    tenure.borrow(A)
    tenure.borrow(A)
    tenure.forget(A)
    assert tenure.free


def test_refs_do_not_share_their_holders() -> None:
    one, other = settled(), settled()
    one.borrow(A)
    one.handles += 1
    assert other.free


@settings(deadline=None, derandomize=True, database=None, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(["borrow", "give_back", "forget"]), st.sampled_from([A, B])), max_size=30))
def test_any_borrowing_is_counted_by_borrower(steps: list[tuple[str, PeerId]]) -> None:
    tenure, model = settled(), Counter[PeerId]()
    for verb, peer in steps:
        getattr(tenure, verb)(peer)
        if verb == "borrow":
            model[peer] += 1
        elif verb == "forget":
            model[peer] = 0
        else:
            model[peer] = max(0, model[peer] - 1)
        assert tenure.held is (model.total() > 0)
        assert (tenure.borrowers or {}) == +model
