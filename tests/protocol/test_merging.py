"""Equal lines of the ranks of a group."""

from __future__ import annotations

import pytest

from aiodaft._protocol.diagnostics.printing import Member, Merged, Merging, member_of, ranks_text


class Group:
    """A group whose lines are merged; `shown` has the result."""

    def __init__(self, size: int, name: str = "Trainer-1") -> None:
        self.name = name
        self.shown: list[tuple[str, list[int]]] = []
        self.merging: Merging[str] = Merging(0.2, self._show)
        for rank in range(size):
            self.merging.join(Member(name, rank))

    def _show(self, merged: Merged[str]) -> None:
        self.shown.append((merged.line, list(merged.ranks)))

    def writes(self, rank: int, line: str, at: float = 0.0, stream: int = 1) -> None:
        self.merging.take(Member(self.name, rank), stream, line, line, at)


def test_a_line_that_all_ranks_have_written_is_shown_once_and_at_once() -> None:
    group = Group(3)
    for rank in (2, 0, 1):
        assert group.shown == []
        group.writes(rank, "loaded")
    assert group.shown == [("loaded", [0, 1, 2])]
    assert group.merging.get_timer() is None


def test_a_line_of_some_ranks_is_shown_when_its_time_is_over() -> None:
    group = Group(3)
    group.writes(0, "only me", 1.0)
    group.writes(1, "we two", 1.1)
    group.writes(2, "we two", 1.15)
    assert group.merging.get_timer() == pytest.approx(1.2)
    group.merging.handle_timer(1.2)
    assert group.shown == [("only me", [0])]
    assert group.merging.get_timer() == pytest.approx(1.3)
    group.merging.handle_timer(1.3)
    assert group.shown == [("only me", [0]), ("we two", [1, 2])]
    group.writes(1, "only me", 2.0)
    group.merging.flush()
    assert group.shown[2:] == [("only me", [1])]


def test_what_a_rank_has_written_before_is_shown_before() -> None:
    group = Group(2)
    group.writes(0, "rank 0 begins")
    for rank in (0, 1):
        group.writes(rank, "loaded")
    assert group.shown == [("rank 0 begins", [0]), ("loaded", [0, 1])]


def test_what_waits_in_one_stream_goes_on_waiting_when_a_line_of_the_other_is_shown() -> None:
    group = Group(2)
    group.writes(0, "a warning", stream=2)
    for rank in (0, 1):
        group.writes(rank, "loaded")
    group.writes(1, "a warning", stream=2)
    assert group.shown == [("loaded", [0, 1]), ("a warning", [0, 1])]


def test_a_line_that_a_rank_repeats_is_repeated() -> None:
    group = Group(2)
    for rank in (0, 0, 1, 1, 0):
        group.writes(rank, "step")
    assert group.shown == [("step", [0, 1]), ("step", [0, 1])]
    group.merging.flush("Trainer-1")
    assert group.shown[2:] == [("step", [0])]


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    group = Group(3)
    group.merging.leave(Member(group.name, 1))
    for rank in (0, 2):
        group.writes(rank, "loaded")
    assert group.shown == [("loaded", [0, 2])]
    group.writes(0, "last words")
    for rank in (0, 2):
        group.merging.leave(Member(group.name, rank))
    assert group.shown[1:] == [("last words", [0])]


def test_lines_of_a_rank_that_writes_fast_do_not_pile_up() -> None:
    group = Group(2)
    for number in range(1_000):
        group.writes(0, str(number))
    assert len(group.shown) > 700
    group.merging.flush()
    assert [line for line, _ in group.shown] == [str(number) for number in range(1_000)]


def test_ranks_and_members_are_read_and_written() -> None:
    assert ranks_text([3]) == "3"
    assert ranks_text([7, 0, 1, 2, 5]) == "0-2,5,7"
    assert member_of("Trainer-1[12]") == ("Trainer-1", 12)
    for name in ("Trainer-1", "Trainer-1[a]", "A[1]+B[1]", "[1]"):
        assert member_of(name) is None
