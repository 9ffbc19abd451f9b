"""A process lends its refs until each borrower gave them back or is gone, and borrows those of others once."""

from __future__ import annotations

import gc

import pytest

from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.objects.value import Borrowing, Value

HERE, A, B = PeerId("here"), PeerId("a"), PeerId("b")
ONE, TWO = CallId(1), CallId(2)


@pytest.fixture
def table() -> Borrowing[Value]:
    return Borrowing(HERE)


def shared(table: Borrowing[Value], number: CallId = ONE) -> Value:
    value = Value()
    table.share(number, value)
    return value


def borrowed(table: Borrowing[Value]) -> Value:
    value = Value()
    value.own = False
    table.borrow(A, ONE, value)
    return value


def test_a_ref_is_found_once_it_was_shared(table: Borrowing[Value]) -> None:
    assert table.find(HERE, ONE) is None
    value = shared(table)
    assert value.shared
    assert table.find(HERE, ONE) is value
    assert table.find(A, ONE) is None


def test_a_ref_is_found_while_a_call_has_it_as_an_argument(table: Borrowing[Value]) -> None:
    value = Value()
    table.use(ONE, value)
    assert (table.find(HERE, ONE), value.in_use, value.shared) == (value, True, False)
    # A borrowed ref, which its owner gave the same number, is used no more.
    table.unused(ONE, borrowed(table))
    assert table.find(HERE, ONE) is value
    value.end_use(None)
    table.unused(ONE, value)
    assert (table.find(HERE, ONE), value.in_use) == (None, False)


def test_a_borrowed_ref_that_is_passed_on_is_still_its_owners(table: Borrowing[Value]) -> None:
    value = borrowed(table)
    table.share(ONE, value)
    assert not value.shared
    assert table.find(HERE, ONE) is None
    assert table.find(A, ONE) is value


def test_a_lent_ref_lives_until_every_borrower_gave_it_back(table: Borrowing[Value]) -> None:
    value = shared(table)
    table.lend(ONE, A)
    table.lend(ONE, B)
    assert value.in_use
    assert table.take_back(ONE, A) == []
    assert table.take_back(ONE, B) == [value]
    assert table.take_back(ONE, B) == []


def test_the_table_keeps_a_ref_only_while_it_is_lent(table: Borrowing[Value]) -> None:
    shared(table)
    gc.collect()
    assert table.find(HERE, ONE) is None
    value = shared(table)
    table.lend(ONE, A)
    del value
    gc.collect()
    assert table.find(HERE, ONE) is not None
    table.take_back(ONE, A)
    gc.collect()
    assert table.find(HERE, ONE) is None


def test_a_freed_ref_is_not_lent(table: Borrowing[Value]) -> None:
    value = shared(table)
    table.lend(ONE, A)
    table.forget(ONE)
    table.lend(ONE, B)
    assert table.find(HERE, ONE) is None
    assert table.take_back(ONE, A) == []
    assert value.borrowers == {A: 1}


def test_a_process_that_is_gone_gives_back_all_it_borrowed(table: Borrowing[Value]) -> None:
    one, two = shared(table, ONE), shared(table, TWO)
    for peer in (A, A, B):
        table.lend(ONE, peer)
    table.lend(TWO, A)
    assert table.peer_lost(A) == [two]
    assert one.borrowers == {B: 1}
    assert table.peer_lost(A) == []
    assert table.peer_lost(B) == [one]


def test_a_borrowed_ref_is_given_back_once(table: Borrowing[Value]) -> None:
    value = borrowed(table)
    assert value.registered
    assert table.give_back(A, ONE, value)
    assert table.find(A, ONE) is None
    assert not table.give_back(A, ONE, value)


def test_an_old_ref_that_is_given_back_leaves_its_successor(table: Borrowing[Value]) -> None:
    old = borrowed(table)
    new = borrowed(table)
    # Each of them registered with the owner, which counts both.
    assert table.give_back(A, ONE, old)
    assert table.find(A, ONE) is new


def test_the_owner_is_not_told_of_a_ref_that_it_does_not_count(table: Borrowing[Value]) -> None:
    assert not table.give_back(A, ONE, Value())
