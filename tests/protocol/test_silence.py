"""When a node that is connected from another machine is asked, and when it is given up."""

from __future__ import annotations

import random

import pytest

from aiodaft._protocol.node.worker import GIVEN_UP_AFTER, PERIOD, Order, Silence, period_of


def looks(silence: Silence, *received: int, awaited: bool = True) -> list[Order | None]:
    return [silence.look(count, awaited=awaited) for count in received]


def test_a_node_that_owes_an_answer_and_sends_nothing_is_asked_once_and_then_given_up() -> None:
    assert looks(Silence(), 7, 7, 7, 7, 7) == [None, Order.ASK, None, None, Order.GIVE_UP]


def test_while_something_comes_nothing_is_asked() -> None:
    assert looks(Silence(), *range(1, 100)) == [None] * 99


def test_a_node_that_owes_nothing_is_not_asked_and_its_silence_does_not_count() -> None:
    silence = Silence()
    assert looks(silence, 7, 7, 7, 7, 7, 7, awaited=False) == [None] * 6
    assert looks(silence, 7, 7, 7, 7) == [Order.ASK, None, None, Order.GIVE_UP]


def test_an_answer_begins_the_count_again() -> None:
    silence = Silence()
    for count in range(1, 20):
        assert looks(silence, count, count, count, count) == [None, Order.ASK, None, None]


@pytest.mark.parametrize("seed", range(100))
def test_d69_pauses_of_the_watcher_and_answers_within_two_periods_lose_no_node(seed: int) -> None:
    rng, silence, now, received, answer_at = random.Random(seed), Silence(), 0.0, 0, None
    for _ in range(1000):
        # A look may be late; bytes that came meanwhile may be read after it.
        now += PERIOD + (rng.expovariate(0.01) if rng.random() < 0.1 else 0)
        late = rng.random() < 0.5
        if answer_at is not None and answer_at < now - (PERIOD if late else 0):
            received, answer_at = received + 1, None
        order = silence.look(received, awaited=True)
        assert order is not Order.GIVE_UP
        if order is Order.ASK:
            answer_at = now + rng.uniform(0, 2 * PERIOD)


def test_a_silent_node_is_noticed_within_fifteen_seconds() -> None:
    # Something may have come just after a look.
    assert PERIOD * (GIVEN_UP_AFTER + 1) <= 15


def test_a_node_with_a_short_lease_looks_more_often() -> None:
    assert [period_of(lease) for lease in (1, 10, 60)] == [0.3, PERIOD, PERIOD]
