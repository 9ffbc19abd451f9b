"""The actors that every process hosts keep out of the way of users' own."""

from __future__ import annotations

from aiodaft._protocol.ids import AGENT, CHANNELS, COORDINATOR, FIRST_USER_ACTOR, NODE


def test_system_actors_are_distinct_and_below_users_own() -> None:
    system = {AGENT, CHANNELS, COORDINATOR, NODE}
    assert len(system) == 4
    assert max(system) < FIRST_USER_ACTOR
