"""A stream ends when its producer ends or its consumer leaves, each once; credit is given half a window at a time."""

from __future__ import annotations

import pytest

from aiodaft._protocol.objects.value import CREDIT_WINDOW, Consumption, Phase

HALF = CREDIT_WINDOW // 2


def stream(*items: str) -> Consumption[str]:
    made: Consumption[str] = Consumption()
    for item in items:
        assert made.add(item)
    return made


def test_the_ends_are_noted_once_in_any_order() -> None:
    one, other = stream(), stream()
    assert (one.end(None), one.end(None), one.phase) == (True, False, Phase.ENDED)
    assert (other.leave(), other.leave(), other.phase) == (True, False, Phase.CLOSING)
    assert (other.end(None), other.leave(), other.end(None), other.phase) == (True, False, False, Phase.CLOSED)


def test_a_producer_that_ended_is_not_told_that_the_consumer_left() -> None:
    ended = stream("a")
    ended.end(None)
    assert not ended.leave()
    assert (ended.phase, ended.first()) == (Phase.CLOSED, None)


def test_an_item_stays_the_first_until_it_is_opened() -> None:
    items = stream("a", "b")
    items.opening = True
    assert items.first() is None
    # Its consumer was cancelled.
    items.opening = False
    assert items.first() == "a"
    items.take("a")
    assert items.first() == "b"


def test_the_error_comes_after_the_last_item_and_once() -> None:
    failed, error = stream("a"), ValueError()
    failed.end(error)
    assert not failed.is_used_up
    failed.take("a")
    assert failed.is_used_up
    assert failed.why_no_more() is error
    assert isinstance(failed.why_no_more(), StopAsyncIteration)


def test_a_consumer_that_left_gets_neither_items_nor_the_error() -> None:
    left = stream("a")
    left.leave()
    left.end(ValueError())
    assert not left.add("b")
    assert left.is_used_up
    assert isinstance(left.why_no_more(), StopAsyncIteration)


def test_an_item_that_was_dropped_while_it_was_opened_takes_no_other() -> None:
    left = stream("a", "b")
    left.leave()
    assert left.take("a") == 0
    assert left.first() is None


def test_every_taken_item_is_credited_in_few_messages() -> None:
    items = stream(*map(str, range(3 * HALF)))
    credit = [items.take(str(index)) for index in range(3 * HALF)]
    assert [given for given in credit if given] == [HALF] * 3
    assert not credit[0]


def test_a_producer_that_ended_gets_no_credit() -> None:
    items = stream(*map(str, range(2 * CREDIT_WINDOW)))
    items.end(None)
    assert not any(items.take(str(index)) for index in range(2 * CREDIT_WINDOW))


def test_the_stream_is_over_with_its_last_loop() -> None:
    looped = stream("a")
    looped.begin_loop(1)
    looped.begin_loop(2)
    assert looped.end_loop(1, "a break")
    assert looped.left is None
    assert looped.end_loop(2, "a break")
    assert looped.left == "a break"
    assert not looped.end_loop(2, "another")
    assert looped.left == "a break"


@pytest.mark.parametrize("how", ["another task takes an item", "the consumer left", "all items were taken"])
def test_a_loop_that_ends_does_not_end_the_stream_if(how: str) -> None:
    looped = stream()
    looped.begin_loop(1)
    if how == "another task takes an item":
        looped.taking = 1
    elif how == "the consumer left":
        looped.leave()
    else:
        looped.end(None)
    assert looped.end_loop(1, "a break")
    assert looped.left is None


def test_a_loop_that_leaves_items_of_a_producer_that_ended_ends_the_stream() -> None:
    looped = stream("a")
    looped.end(None)
    looped.begin_loop(1)
    looped.end_loop(1, "a break")
    assert looped.left == "a break"
