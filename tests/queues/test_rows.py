"""Rows of a queue: ready when they have the fields, given once, and again only if they are given back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from aiodaft.queue.rows import Rows, at_once, oldest


def rows_of(capacity: int = 100) -> Rows:
    return Rows({"reward": (["response"], oldest), "train": (["response", "reward"], at_once)}, capacity)


def test_a_row_is_ready_for_a_consumer_when_it_has_its_fields() -> None:
    rows = rows_of()
    assert rows.add(3) == [0, 1, 2]
    rows.wrote([1, 2], ["response", "prompt"])
    assert rows.take("reward", 1, 2) == [1, 2]
    assert rows.take("train", 2, 2) is None
    rows.wrote([2], ["reward"])
    assert rows.take("train", 2, 2) == [2]


def test_rows_are_given_in_the_order_of_their_numbers_once_for_each_consumer() -> None:
    rows = rows_of()
    rows.add(4)
    rows.wrote([3, 0, 2, 1], ["response", "reward"])
    taken = [rows.take("train", lease, 2) for lease in (1, 2, 1)]
    assert taken == [[0, 1], [2, 3], None]
    assert rows.take("reward", 3, 4) == [0, 1, 2, 3]


def test_what_was_not_acknowledged_is_given_again() -> None:
    rows = rows_of()
    rows.add(4)
    rows.wrote(range(4), ["response", "reward"])
    assert rows.take("train", 1, 2) == [0, 1]
    assert rows.take("train", 2, 2) == [2, 3]
    # Only rows that were taken under the lease.
    rows.acknowledge("train", 1, [0, 3])
    rows.give_back("train", 1)
    assert rows.take("train", 2, 4) == [1]
    rows.give_back("train", 2, but=[1, 3])
    assert rows.take("train", 1, 4) == [2]


def test_a_sampler_chooses_among_the_ready_rows() -> None:
    def whole_groups(ready: Sequence[int], count: int) -> Iterable[int]:
        """Rows in groups of two, the newest first."""
        groups = [row for row in ready if row % 2 == 0 and row + 1 in ready]
        return [row for group in reversed(groups) for row in (group, group + 1)][:count]

    rows = Rows({"train": (["x"], whole_groups)}, 10)
    rows.add(6)
    rows.wrote([0, 1, 2, 4, 5], ["x"])
    assert rows.take("train", 1, 2) == [4, 5]
    assert rows.take("train", 1, 2) == [0, 1]
    assert rows.take("train", 1, 2) is None
    rows.wrote([3], ["x"])
    assert rows.take("train", 1, 2) == [2, 3]


@pytest.mark.parametrize("chosen", [[0, 0], [7], [0, 1, 2]])
def test_a_sampler_that_chooses_what_it_may_not_is_refused_and_takes_nothing(chosen: list[int]) -> None:
    rows = Rows({"train": (["x"], lambda ready, count: chosen)}, 10)
    rows.add(3)
    rows.wrote(range(3), ["x"])
    with pytest.raises(ValueError, match="sampler of 'train' chose"):
        rows.take("train", 1, 2)
    chosen[:] = [0, 1]
    assert rows.take("train", 1, 2) == [0, 1]


def test_room_is_for_rows_that_are_not_cleared() -> None:
    rows = rows_of(capacity=3)
    rows.add(2)
    assert rows.has_room(1)
    assert not rows.has_room(2)
    rows.clear([0, 0, 5])
    assert rows.has_room(2)
    assert rows.count == 1
    # Numbers are not used again.
    assert rows.add(2) == [2, 3]


def test_a_cleared_row_is_cleared_for_all_consumers() -> None:
    rows = rows_of()
    rows.add(3)
    rows.wrote([0, 1], ["response", "reward"])
    assert rows.take("train", 1, 1) == [0]
    rows.clear([0, 1, 2])
    rows.wrote([0, 1, 2], ["response", "reward"])
    rows.give_back("train", 1)
    rows.acknowledge("train", 1, [0])
    assert rows.take("train", 1, 3) is None
    assert rows.take("reward", 2, 1) is None


def test_rows_without_fields_are_those_that_nothing_was_stored_for() -> None:
    rows = rows_of()
    rows.add(3)
    rows.wrote([1], ["response"])
    rows.clear([2])
    assert rows.without_fields([0, 1, 2]) == [0]


def test_a_finished_queue_gives_what_is_left_and_then_nothing() -> None:
    rows = rows_of()
    rows.add(3)
    rows.wrote([0, 1], ["response"])
    assert rows.take("reward", 1, 3) is None
    rows.is_finished = True
    # The last row may still get its field.
    assert rows.take("reward", 1, 3) is None
    rows.clear([2])
    assert rows.take("reward", 1, 3) == [0, 1]
    # Another process might give them back; this one knows what it has.
    assert rows.take("reward", 2, 3) is None
    assert rows.take("reward", 1, 3) == []
    rows.acknowledge("reward", 1, [0, 1])
    assert rows.take("reward", 2, 3) == []
    with pytest.raises(ValueError, match="the queue is finished"):
        rows.add(1)


def test_an_unknown_consumer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no consumer 'eval', only 'reward', 'train'"):
        rows_of().fields_of("eval")
