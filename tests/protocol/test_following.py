"""The location of an actor, as far as a process knows, and the calls that are made again."""

from __future__ import annotations

import pytest

from aiodaft._protocol.calls.outgoing import NOWHERE, Failure, Location, Whereabouts, check_retries, failure_of
from aiodaft._protocol.ids import ActorId, PeerId, incarnation
from aiodaft._protocol.node.worker import Health
from aiodaft.exceptions import (
    ActorDied,
    DaftError,
    NotDelivered,
    Overloaded,
    PeerLost,
    RestartLimitReached,
    StaleHandle,
)

HERE, THERE = PeerId("here"), PeerId("there")
FIRST = ActorId(16)
SECOND = incarnation(FIRST, 1)
OVER = Location(NOWHERE, FIRST, ActorDied("it is over"))


def known(place: Location, *, told: bool = False) -> Whereabouts:
    return Whereabouts(place, told=told)


def test_a_location_of_an_earlier_incarnation_is_old_news() -> None:
    actor = known(Location(NOWHERE, SECOND))
    assert not actor.move(Location(HERE, FIRST))
    assert actor.place == Location(NOWHERE, SECOND)
    assert actor.move(Location(THERE, SECOND))
    assert actor.place == Location(THERE, SECOND)


def test_an_end_is_final_whatever_its_incarnation() -> None:
    actor = known(Location(THERE, SECOND))
    assert actor.move(OVER)
    assert not actor.move(Location(THERE, incarnation(FIRST, 2)))
    assert not actor.move(OVER)
    actor.leave()
    assert actor.place is OVER


@pytest.mark.parametrize(
    ("told", "remote", "after"), [(False, THERE, NOWHERE), (False, HERE, THERE), (True, THERE, THERE)]
)
def test_only_the_owner_keeps_a_place_where_the_actor_is_not_found(told: bool, remote: PeerId, after: PeerId) -> None:
    actor = known(Location(THERE, FIRST), told=told)
    actor.not_found(remote)
    assert actor.place == Location(after, FIRST)


def test_a_handle_of_a_later_incarnation_says_that_the_known_one_is_down() -> None:
    actor = known(Location(THERE, FIRST))
    actor.heard(Location(HERE, FIRST))
    assert actor.place.peer == THERE
    actor.heard(Location(HERE, SECOND))
    assert actor.place == Location(NOWHERE, FIRST)


def test_an_actor_that_may_be_restarted_is_suspect_and_one_that_is_over_is_lost() -> None:
    actor = known(Location(THERE, FIRST))
    assert {seen: actor.health(seen) for seen in Health} == {
        Health.ALIVE: Health.ALIVE,
        Health.LEAVING: Health.LEAVING,
        Health.SUSPECT: Health.SUSPECT,
        Health.LOST: Health.SUSPECT,
    }
    actor.move(OVER)
    assert {actor.health(seen) for seen in Health} == {Health.LOST}


def test_calls_that_a_connection_lost_are_made_again_unless_the_actor_is_still_there_or_over() -> None:
    lost = PeerLost("the connection broke")
    assert Location(THERE, FIRST).why_missed(THERE, lost) is lost
    assert Location(HERE, SECOND).why_missed(THERE, lost) is None
    assert Location(HERE, FIRST).why_missed(None, None) is None
    assert OVER.why_missed(THERE, lost) is OVER.ended


@pytest.mark.parametrize(
    ("error", "executed", "failure"),
    [
        (ActorDied("x"), None, Failure.DOUBTFUL),
        (ActorDied("x"), False, Failure.TURNED_AWAY),
        (ActorDied("x"), True, Failure.FINAL),
        (RestartLimitReached("x"), False, Failure.TURNED_AWAY),
        (PeerLost("x"), None, Failure.DOUBTFUL),
        (PeerLost("x"), False, Failure.UNSENT),
        (StaleHandle("x"), False, Failure.TURNED_AWAY),
        (NotDelivered("x"), False, Failure.UNSENT),
        (Overloaded("x"), False, Failure.FINAL),
        (DaftError("x"), None, Failure.FINAL),
    ],
)
def test_what_an_error_means_for_another_attempt(error: DaftError, executed: bool | None, failure: Failure) -> None:
    assert failure_of(error.with_executed(executed)) is failure


def test_an_error_of_the_method_is_final() -> None:
    assert failure_of(ValueError()) is Failure.FINAL


def test_only_calls_of_idempotent_methods_are_made_again() -> None:
    assert check_retries(None, "Model.f", idempotent=False, is_stream=True) == 0
    assert check_retries(None, "Model.f", idempotent=True, is_stream=False) == 1
    assert check_retries(3, "Model.f", idempotent=True, is_stream=False) == 3
    with pytest.raises(TypeError, match="needs `idempotent=True`"):
        check_retries(3, "Model.f", idempotent=False, is_stream=False)
    with pytest.raises(TypeError, match="is a stream"):
        check_retries(None, "Model.f", idempotent=True, is_stream=True)
