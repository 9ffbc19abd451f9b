"""Named axes: places of ranks, blocks and lines of a grid."""

from __future__ import annotations

import itertools

import pytest

from aiodaft._protocol.groups.roster import Axes, Roster

GRID = Axes.of({"pp": 2, "dp": 3, "tp": 2}, 12)


def test_the_last_axis_changes_fastest() -> None:
    places = [tuple(GRID.coords(rank).values()) for rank in range(12)]
    assert places == list(itertools.product(range(2), range(3), range(2)))
    assert dict(Axes().coords(5)) == {}


def test_blocks_are_the_ranks_at_each_place() -> None:
    assert GRID.blocks(["pp"]) == [tuple(range(6)), tuple(range(6, 12))]
    assert GRID.blocks(["tp"]) == [tuple(range(0, 12, 2)), tuple(range(1, 12, 2))]
    assert GRID.blocks(["tp", "pp"]) == [(0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11)]
    assert GRID.blocks(["pp", "dp", "tp"]) == [(rank,) for rank in range(12)]


def test_along_some_axes_are_the_ranks_that_have_the_other_places_in_common() -> None:
    for count in (1, 2, 3):
        for names in itertools.combinations(GRID.sizes, count):
            others = [name for name in GRID.sizes if name not in names]
            for rank in range(12):
                line = GRID.along(rank, names)
                assert rank in line
                assert line == tuple(sorted(line))
                assert len(line) == GRID.pick(names).count
                for name in others:
                    assert {GRID.coords(other)[name] for other in line} == {GRID.coords(rank)[name]}


def test_a_part_has_the_same_id_for_its_members_and_another_one_for_others() -> None:
    roster = Roster("g", 3, 12, GRID, tuple("abcdefghijkl"))
    parts = [roster.along(rank, ("dp",)) for rank in range(12)]
    assert {part.id for part, _ in parts} == {f"g/dp[pp={pp},tp={tp}]" for pp in range(2) for tp in range(2)}
    for rank, (part, own) in enumerate(parts):
        assert part.members[own] == roster.members[rank]
        assert (part.epoch, part.size, dict(part.axes.sizes)) == (3, 3, {"dp": 3})
    # While the members are being made, their ranks are known.
    unmade: Roster[str] = Roster("g", 3, 12, GRID)
    assert unmade.along(5, ("dp",))[1] == parts[5][1]
    assert not unmade.is_complete
    assert not unmade.along(5, ("dp",))[0].is_complete


def test_only_the_first_axis_changes_with_the_number_of_members() -> None:
    assert GRID.resized(18) == Axes.of({"pp": 3, "dp": 3, "tp": 2}, 18)
    assert Axes().resized(7) == Axes()
    for count in (0, 13):
        with pytest.raises(ValueError, match=f"axes pp=2 x dp=3 x tp=2 do not fit {count} members"):
            GRID.resized(count)


def test_wrong_axes_are_refused() -> None:
    with pytest.raises(ValueError, match="axes dp=2 have 2 places, for 3 members"):
        Axes.of({"dp": 2}, 3)
    with pytest.raises(ValueError, match="'dp' has 0 places"):
        Axes.of({"dp": 0}, 0)
    with pytest.raises(TypeError, match="a dict is needed"):
        Axes.of(4, 4)
    with pytest.raises(TypeError, match="'dp': True is not a name with a whole number"):
        Axes.of({"dp": True}, 1)
    with pytest.raises(ValueError, match="at least one axis"):
        GRID.pick([])
    with pytest.raises(ValueError, match="no axis 'x': it has none"):
        Axes().pick(["x"])
