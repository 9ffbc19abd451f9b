"""Meetings of the members of a group: the members that wait, and the answers that each gets."""

from __future__ import annotations

import random
from typing import Any

import pytest

from aiodaft._protocol.groups.meeting import KEPT, Coming, Meetings, Outcome
from aiodaft.exceptions import ActorDied


class Group:
    """Members that come with a ticket of their own each time."""

    def __init__(self, size: int) -> None:
        self.table: Meetings[str] = Meetings(size)
        self.turns = dict.fromkeys(range(size), 0)
        self.tickets: dict[str, str] = {}

    def come(self, rank: int, name: object = "x", **options: Any) -> list[Outcome[str]]:
        self.turns[rank] += 1
        terms, ticket = options.pop("terms", {}), f"{rank}.{self.turns[rank]}"
        self.tickets[ticket] = ticket
        return self.table.come(Coming(name, f"meeting {name}", rank, terms, **options), ticket)

    def expire(self, name: str, rank: int, turn: int, seconds: float) -> list[Outcome[str]]:
        return self.table.expire(name, rank, self.tickets[f"{rank}.{turn}"], seconds)


def told(outcomes: list[Outcome[str]]) -> list[tuple[list[str], str]]:
    return [(list(one.tickets.values()), "" if one.error is None else str(one.error)) for one in outcomes]


def test_the_last_to_come_decides_and_nothing_is_left() -> None:
    group = Group(3)
    assert group.come(2) == group.come(0) == []
    assert len(group.table) == 1
    assert told(group.come(1)) == [(["0.1", "1.1", "2.1"], "")]
    assert len(group.table) == 0
    assert told(Group(1).come(0)) == [(["0.1"], "")]


def test_a_member_that_is_ahead_opens_the_next_meeting_of_the_name() -> None:
    group = Group(2)
    assert [group.come(0) for _ in range(3)] == [[], [], []]
    assert [told(group.come(1)) for _ in range(3)] == [[([f"0.{turn}", f"1.{turn}"], "")] for turn in (1, 2, 3)]
    assert len(group.table) == 0


def test_names_are_met_in_any_order() -> None:
    source, ended = random.Random(15), 0
    group = Group(4)
    pending = {rank: [(name, turn) for turn in range(3) for name in range(50)] for rank in range(4)}
    for names in pending.values():
        source.shuffle(names)
    # A ticket says what its member comes for, and for which time.
    turns: dict[tuple[int, int], int] = {}
    while any(pending.values()):
        rank = source.choice([rank for rank, names in pending.items() if names])
        name, _ = pending[rank].pop()
        turn = turns[rank, name] = turns.get((rank, name), 0) + 1
        for outcome in group.table.come(Coming(name, "", rank, {}), f"{name}/{turn}"):
            assert outcome.error is None
            assert list(outcome.tickets) == [0, 1, 2, 3]
            assert len(set(outcome.tickets.values())) == 1
            ended += 1
    assert (ended, len(group.table)) == (150, 0)


def test_all_are_told_of_a_disagreement_and_the_late_ones_when_they_come() -> None:
    group = Group(4)
    assert group.come(0, terms={"operation": "sum", "value": "int"}) == []
    assert group.come(2, terms={"operation": "sum", "value": "int"}) == []
    why = "meeting x: the members disagree: rank 0 has value int, rank 3 has value float"
    assert told(group.come(3, terms={"operation": "sum", "value": "float"})) == [(["0.1", "2.1", "3.1"], why)]
    # The next one of that name is not mixed up with the one that failed.
    assert [group.come(rank) for rank in (0, 2, 3)] == [[], [], []]
    assert told(group.come(1)) == [(["1.1"], why)]
    assert told(group.come(1)) == [(["0.2", "1.2", "2.2", "3.2"], "")]
    assert len(group.table) == 0


def test_a_term_that_only_one_has_is_a_disagreement() -> None:
    group = Group(2)
    group.come(0)
    ((_, why),) = told(group.come(1, terms={"root": 1}))
    assert why.endswith("rank 0 has root None, rank 1 has root 1")


def test_a_fault_of_one_member_is_told_to_all() -> None:
    group = Group(3)
    group.come(0)
    assert told(group.come(1, fault=ValueError("rank 1 has no value"))) == [(["0.1", "1.1"], "rank 1 has no value")]
    assert told(group.come(2)) == [(["2.1"], "rank 1 has no value")]
    assert len(group.table) == 0


def test_the_error_of_a_meeting_that_is_late_names_who_is_missing() -> None:
    group = Group(4)
    group.come(0)
    group.come(2)
    group.come(0)
    why = "meeting x: ranks 1, 3 of 4 did not come in 2 s"
    assert told(group.expire("x", 2, 1, 2.0)) == [(["0.1", "2.1"], why)]
    assert group.expire("x", 0, 1, 1.0) == group.expire("y", 0, 1, 1.0) == []
    for rank in (1, 3):
        assert told(group.come(rank)) == [([f"{rank}.1"], why)]
    # The second one goes on.
    for rank in (1, 2):
        assert group.come(rank) == []
    assert told(group.come(3)) == [(["0.2", "1.2", "2.2", "3.2"], "")]
    group.come(0)
    group.come(1)
    group.come(2)
    ((_, why),) = told(group.expire("x", 0, 3, 0.5))
    assert why == "meeting x: rank 3 of 4 did not come in 0.5 s"
    assert group.table.open() == []
    group.come(1, "y")
    assert [one.describe(0.0) for one in group.table.open()] == ["meeting y: ranks 0, 2, 3 of 4 have not come"]


def test_a_member_is_late_when_it_comes_much_later_than_members_usually_do() -> None:
    table: Meetings[str] = Meetings(2)

    def meet(start: float, wait: float) -> None:
        assert table.come(Coming("x", "meeting x", 0, {}), "", start) == []
        assert table.come(Coming("x", "meeting x", 1, {}), "", start + wait)

    def late_after(start: float) -> float:
        """Seconds after which members are late for a meeting that begins then."""
        table.come(Coming("x", "meeting x", 0, {}), ticket := f"from {start}", start)
        (open_,) = table.open()
        found = next(number / 4 for number in range(1000) if open_.is_late(start + number / 4))
        table.withdraw("x", 0, ticket)
        assert not table.open()
        return found

    assert late_after(0) == 5.25
    meet(10, 0.25)
    assert late_after(20) == 5.25
    # A member that was very late once is not usual; nor, after a while, one that was it twice.
    meet(30, 40.0)
    assert late_after(100) == 1.0
    meet(200, 30.0)
    assert late_after(300) == 30.75
    for _ in range(31):
        meet(400, 0.5)
    assert late_after(500) == 1.25


def test_a_member_that_waits_does_so_for_those_that_have_not_come_within_the_same() -> None:
    table: Meetings[str] = Meetings(3)
    table.come(Coming("k", "k", 1, {}, within=("caller", 1)), "one")
    table.come(Coming("k", "k", 0, {}, within=("other", 1)), "two")
    assert table.missing("k", 1, "one") == (("caller", 1), [0, 2])
    assert table.missing("k", 0, "two") == (("other", 1), [1, 2])
    table.come(Coming("m", "m", 0, {}), "alone")
    assert table.missing("m", 0, "alone") == (None, [1, 2])
    assert table.missing("m", 0, "gone") == (None, [])


def test_who_withdraws_has_not_come() -> None:
    group = Group(2)
    assert group.come(0, terms={"op": "sum"}) == []
    group.table.withdraw("x", 0, group.tickets["0.1"])
    assert len(group.table) == 0
    assert group.come(1, terms={"op": "max"}) == []
    assert told(group.come(0, terms={"op": "max"})) == [(["0.2", "1.1"], "")]
    # It is over.
    group.table.withdraw("x", 0, group.tickets["0.2"])
    assert group.come(1) == []
    assert told(group.come(0)) == [(["0.3", "1.2"], "")]


def test_who_withdraws_leaves_the_others_and_their_terms() -> None:
    group = Group(3)
    assert group.come(0, terms={"op": "sum"}) == group.come(1, terms={"op": "sum"}) == []
    group.table.withdraw("x", 0, group.tickets["0.1"])
    why = "meeting x: the members disagree: rank 1 has op sum, rank 2 has op max"
    assert told(group.come(2, terms={"op": "max"})) == [(["1.1", "2.1"], why)]
    assert told(group.come(0, terms={"op": "sum"})) == [(["0.2"], why)]
    assert len(group.table) == 0


def test_what_a_member_came_to_after_what_it_withdraws_counts_one_earlier() -> None:
    group = Group(3)
    for rank in (1, 1, 1, 2):
        assert group.come(rank) == []
    assert len(group.table) == 3
    assert group.table.withdraw("x", 1, group.tickets["1.1"]) == []
    assert len(group.table) == 2
    assert told(group.come(0)) == [(["0.1", "1.2", "2.1"], "")]
    assert group.come(0) == group.table.withdraw("x", 0, group.tickets["0.2"]) == group.come(2) == []
    assert told(group.come(0)) == [(["0.3", "1.3", "2.2"], "")]
    assert len(group.table) == 0


def test_what_comes_one_earlier_may_be_the_last_or_disagree() -> None:
    for op, why in (("sum", ""), ("max", "meeting x: the members disagree: rank 0 has op max, rank 1 has op sum")):
        group = Group(3)
        for rank, its_op in ((0, "sum"), (0, op), (1, "sum")):
            assert group.come(rank, terms={"op": its_op}) == []
        if not why:
            assert group.table.withdraw("x", 0, group.tickets["0.1"]) == []
            assert told(group.come(2, terms={"op": "sum"})) == [(["0.2", "1.1", "2.1"], "")]
        else:
            assert told(group.table.withdraw("x", 0, group.tickets["0.1"])) == [(["0.2", "1.1"], why)]
            assert told(group.come(2)) == [(["2.1"], why)]
        assert len(group.table) == 0


@pytest.mark.parametrize("has_come", [False, True])
def test_the_loss_of_a_member_ends_what_is_open(has_come: bool) -> None:
    group = Group(3)
    group.come(0)
    group.come(0, "y")
    if has_come:
        group.come(2)
    waiting = ["0.1", "2.1"] if has_come else ["0.1"]
    died = ActorDied("it died")
    assert told(group.table.lose(2, died)) == [(waiting, "it died"), (["0.2"], "it died")]
    for name in ("x", "y"):
        assert [error for _, error in told(group.come(1, name))] == ["it died"]
    assert len(group.table) == 0


def test_what_begins_after_the_loss_of_a_member_waits_for_the_end() -> None:
    group, died = Group(3), ActorDied("it died")
    assert group.table.lose(2, died) == group.come(0) == group.come(1) == []
    assert told(group.come(2)) == [(["2.1"], "it died")]
    assert told(group.table.close(ValueError("a new epoch"))) == [(["0.1", "1.1"], "a new epoch")]


def test_after_the_end_everything_fails() -> None:
    group = Group(2)
    group.come(0)
    group.come(1, "y")
    assert told(group.table.close(ActorDied("for good"))) == [(["0.1"], "for good"), (["1.1"], "for good")]
    assert group.table.close(ActorDied("again")) == []
    assert told(group.come(1)) == [(["1.2"], "for good")]
    assert len(group.table) == 0


def test_a_member_that_leaves_ends_the_meeting_for_all_and_one_that_is_over_for_none() -> None:
    table: Meetings[str] = Meetings(3)

    def coming(rank: int, number: int = 0, fault: str = "") -> Coming:
        return Coming("x", "meeting x", rank, {}, ValueError(fault) if fault else None, number)

    assert table.come(coming(0, 1), "0.1") == table.come(coming(0, 2), "0.2") == table.come(coming(1), "1") == []
    # The first of its two waits.
    assert told(table.leave(coming(0, 1, "left"))) == [(["0.1", "1"], "left")]
    assert table.leave(coming(0, 1, "left again")) == []
    assert told(table.come(coming(2), "2")) == [(["2"], "left")]
    assert told(table.come(coming(1), "1") + table.come(coming(2), "2")) == [(["0.2", "1", "2"], "")]
    assert table.leave(coming(0, 2, "too late")) == []
    assert len(table) == 0


def test_what_a_member_has_left_is_forgotten_if_it_has_not_come_at_all() -> None:
    table: Meetings[str] = Meetings(2)
    left = Coming("x", "meeting x", 0, {}, ValueError("left"), 7)
    table.come(Coming("x", "meeting x", 0, {}, number=7), "0")
    table.leave(left)
    table.forget(Coming("x", "meeting x", 0, {}, number=8))
    assert len(table) == 1
    table.forget(left)
    assert len(table) == 0
    # The same of one that has come with its fault.
    table.come(left, "0")
    table.forget(left)
    assert table.come(Coming("x", "meeting x", 1, {}), "1") == []
    assert told(table.come(Coming("x", "meeting x", 0, {}), "0")) == [(["0", "1"], "")]


def test_who_comes_within_something_meets_only_what_comes_within_the_same() -> None:
    group = Group(2)
    # One skips the first call, and is ahead in the second one.
    assert group.come(0, within="call 1") == group.come(1, within="call 2") == []
    assert told(group.come(0, within="call 2")) == [(["0.2", "1.1"], "")]
    group.table.withdraw("x", 0, group.tickets["0.1"])
    assert len(group.table) == 0
    # In opposite orders; twice within one.
    for rank, call in ((0, 3), (0, 4), (0, 3), (1, 4), (1, 3)):
        outcomes = group.come(rank, within=call)
    assert told(outcomes) == [(["0.3", "1.3"], "")]
    assert told(group.come(1, within=3)) == [(["0.5", "1.4"], "")]
    assert len(group.table) == 0


def test_who_comes_by_itself_meets_whatever_is_first() -> None:
    group = Group(3)
    assert group.come(0) == group.come(1, within=1) == group.come(2, within=2) == []
    assert len(group.table) == 2
    assert group.come(0) == []
    # It was the only one there within something: the other two meet.
    assert group.table.withdraw("x", 1, group.tickets["1.1"]) == []
    assert told(group.come(1, within=2)) == [(["0.1", "1.2", "2.1"], "")]
    assert group.come(1) == []
    assert told(group.come(2, within=3)) == [(["0.2", "1.3", "2.2"], "")]
    assert len(group.table) == 0


def test_what_failed_within_something_is_told_there_and_not_kept_for_ever() -> None:
    group = Group(2)
    for call in range(KEPT + 5):
        assert group.come(0, within=call) == []
        assert len(group.expire("x", 0, call + 1, 1.0)) == 1
    # Open meetings stay.
    assert group.come(0, within="open") == []
    assert len(group.table) == KEPT + 1
    ((_, why),) = told(group.come(1, within=KEPT))
    assert why == "meeting x: rank 1 of 2 did not come in 1 s"
    assert [why for _, why in told(group.come(1, within="open"))] == [""]


def test_what_failed_by_names_that_are_not_used_again_is_not_kept_for_ever() -> None:
    group = Group(3)
    for step in range(KEPT + 5):
        assert group.come(0, f"step {step}", within=step, terms={"op": "sum"}) == []
        assert len(group.come(1, f"step {step}", within=step, terms={"op": "max"})) == 1
    assert len(group.table) == KEPT
    assert "disagree" in told(group.come(2, "step 5", within=5))[0][1]
    assert len(group.table) == KEPT - 1


def test_whatever_some_skip_the_others_meet_their_own() -> None:
    source = random.Random(38)
    for _ in range(50):
        group, size = Group(3), 3
        # Within each call, each rank comes twice; some give up one of them, which ends the call for all.
        pending = [(rank, call) for rank in range(size) for call in range(10) for _ in range(2)]
        source.shuffle(pending)
        skipped = set(source.sample(range(10), 4))
        waiting: dict[str, tuple[int, int]] = {}
        met: list[int] = []
        for rank, call in pending:
            if call in skipped and rank == call % size:
                continue
            outcomes = group.come(rank, within=call)
            waiting[f"{rank}.{group.turns[rank]}"] = rank, call
            for outcome in outcomes:
                calls = {waiting.pop(ticket)[1] for ticket in outcome.tickets.values()}
                assert len(calls) == 1
                met += calls
        assert sorted(met) == sorted(2 * [call for call in range(10) if call not in skipped])
        for ticket, (rank, _) in waiting.items():
            assert group.table.withdraw("x", rank, group.tickets[ticket]) == []
        assert len(group.table) == 0
