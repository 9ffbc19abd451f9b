"""The route of a pull: the producer, then the process that the answer names, and in the end the value or an error."""

from __future__ import annotations

from itertools import product

import pytest

from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.objects.broadcast import MAX_HOPS, Pull, Questions
from aiodaft.exceptions import OwnerDied, RemoteProtocolError

LOCAL, OWNER, PRODUCER, RELAY = (PeerId(name) for name in ("local", "owner", "producer", "relay"))
NUMBER = CallId(7)
ERROR = KeyError("broken")


def pull(owner: PeerId = OWNER, first: PeerId = PRODUCER) -> Pull:
    return Pull(LOCAL, (owner, NUMBER), first)


def test_the_answer_names_the_next_process() -> None:
    route = pull()
    assert route.handle(OWNER, None) is None
    assert route.asked == OWNER
    assert route.handle(LOCAL, None) is None
    assert route.asked == LOCAL


@pytest.mark.parametrize("first", [LOCAL, OWNER, PRODUCER])
def test_an_error_ends_the_pull(first: PeerId) -> None:
    with pytest.raises(KeyError):
        pull(first=first).handle(ERROR, None)


def test_the_owner_is_asked_for_a_value_after_its_producer_ended() -> None:
    route = pull()
    assert route.handle(ERROR, None, lost=True) is None
    assert route.asked == OWNER
    with pytest.raises(OwnerDied, match="the owner of a ref, owner, is gone: 'broken'") as caught:
        route.handle(ERROR, None, lost=True)
    assert caught.value.__cause__ is ERROR


def test_the_owner_itself_fails_with_the_end_of_the_producer() -> None:
    with pytest.raises(KeyError):
        pull(owner=LOCAL).handle(ERROR, None, lost=True)


@pytest.mark.parametrize(("answer", "lost"), [(OWNER, False), (ERROR, False), (ERROR, True)])
def test_the_root_is_asked_again_when_its_relay_gives_nothing(answer: PeerId | BaseException, lost: bool) -> None:
    route = pull()
    assert route.handle(RELAY, PRODUCER) is None
    assert route.handle(answer, PRODUCER, lost=lost) == RELAY
    assert route.asked == PRODUCER
    # The root is no relay of itself.
    with pytest.raises(KeyError):
        route.handle(ERROR, PRODUCER)


def test_a_relay_that_owned_the_value_and_ended_ends_the_pull() -> None:
    route = pull()
    route.handle(OWNER, PRODUCER)
    with pytest.raises(OwnerDied):
        route.handle(ERROR, PRODUCER, lost=True)


def test_a_process_is_no_relay_once_the_root_has_left() -> None:
    route = pull()
    route.handle(RELAY, PRODUCER)
    assert route.handle(OWNER, None) is None
    assert route.asked == OWNER


def test_processes_that_name_each_other_end_the_pull() -> None:
    route = pull()
    with pytest.raises(RemoteProtocolError, match="ref 7 of owner"):
        for named in [OWNER, PRODUCER] * MAX_HOPS:
            route.handle(named, None)


def test_a_producer_that_is_lost_again_and_again_is_the_error() -> None:
    route = pull()
    with pytest.raises(KeyError, match="broken"):
        for _ in range(MAX_HOPS):
            route.handle(ERROR, None, lost=True)
            route.handle(PRODUCER, None)


@pytest.mark.parametrize("owner", [OWNER, LOCAL, PRODUCER])
def test_every_sequence_of_answers_ends(owner: PeerId) -> None:
    for steps in product(["moved", "broken", "lost"], repeat=5):
        route = pull(owner)
        for index, step in enumerate(steps):
            asked = route.asked
            if asked == LOCAL and step == "lost":
                break
            try:
                route.handle(
                    [RELAY, OWNER, LOCAL][index % 3] if step == "moved" else ERROR, PRODUCER, lost=step == "lost"
                )
            except (KeyError, OwnerDied):
                assert step != "moved"
                assert route.asked == asked
                break


def test_the_answers_of_a_process_come_in_the_order_of_its_questions() -> None:
    questions: Questions[str] = Questions()
    one, two = (OWNER, CallId(1)), (OWNER, CallId(2))
    for remote, key, waiter in [(PRODUCER, one, "a"), (PRODUCER, one, "b"), (RELAY, one, "c"), (PRODUCER, two, "d")]:
        questions.ask(remote, key, waiter)
    assert [questions.answered(PRODUCER, key) for key in (two, one, one)] == ["d", "a", "b"]
    assert questions.answered(RELAY, one) == "c"
    assert questions.open == {}
    with pytest.raises(RemoteProtocolError, match="relay answers a pull that was not made"):
        questions.answered(RELAY, one)


def test_a_lost_process_answers_none_of_its_questions() -> None:
    questions: Questions[str] = Questions()
    for remote, number, waiter in [(PRODUCER, 1, "a"), (RELAY, 1, "b"), (PRODUCER, 2, "c"), (PRODUCER, 1, "d")]:
        questions.ask(remote, (OWNER, CallId(number)), waiter)
    assert sorted(questions.lost(PRODUCER)) == ["a", "c", "d"]
    assert questions.lost(PRODUCER) == []
    assert list(questions.open) == [(RELAY, (OWNER, CallId(1)))]
