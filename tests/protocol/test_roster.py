"""The ranks of members after a change of a group."""

from __future__ import annotations

import pytest

from aiodaft._protocol.groups.roster import seats_after


@pytest.mark.parametrize(
    ("size", "staying", "n", "seats"),
    [
        (3, (0, 1, 2), 3, (0, 1, 2)),
        (3, (0, 1, 2), 5, (0, 1, 2)),
        (3, (0, 1, 2), 2, (0, 1)),
        (4, (0, 3), 4, (0, None, None, 3)),
        (4, (0, 3), 6, (0, None, None, 3)),
        (4, (1, 3), 2, (1, 3)),
        (4, (1, 3), 3, (1, 3)),
        (4, (1, 3), 1, (1,)),
        (2, (), 0, ()),
        (0, (), 4, ()),
    ],
)
def test_ranks_are_kept_if_the_group_does_not_shrink_and_closed_if_it_does(
    size: int, staying: tuple[int, ...], n: int, seats: tuple[int | None, ...]
) -> None:
    assert seats_after(size, staying, n) == seats
