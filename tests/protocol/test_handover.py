"""A value is sent without a question where that is possible, and each call gets one answer, or asks."""

from __future__ import annotations

import pytest

from aiodaft._protocol.calls.outgoing import FORWARDED, IN_MESSAGE, IN_PLACE, PULLED, Handover, Way, choose
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.objects.value import Key

OWNER, PRODUCER, CONSUMER = PeerId("owner"), PeerId("producer"), PeerId("consumer")
KEY: Key = (OWNER, CallId(7))


@pytest.mark.parametrize(
    ("plain", "producer", "relayed", "way"),
    [
        (True, None, False, IN_MESSAGE),
        (True, PRODUCER, False, IN_MESSAGE),
        (False, CONSUMER, False, IN_PLACE),
        (False, CONSUMER, True, IN_PLACE),
        (False, PRODUCER, False, FORWARDED),
        (False, PRODUCER, True, PULLED),
        (False, None, False, PULLED),
    ],
)
def test_the_owner_chooses_the_way(plain: bool, producer: PeerId | None, relayed: bool, way: Way) -> None:
    assert choose(plain, producer, CONSUMER, relayed=relayed) is way


def test_an_answer_goes_to_the_call_that_expects_it_also_if_it_comes_first() -> None:
    handover: Handover[str, str] = Handover()
    assert handover.expect(PRODUCER, KEY, "call 1") is None
    assert handover.came(PRODUCER, KEY, "x") == "call 1"
    assert handover.came(PRODUCER, KEY, "y") is None
    assert handover.expect(PRODUCER, KEY, "call 2") == "y"
    assert handover.is_empty


def test_each_call_gets_one_answer() -> None:
    handover: Handover[str, str] = Handover()
    assert [handover.expect(PRODUCER, KEY, call) for call in ("call 1", "call 2")] == [None, None]
    assert [handover.came(PRODUCER, KEY, "x") for _ in range(3)] == ["call 1", "call 2", None]
    assert handover.expect(PRODUCER, KEY, "call 3") == "x"
    assert handover.is_empty


def test_when_the_producer_is_lost_its_calls_ask_and_what_came_stays() -> None:
    handover: Handover[str, str] = Handover()
    other: Key = (OWNER, CallId(8))
    handover.came(PRODUCER, other, "y")
    handover.expect(PRODUCER, KEY, "call 1")
    assert handover.lost(PRODUCER) == [(KEY, "call 1")]
    assert handover.expect(PRODUCER, other, "call 2") == "y"
    assert handover.is_empty


def test_when_the_owner_is_lost_nothing_of_it_is_kept() -> None:
    handover: Handover[str, str] = Handover()
    handover.came(PRODUCER, (OWNER, CallId(8)), "y")
    handover.expect(PRODUCER, KEY, "call 1")
    assert handover.lost(OWNER) == []
    assert handover.is_empty


def test_after_ask_an_answer_that_comes_nevertheless_is_dropped() -> None:
    handover: Handover[str, str] = Handover()
    handover.expect(PRODUCER, KEY, "call 1")
    handover.expect(PRODUCER, (OWNER, CallId(8)), "call 2")
    assert handover.ask(KEY) == ["call 1"]
    assert handover.ask(KEY) == []
    assert handover.came(PRODUCER, KEY, "x") is None
    assert handover.lost(PRODUCER) == [((OWNER, CallId(8)), "call 2")]
    assert handover.is_empty


def test_with_a_new_connection_to_the_producer_calls_ask_and_answers_are_dropped_but_for_those_that_had_come() -> None:
    handover: Handover[str, str] = Handover()
    other: Key = (OWNER, CallId(8))
    handover.came(PRODUCER, other, "y")
    handover.expect(PRODUCER, KEY, "call 1")
    handover.expect(CONSUMER, KEY, "call 2")
    assert handover.doubt(PRODUCER) == [(KEY, "call 1")]
    assert handover.expect(PRODUCER, other, "call 3") == "y"
    # That of call 1 may have been lost: the call that this one is for comes later.
    assert handover.came(PRODUCER, KEY, "x") is None
    assert handover.expect(PRODUCER, KEY, "call 4") == OWNER
    assert handover.expect(PRODUCER, other, "call 5") == OWNER
    assert handover.came(CONSUMER, KEY, "x") == "call 2"
    assert handover.is_empty


def test_with_a_new_connection_to_the_owner_what_came_for_lost_calls_is_not_kept() -> None:
    handover: Handover[str, str] = Handover()
    handover.came(PRODUCER, KEY, "x")
    assert handover.doubt(OWNER) == []
    assert handover.is_empty
    assert handover.came(PRODUCER, KEY, "x") is None
    assert handover.is_empty
    assert handover.expect(PRODUCER, KEY, "call 2") == OWNER


def test_calls_of_a_value_ask_for_ever_once_its_owner_has_lost_the_producer() -> None:
    handover: Handover[str, str] = Handover()
    handover.expect(PRODUCER, KEY, "call 1")
    assert handover.ask(KEY) == ["call 1"]
    assert handover.came(PRODUCER, KEY, "x") is None
    assert handover.expect(PRODUCER, KEY, "call 2") == OWNER
    assert handover.expect(PRODUCER, (OWNER, CallId(8)), "call 3") is None
