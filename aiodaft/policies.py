"""Policies of `group.with_policy`: which member takes the next call. Each is a plain function of the loads."""

from __future__ import annotations

import random as _random
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

__all__ = ["Load", "Policy", "fewest_in_flight", "nearest", "two_choices"]


class Load(NamedTuple):
    """A member that can take a call, as the calling process knows it.

    Attributes:
        rank: Its rank.
        in_flight: The calls of this group, by this process, that are under way there.
        distance: 0 in this process; 1 on its node, or the one that this program is attached to; 2 elsewhere.
    """

    rank: int
    in_flight: int
    distance: int


# Gets the loads of at least one member, in an order that turns with each call, and returns the index of one.
Policy: TypeAlias = Callable[[Sequence[Load]], int]


def fewest_in_flight(loads: Sequence[Load]) -> int:
    """The member with the fewest calls under way, in turn among equals. This is the default."""
    return min(range(len(loads)), key=lambda index: loads[index].in_flight)


def two_choices(loads: Sequence[Load], random: _random.Random | None = None) -> int:
    """The less busy one of two members at random, so that several callers do not all choose the same.

    See Mitzenmacher, "The power of two choices in randomized load balancing", 2001.
    """
    chosen = (random or _random).sample(range(len(loads)), min(2, len(loads)))
    return min(chosen, key=lambda index: loads[index].in_flight)


def nearest(loads: Sequence[Load]) -> int:
    """The member with the fewest calls under way among the nearest ones."""
    return min(range(len(loads)), key=lambda index: (loads[index].distance, loads[index].in_flight))
