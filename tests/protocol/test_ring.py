"""How two processes agree on rings."""

from __future__ import annotations

import pytest

from aiodaft._protocol.messages import RING_OFFERED, RING_REFUSED, RING_USED, RING_WANTED
from aiodaft._protocol.ring import Step, next_step

_STAGES = (RING_WANTED, RING_OFFERED, RING_USED, RING_REFUSED)


def test_one_side_offers_the_other_takes_and_each_reads_after_it_was_told() -> None:
    assert next_step(RING_WANTED, first=True, writes=False) is Step.OFFER
    assert next_step(RING_OFFERED, first=False, writes=False) is Step.TAKE
    assert next_step(RING_USED, first=True, writes=False) is Step.MOVE
    assert next_step(RING_USED, first=False, writes=True) is Step.READ
    assert next_step(RING_REFUSED, first=True, writes=False) is Step.DROP


@pytest.mark.parametrize(
    ("first", "writes", "allowed"),
    [
        (True, False, (RING_WANTED, RING_USED, RING_REFUSED)),
        (True, True, (RING_WANTED,)),
        (False, False, (RING_OFFERED,)),
        (False, True, (RING_USED,)),
    ],
)
def test_anything_else_breaks_the_protocol(first: bool, writes: bool, allowed: tuple[int, ...]) -> None:
    steps = {stage: next_step(stage, first=first, writes=writes) for stage in (*_STAGES, 99)}
    assert {stage for stage, step in steps.items() if step is not None} == set(allowed)


def test_a_wish_that_was_granted_is_no_error() -> None:
    assert next_step(RING_WANTED, first=True, writes=True) is Step.NOTHING
