"""Mirrors `_protocol/node/worker.py`."""

from __future__ import annotations

from collections.abc import Iterable

from aiodaft._protocol.node.worker import Standstill, Verdict


def verdicts(signs: Iterable[object]) -> dict[int, Verdict]:
    """The verdicts of looks, other than to wait, by their numbers."""
    standstill = Standstill()
    found = ((number, standstill.look(seen)) for number, seen in enumerate(signs, 1))
    return {number: verdict for number, verdict in found if verdict is not Verdict.WAIT}


def test_a_process_that_changes_nothing_is_reported_and_then_given_up() -> None:
    assert verdicts(["the same"] * 31) == {6: Verdict.REPORT, 31: Verdict.GIVE_UP}


def test_a_process_that_is_stopped_from_the_first_look_on_is_no_exception() -> None:
    assert verdicts([None] * 30) == {5: Verdict.REPORT, 30: Verdict.GIVE_UP}


def test_a_process_that_goes_on_in_time_is_not_given_up_and_is_reported_anew_if_it_stops_again() -> None:
    assert verdicts([1] * 30 + [2] * 29) == {6: Verdict.REPORT, 36: Verdict.REPORT}


def test_a_slow_process_that_gets_on_is_reported_once_and_given_up_only_in_the_end() -> None:
    assert verdicts(range(600)) == {60: Verdict.REPORT, 600: Verdict.GIVE_UP}
