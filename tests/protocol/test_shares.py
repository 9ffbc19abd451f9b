"""Batches in even parts."""

from __future__ import annotations

import pytest

from aiodaft._protocol.groups.roster import even_shares


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("rows", range(20))
def test_parts_follow_each_other_and_differ_by_at_most_one(rows: int, count: int) -> None:
    parts = [list(range(rows))[share] for share in even_shares(rows, count)]
    assert [row for part in parts for row in part] == list(range(rows))
    sizes = [len(part) for part in parts]
    assert len(sizes) == count
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
