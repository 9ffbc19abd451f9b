"""Two sides of a connection move to rings once; each message out of turn is an error."""

from __future__ import annotations

import pytest

from aiodaft._protocol.connections.messages import RING_OFFERED, RING_REFUSED, RING_USED, RING_WANTED
from aiodaft._protocol.connections.session import Step, Upgrade
from aiodaft.exceptions import RemoteProtocolError


def test_both_sides_move_to_rings() -> None:
    maker, taker = Upgrade(makes=True), Upgrade(makes=False)
    assert taker.want() is Step.ASK
    assert maker.handle(RING_WANTED) is Step.OFFER
    assert taker.handle(RING_OFFERED) is Step.TAKE
    assert maker.handle(RING_USED) is Step.USE
    assert taker.handle(RING_USED) is Step.READ
    assert (maker.want(), taker.want()) == (Step.NOTHING, Step.NOTHING)


def test_rings_are_offered_once_however_often_both_sides_want_them() -> None:
    maker, taker = Upgrade(makes=True), Upgrade(makes=False)
    assert (maker.want(), maker.want()) == (Step.OFFER, Step.NOTHING)
    assert (taker.want(), taker.want()) == (Step.ASK, Step.ASK)
    assert [maker.handle(RING_WANTED) for _ in range(2)] == [Step.NOTHING, Step.NOTHING]
    maker.handle(RING_USED)
    assert maker.handle(RING_WANTED) is Step.NOTHING


def test_a_refused_offer_is_dropped_and_may_be_made_again() -> None:
    maker, taker = Upgrade(makes=True), Upgrade(makes=False)
    maker.want()
    taker.handle(RING_OFFERED)
    taker.failed()
    assert maker.handle(RING_REFUSED) is Step.DROP
    assert maker.want() is Step.OFFER
    assert taker.handle(RING_OFFERED) is Step.TAKE


def test_an_offer_that_cannot_be_made_changes_nothing() -> None:
    maker = Upgrade(makes=True)
    maker.want()
    maker.failed()
    assert maker.want() is Step.OFFER


@pytest.mark.parametrize("stage", [RING_USED, RING_REFUSED, RING_OFFERED, -1, 9])
def test_the_side_that_makes_rings_gets_no_answer_before_its_offer_and_no_offer(stage: int) -> None:
    with pytest.raises(RemoteProtocolError):
        Upgrade(makes=True).handle(stage)


@pytest.mark.parametrize("stage", [RING_USED, RING_REFUSED, RING_WANTED, -1, 9])
def test_the_other_side_gets_an_offer_first_and_only_once(stage: int) -> None:
    taker = Upgrade(makes=False)
    with pytest.raises(RemoteProtocolError):
        taker.handle(stage)
    taker.handle(RING_OFFERED)
    with pytest.raises(RemoteProtocolError):
        taker.handle(RING_OFFERED)
