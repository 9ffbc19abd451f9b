"""The route of a pull: the producer, then the process that the answer names, and in the end the value or an error."""

from __future__ import annotations

from itertools import product

import pytest

from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.pull import MAX_HOPS, Answer, Next, Pull
from aiodaft.exceptions import RemoteProtocolError

LOCAL, OWNER, PRODUCER, RELAY = (PeerId(name) for name in ("local", "owner", "producer", "relay"))
NUMBER = CallId(7)


def pull(owner: PeerId = OWNER, first: PeerId = PRODUCER) -> Pull:
    return Pull(LOCAL, owner, NUMBER, first)


def test_the_answer_names_the_next_process() -> None:
    route = pull()
    assert route.handle(Answer.MOVED, OWNER, None) is Next.ASK_NAMED
    assert route.asked == OWNER
    assert route.handle(Answer.MOVED, LOCAL, None) is Next.ASK_NAMED
    assert route.asked == LOCAL


@pytest.mark.parametrize("first", [LOCAL, OWNER, PRODUCER])
def test_an_error_ends_the_pull(first: PeerId) -> None:
    assert pull(first=first).handle(Answer.BROKEN, None, None) is Next.FAIL


def test_the_owner_is_asked_for_a_value_whose_producer_ended() -> None:
    route = pull()
    assert route.handle(Answer.LOST, None, None) is Next.ASK_OWNER
    assert route.asked == OWNER
    assert route.handle(Answer.LOST, None, None) is Next.FAIL


def test_the_owner_itself_fails_with_the_end_of_the_producer() -> None:
    assert pull(owner=LOCAL).handle(Answer.LOST, None, None) is Next.FAIL


@pytest.mark.parametrize("answer", [Answer.MOVED, Answer.BROKEN, Answer.LOST])
def test_the_root_is_asked_again_when_its_relay_gives_nothing(answer: Answer) -> None:
    route = pull()
    route.handle(Answer.MOVED, RELAY, PRODUCER)
    assert route.handle(answer, OWNER if answer is Answer.MOVED else None, PRODUCER) is Next.ASK_ROOT
    assert route.asked == PRODUCER
    # The root is no relay of itself.
    assert route.handle(Answer.BROKEN, None, PRODUCER) is Next.FAIL


def test_a_relay_that_owned_the_value_and_ended_ends_the_pull() -> None:
    route = pull()
    route.handle(Answer.MOVED, OWNER, PRODUCER)
    assert route.handle(Answer.LOST, None, PRODUCER) is Next.FAIL


def test_a_process_is_no_relay_once_the_root_has_left() -> None:
    route = pull()
    route.handle(Answer.MOVED, RELAY, PRODUCER)
    assert route.handle(Answer.MOVED, OWNER, None) is Next.ASK_NAMED
    assert route.asked == OWNER


def test_processes_that_name_each_other_end_the_pull() -> None:
    route = pull()
    with pytest.raises(RemoteProtocolError, match="ref 7 of owner"):
        for named in [OWNER, PRODUCER] * MAX_HOPS:
            route.handle(Answer.MOVED, named, None)


@pytest.mark.parametrize("seed", range(3))
def test_every_sequence_of_answers_ends(seed: int) -> None:
    answers = [Answer.MOVED, Answer.BROKEN, Answer.LOST]
    for steps in product(answers, repeat=5):
        route = pull(owner=[OWNER, LOCAL, PRODUCER][seed])
        for index, answer in enumerate(steps):
            asked = route.asked
            if route.asked == LOCAL and answer is Answer.LOST:
                break
            step = route.handle(answer, [RELAY, OWNER, LOCAL][index % 3], PRODUCER)
            if step is Next.FAIL:
                assert answer is not Answer.MOVED
                assert route.asked == asked
                break
