"""A name is told once over each connection, and taken back once."""

from __future__ import annotations

from aiodaft._protocol.connections.session import Definitions


def test_a_name_is_told_once_until_it_is_taken_back() -> None:
    ours: Definitions[str] = Definitions()
    assert [ours.tell(b"a"), ours.tell(b"b"), ours.tell(b"a")] == [True, True, False]
    assert [ours.take_back(b"a"), ours.take_back(b"a"), ours.take_back(b"c")] == [True, False, False]
    assert [ours.tell(b"a"), ours.tell(b"b")] == [True, False]


def test_a_name_that_is_told_again_before_it_is_taken_back_stays_known() -> None:
    ours: Definitions[str] = Definitions()
    ours.hear(b"a", "first")
    ours.hear(b"a", "again")
    ours.forget(b"a")
    assert dict(ours.heard) == {b"a": "first"}
    ours.forget(b"a")
    assert not ours.heard


def test_a_value_keeps_what_was_known_when_it_came() -> None:
    ours: Definitions[str] = Definitions()
    ours.hear(b"a", "first")
    before = ours.heard
    ours.hear(b"b", "second")
    ours.forget(b"a")
    assert dict(before) == {b"a": "first"}
    assert dict(ours.heard) == {b"b": "second"}
