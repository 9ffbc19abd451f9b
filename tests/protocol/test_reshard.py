"""Layouts, and plans to move tensors between them, against an element-by-element account."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodaft._protocol.groups.reshard import (
    Box,
    Grid,
    Piece,
    Plan,
    Rule,
    bundle,
    by_source,
    even_cuts,
    filtered,
    lay_out,
    nbytes_in,
    plan,
    relayed,
)
from aiodaft._protocol.groups.roster import Axes

Element = tuple[int, ...]


def axes(**sizes: int) -> Axes:
    return Axes.of(sizes, prod(sizes.values()))


def grid(shape: tuple[int, ...], over: Axes, itemsize: int = 4, **dims: tuple[str, ...]) -> Grid:
    """Cut over these axes: `d0=("tp",)` for dimension 0."""
    rule = Rule(shape, {int(name[1:]): names for name, names in dims.items()}, {}, {})
    return lay_out("w", rule, "float32", itemsize, over)


def elements(box: Box | None) -> set[Element]:
    return set() if box is None else set(itertools.product(*(range(start, stop) for start, stop in box)))


def moved(piece: Piece, source: Grid, target: Grid, rank: int) -> Iterator[tuple[Element, Element]]:
    """The elements of a piece: where each was in the whole tensor, and where it gets to."""
    given, taken = source.box(piece.source), target.box(rank)
    assert given is not None
    assert taken is not None
    for at in itertools.product(*(range(length) for length in piece.size)):
        was = tuple(base + first + i for (base, _), first, i in zip(given, piece.source_start, at, strict=True))
        gets = tuple(base + first + i for (base, _), first, i in zip(taken, piece.target_start, at, strict=True))
        assert was in elements(given)
        yield was, gets


def check(source: dict[str, Grid], target: dict[str, Grid], homes: list[int | None]) -> Plan:
    """Each element comes once, from a rank that has it, to its place; and no byte is sent that need not be."""
    made = plan(source, target, homes)
    for rank, home in enumerate(homes):
        got: dict[str, list[Element]] = {name: [] for name in target}
        sent = 0
        for piece in (*made.sent[rank], *made.kept[rank]):
            for was, gets in moved(piece, source[piece.name], target[piece.name], rank):
                assert was == gets
                got[piece.name].append(was)
        assert all(piece.source == home for piece in made.kept[rank])
        for name, wanted in target.items():
            needed = elements(wanted.box(rank))
            assert sorted(got[name]) == sorted(needed)
            here = set() if home is None else elements(source[name].box(home))
            sent += len(needed - here) * wanted.itemsize
        assert sum(piece.nbytes for piece in made.sent[rank]) == sent
        # So that small tensors are cut, as large ones are.
        check_schedule(replace(made, least=1), rank)
    return made


def check_schedule(made: Plan, rank: int) -> None:
    """The messages carry the same elements, each from one source, in the bounds."""
    parcels = list(made.schedule(rank))
    for parcel in parcels:
        assert len({piece.source for piece in parcel}) == 1
        assert len(parcel) == 1 or sum(piece.nbytes for piece in parcel) <= made.parcel
        assert parcel[0].nbytes <= made.parcel or prod(parcel[0].size) == 1
        at = 0
        for piece in parcel:
            assert at % piece.itemsize == 0
            at += piece.nbytes

    def spread(pieces: Iterator[Piece]) -> list[tuple[str, int, Element]]:
        return sorted(
            (piece.name, piece.source, tuple(map(sum, zip(piece.target_start, at, strict=True))))
            for piece in pieces
            for at in itertools.product(*map(range, piece.size))
        )

    assert spread(piece for parcel in parcels for piece in parcel) == spread(iter(made.sent[rank]))


@st.composite
def meshes(draw: st.DrawFn) -> Axes:
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (4,), (7,), (8,), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2)]))
    return axes(**dict(zip(("pp", "tp"), sizes, strict=False)))


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...], over: Axes, itemsize: int, *, whole: bool) -> Grid:
    """Some layout; a `whole` one has every element somewhere."""
    dims: dict[int, list[str]] = {}
    only: dict[str, tuple[int, ...]] = {}
    lengths: dict[int, tuple[int, ...]] = {}
    for name, size in draw(st.permutations(over.pairs)):
        use = draw(st.sampled_from([*range(len(shape)), "replicas", "only"]))
        if isinstance(use, int):
            dims.setdefault(use, []).append(name)
        elif use == "only":
            there = draw(st.sets(st.integers(0, size - 1), min_size=1))
            only[name] = tuple(sorted(there))
    for dim, names in dims.items():
        parts = prod(over.sizes[name] for name in names)
        if draw(st.booleans()):
            cuts = draw(st.lists(st.integers(0, shape[dim]), min_size=parts - 1, max_size=parts - 1).map(sorted))
            lengths[dim] = tuple(stop - start for start, stop in itertools.pairwise([0, *cuts, shape[dim]]))
    rule = Rule(shape, {dim: tuple(names) for dim, names in dims.items()}, only, lengths)
    made = lay_out("w", rule, "float32", itemsize, over)
    if whole:
        assert set().union(*(elements(made.box(rank)) for rank in range(over.count))) == elements(
            tuple((0, length) for length in shape)
        )
    return made


@st.composite
def moves(draw: st.DrawFn) -> tuple[dict[str, Grid], dict[str, Grid], list[int | None]]:
    before, after = draw(meshes()), draw(meshes())
    source: dict[str, Grid] = {}
    target: dict[str, Grid] = {}
    for name in ("a", "b")[: draw(st.integers(1, 2))]:
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        itemsize = draw(st.sampled_from([1, 2, 8]))
        source[name] = draw(grids(shape, before, itemsize, whole=True))
        target[name] = draw(grids(shape, after, itemsize, whole=False))
    together = draw(st.sampled_from([0, min(before.count, after.count)]))
    return source, target, [rank if rank < together else None for rank in range(after.count)]


@given(moves())
def test_each_element_comes_once_from_a_rank_that_has_it_and_no_other_is_sent(
    move: tuple[dict[str, Grid], dict[str, Grid], list[int | None]],
) -> None:
    made = check(*move)
    assert plan(*move) == made


def test_four_parts_become_three() -> None:
    made = check({"w": grid((8, 2), axes(tp=4), d0=("tp",))}, {"w": grid((8, 2), axes(tp=3), d0=("tp",))}, [None] * 3)
    assert [[(piece.source, piece.size) for piece in pieces] for pieces in made.sent] == [
        [(0, (2, 2)), (1, (1, 2))],
        [(1, (1, 2)), (2, (2, 2))],
        [(3, (2, 2))],
    ]


def test_a_dimension_is_cut_as_torch_chunk_does_with_empty_parts_at_the_end() -> None:
    assert even_cuts(8, 3) == (0, 3, 6, 8)
    assert even_cuts(5, 4) == (0, 2, 4, 5, 5)
    assert even_cuts(0, 2) == (0, 0, 0)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_replicas_pass_their_shard_to_two_others_at_most(count: int) -> None:
    rows = lay_out("w", Rule((4, 2), {0: ("tp",)}, {}, {}), "float32", 4, axes(tp=2))
    replicas = lay_out("w", Rule((4, 2), {0: ("tp",)}, {}, {}), "float32", 4, axes(replica=count, tp=2))
    made = relayed({"w": rows}, {"w": replicas}, [None] * (2 * count), 2)
    senders = Counter((piece.source, piece.source_start) for pieces in made.sent for piece in pieces)
    assert max(senders.values()) <= 2
    # All ranks get all of their elements once, from a source or from a rank before them.
    for rank, pieces in enumerate(made.sent):
        assert [piece.size for piece in pieces] == [(2, 2)]
        assert all(piece.source < 2 or piece.source - 2 < rank for piece in pieces)
        assert {piece.source % 2 for piece in pieces} == {rank % 2}


def test_a_dimension_is_cut_over_one_axis_after_the_other_as_dtensor_does() -> None:
    assert even_cuts(10, 2, 2) == (0, 3, 5, 8, 10)
    assert even_cuts(7, 2, 3) == (0, 2, 4, 4, 5, 6, 7)
    assert even_cuts(1, 2, 2) == (0, 1, 1, 1, 1)
    axes = Axes.of({"a": 2, "b": 2}, 4)
    assert lay_out("w", Rule((10,), {0: ("a", "b")}, {}, {}), "float32", 4, axes).cuts == ((0, 3, 5, 8, 10),)
    assert lay_out("w", Rule((10,), {0: ("b", "a")}, {}, {}), "float32", 4, axes).cells == ((0,), (2,), (1,), (3,))


def test_ranks_of_several_axes_share_a_dimension_the_last_axis_fastest() -> None:
    over = axes(a=2, b=3)
    assert [grid((6,), over, d0=("a", "b")).box(rank) for rank in range(6)] == [((i, i + 1),) for i in range(6)]
    assert [grid((6,), over, d0=("b", "a")).box(rank) for rank in range(6)] == [
        ((i, i + 1),) for i in (0, 2, 4, 1, 3, 5)
    ]


def test_replicas_share_the_sending() -> None:
    over = axes(dp=4, tp=2)
    source = {f"w{i}": grid((2, 3 + i), over, d0=("tp",)) for i in range(24)}
    target = {name: grid(one.shape, axes(tp=1)) for name, one in source.items()}
    made = check(source, target, [None])
    sent = [0] * over.count
    for piece in made.sent[0]:
        sent[piece.source] += piece.nbytes
    # A list schedule: the most exceeds the mean by less than the largest piece.
    assert max(sent) - sum(sent) / len(sent) < max(piece.nbytes for piece in made.sent[0])


def test_the_first_turns_of_ranks_go_to_different_sources() -> None:
    made = plan({"w": grid((8, 8), axes(tp=4), d0=("tp",))}, {"w": grid((8, 8), axes(tp=4), d1=("tp",))}, [None] * 4)
    assert [next(made.schedule(rank))[0].source for rank in range(4)] == [0, 1, 2, 3]


def test_on_the_way_is_at_most_the_largest_tensor_or_two_messages() -> None:
    for length in (1, 7, 1000, 1 << 20, 1 << 30):
        whole = {"w": grid((length,), axes(tp=1), itemsize=8)}
        made = plan(whole, whole, [None])
        assert 2 * made.bound <= max(made.largest, 2 * made.least)
        assert made.parcel <= made.bound


def test_many_small_tensors_go_in_few_messages() -> None:
    over = axes(tp=2)
    rows = {f"w{i}": grid((16, 64), over, d0=("tp",)) for i in range(500)}
    columns = {name: grid((16, 64), over, d1=("tp",)) for name in rows}
    made = plan(rows, columns, [None] * 2)
    assert [len(list(made.schedule(rank))) for rank in range(2)] == [4, 4]


def test_small_pieces_go_together_with_the_larger_elements_first() -> None:
    def piece(name: str, length: int, itemsize: int) -> Piece:
        return Piece(name, 0, (0,), (0,), (length,), itemsize, length * itemsize)

    parcels = bundle([piece("a", 3, 1), piece("b", 2, 8), piece("c", 30, 1), piece("d", 1, 4)], 24)
    assert [[(one.name, one.source_start, one.size) for one in parcel] for parcel in parcels] == [
        [("b", (0,), (2,)), ("a", (0,), (3,))],
        [("c", (0,), (24,))],
        [("d", (0,), (1,)), ("c", (24,), (6,))],
    ]


def test_parcels_are_filtered_by_piece_and_grouped_by_source() -> None:
    def piece(name: str, source: int) -> Piece:
        return Piece(name, source, (0,), (0,), (3,), 4, 12)

    a, b, c, d = piece("a", 0), piece("b", 0), piece("c", 1), piece("d", 0)
    parcels = [[a, b], [c], [d]]
    assert nbytes_in(parcels) == 48
    assert by_source(parcels) == {0: [[a, b], [d]], 1: [[c]]}
    assert filtered(parcels, lambda piece: piece.name in "bd") == [[b], [d]]


def test_what_no_rank_has_is_named() -> None:
    over = axes(pp=2)
    rule = Rule((4,), {0: ("pp",)}, {}, {})
    source = lay_out("w", rule, "float32", 4, over)
    lacking = source._replace(cells=(source.cells[0], None))
    with pytest.raises(ValueError, match=r"no rank of the source has \[2:4\] of 'w', which rank 0 needs"):
        plan({"w": lacking}, {"w": grid((4,), axes(tp=1))}, [None])


def test_tensors_that_differ_are_named() -> None:
    one = {"w": grid((4,), axes(tp=2), d0=("tp",))}
    with pytest.raises(ValueError, match="the source has no tensor 'v'"):
        plan(one, {"v": one["w"]}, [None] * 2)
    with pytest.raises(ValueError, match=r"'w' is float32 of shape \(4,\) in the source, and float32 of shape \(5,\)"):
        plan(one, {"w": grid((5,), axes(tp=1))}, [None])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule((4,), {1: ("tp",)}, {}, {}), "'w' has 1 dimensions, and none is 1"),
        (Rule((4,), {0: ("dp",)}, {}, {}), "'w' names the axis 'dp', and the axes are tp, pp"),
        (Rule((4,), {0: ("tp",)}, {"tp": (0,)}, {}), "'w' names the axis 'tp' twice"),
        (Rule((4,), {}, {"pp": (2,)}, {}), r"'w': axis 'pp' has the coordinates 0 to 1, not \[2\]"),
        (Rule((4,), {}, {"pp": ()}, {}), r"axis 'pp' has the coordinates 0 to 1, not \[\]"),
        (Rule((4,), {0: ("tp",)}, {}, {0: (2, 2)}), r"dimension 0 are 3 numbers with the sum 4, not \[2, 2\]"),
        (Rule((4,), {0: ("tp",)}, {}, {0: (3, 2, -1)}), "3 numbers with the sum 4"),
        (Rule((-1,), {}, {}, {}), r"'w' cannot have the shape \(-1,\)"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused(rule: Rule, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lay_out("w", rule, "float32", 4, axes(tp=3, pp=2))


def test_a_large_model_is_planned_with_one_piece_for_each_part_that_moves() -> None:
    """1,000 tensors over 64 ranks: the work grows with the bytes that move, not with pairs of ranks."""
    before, after = axes(tp=64), axes(dp=8, tp=8)
    source = {f"w{i}": grid((512, 64), before, d0=("tp",)) for i in range(1000)}
    target = {name: grid((512, 64), after, d0=("tp",)) for name in source}
    made = plan(source, target, [None] * 64)
    assert sum(map(len, made.sent)) == 1000 * 64 * 8
    assert sum(piece.nbytes for pieces in made.sent for piece in pieces) == 8 * sum(
        one.nbytes for one in source.values()
    )
