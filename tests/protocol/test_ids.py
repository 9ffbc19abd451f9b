"""Ids of actors that every process hosts, and of the calls of a group."""

from __future__ import annotations

from aiodaft._protocol.ids import (
    AGENT,
    CHANNELS,
    COORDINATOR,
    FIRST_USER_ACTOR,
    NODE,
    CallId,
    PeerId,
    group_call_of,
    roster_at,
    roster_of,
    serial_of,
    sibling_ids,
)


def test_system_actors_are_distinct_and_below_users_own() -> None:
    system = {AGENT, CHANNELS, COORDINATOR, NODE}
    assert len(system) == 4
    assert max(system) < FIRST_USER_ACTOR


def test_the_ids_of_the_calls_of_a_group_say_that_they_belong_together() -> None:
    caller, seen = PeerId("controller"), set[CallId]()
    for serial in (1, 2, 3, 1 << 30):
        for count in (1, 2, 3, 4, 5, 64, 65, 1000):
            numbers = sibling_ids(CallId(serial * 10_000 + count), count, roster_at(count))
            assert {roster_of(number) for number in numbers} == {roster_at(count)} != {0}
            assert len(numbers) == count
            assert seen.isdisjoint(numbers)
            seen.update(numbers)
            assert {serial_of(number) for number in numbers} == {serial * 10_000 + count}
            assert {group_call_of(caller, number) for number in numbers} == {(caller, serial * 10_000 + count)}
    # Numbers of calls that are made by themselves are positive. Integers on a wire have 64 bits.
    assert -(1 << 63) < min(seen) < max(seen) < 0
    assert [serial_of(CallId(number)) for number in (0, 7)] == [0, 7]
    assert group_call_of(caller, CallId(0)) is group_call_of(caller, CallId(7)) is None
    assert not sibling_ids(CallId(1), 0)
    assert roster_of(CallId(7)) == roster_of(sibling_ids(CallId(1), 2)[1]) == 0
    assert len({roster_at(epoch) for epoch in range(1, 16)}) == 15
