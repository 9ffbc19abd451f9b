"""A stream ends when its producer ends or its consumer leaves, each once; credit is given half a window at a time."""

from __future__ import annotations

from itertools import permutations

from aiodaft._protocol.stream import CREDIT_WINDOW, Consumption, Event

HALF = CREDIT_WINDOW // 2


def test_both_ends_are_noted_once_in_any_order() -> None:
    for first, second in permutations(Event):
        stream = Consumption()
        assert not (stream.is_over)
        assert not (stream.is_left)
        assert stream.handle(first)
        assert not stream.handle(first)
        assert (stream.is_over, stream.is_left) == (first is Event.END, first is Event.LEAVE)
        assert stream.handle(second)
        assert not (stream.handle(first))
        assert not (stream.handle(second))
        assert stream.is_over
        assert stream.is_left


def test_every_taken_item_is_credited_in_few_messages() -> None:
    stream = Consumption()
    credit = [stream.take() for _ in range(3 * HALF)]
    assert [given for given in credit if given] == [HALF] * 3
    assert not credit[0]


def test_a_producer_that_ended_gets_no_credit() -> None:
    stream = Consumption()
    stream.handle(Event.END)
    assert not any(stream.take() for _ in range(2 * CREDIT_WINDOW))
