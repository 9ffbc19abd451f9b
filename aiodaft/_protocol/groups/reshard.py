"""Plans a move of tensors from one layout to another: which rank sends which part to which rank. Pure.

Every rank of the destination gets each of its elements exactly once, from one rank of the source that has it, or keeps
it if its process had it before. So the bytes that are sent are the fewest possible without ranks that pass parts on.
Among replicas, the rank that sends the fewest bytes so far is chosen, for large tensors first (list scheduling: Graham,
1969).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product, zip_longest
from math import prod
from typing import Final, NamedTuple, TypeAlias

from aiodaft._protocol.groups.roster import Axes

# Layouts. A tensor is cut in each dimension, so that its parts form a grid; a rank has one cell of the grid, or
# nothing. Ranks with the same cell are replicas.

Box: TypeAlias = tuple[tuple[int, int], ...]


class Grid(NamedTuple):
    """The parts of one tensor.

    Attributes:
        cuts: For each dimension the bounds of its intervals: 0, ..., length.
        cells: For each rank the numbers of its intervals.
    """

    dtype: str
    itemsize: int
    cuts: tuple[tuple[int, ...], ...]
    cells: tuple[tuple[int, ...] | None, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(cuts[-1] for cuts in self.cuts)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize

    def box(self, rank: int) -> Box | None:
        cell = self.cells[rank]
        return None if cell is None else self.box_of(cell)

    def box_of(self, cell: tuple[int, ...]) -> Box:
        return tuple((cuts[index], cuts[index + 1]) for cuts, index in zip(self.cuts, cell, strict=True))

    def bytes_in(self, box: Box) -> int:
        return prod(stop - start for start, stop in box) * self.itemsize

    def shard_shape(self, rank: int) -> tuple[int, ...] | None:
        box = self.box(rank)
        return None if box is None else tuple(stop - start for start, stop in box)


def even_cuts(length: int, *parts: int) -> tuple[int, ...]:
    """As DTensor cuts a dimension over one axis after the other, each as `torch.chunk`, with empty parts at the end."""
    cuts: tuple[int, ...] = (0, length)
    for count in parts:
        steps = ((start, stop, -(-(stop - start) // count)) for start, stop in pairwise(cuts))
        cuts = (0, *(min(stop, start + at * step) for start, stop, step in steps for at in range(1, count + 1)))
    return cuts


class Rule(NamedTuple):
    """The layout of one tensor.

    Attributes:
        dims: The axes over which a dimension is cut; the last one is the fastest.
        only: The coordinates in an axis at which ranks have the tensor.
        lengths: The lengths of the parts of a dimension, if they are not those of `even_cuts`.
    """

    shape: tuple[int, ...]
    dims: Mapping[int, tuple[str, ...]]
    only: Mapping[str, tuple[int, ...]]
    lengths: Mapping[int, Sequence[int]]


def lay_out(name: str, rule: Rule, dtype: str, itemsize: int, axes: Axes) -> Grid:
    sizes = axes.sizes
    _check_rule(name, rule, sizes)
    cuts: list[tuple[int, ...]] = []
    for dim, length in enumerate(rule.shape):
        over = [sizes[axis] for axis in rule.dims.get(dim, ())]
        parts = prod(over)
        given = rule.lengths.get(dim)
        if given is None:
            cuts.append(even_cuts(length, *over))
        elif len(given) != parts or min(given) < 0 or sum(given) != length:
            raise ValueError(
                f"{name!r}: the lengths of dimension {dim} are {parts} numbers with the sum {length}, not {list(given)}"
            )
        else:
            cuts.append(tuple(accumulate(given, initial=0)))
    cells = tuple(_cell(rule, axes.coords(rank), sizes) for rank in range(axes.count))
    return Grid(dtype, itemsize, tuple(cuts), cells)


def _cell(rule: Rule, at: Mapping[str, int], axes: Mapping[str, int]) -> tuple[int, ...] | None:
    if any(at[axis] not in there for axis, there in rule.only.items()):
        return None
    cell: list[int] = []
    for dim in range(len(rule.shape)):
        index = 0
        for axis in rule.dims.get(dim, ()):
            index = index * axes[axis] + at[axis]
        cell.append(index)
    return tuple(cell)


def _check_rule(name: str, rule: Rule, axes: Mapping[str, int]) -> None:
    if any(length < 0 for length in rule.shape):
        raise ValueError(f"{name!r} cannot have the shape {rule.shape}")
    for dim in (*rule.dims, *rule.lengths):
        if not 0 <= dim < len(rule.shape):
            raise ValueError(f"{name!r} has {len(rule.shape)} dimensions, and none is {dim}")
    used = [axis for over in rule.dims.values() for axis in over] + list(rule.only)
    for axis in used:
        if axis not in axes:
            raise ValueError(f"{name!r} names the axis {axis!r}, and the axes are {', '.join(axes) or 'none'}")
        if used.count(axis) > 1:
            raise ValueError(f"{name!r} names the axis {axis!r} twice: one dimension is cut over it, or `only` has it")
    for axis, there in rule.only.items():
        if not there or not all(0 <= index < axes[axis] for index in there):
            raise ValueError(f"{name!r}: axis {axis!r} has the coordinates 0 to {axes[axis] - 1}, not {list(there)}")


def overlap(first: Box, second: Box) -> Box | None:
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return None if any(start >= stop for start, stop in both) else both


# The most bytes of one message, and how many of them a rank has on the way at a time.
_PARCEL: Final = 32 << 20
_ON_THE_WAY: Final = 4
# The least limit of a message, for small tensors too: a message costs as much time as the copy of that much.
_LEAST: Final = 256 << 10
# The processes to which one process sends a shard, if replicas pass it on.
_CHILDREN: Final = 2


class Piece(NamedTuple):
    """A part of a tensor that one rank of the source gives to one rank of the destination; starts are first elements in
    the shards of these ranks.
    """

    name: str
    source: int
    source_start: tuple[int, ...]
    target_start: tuple[int, ...]
    size: tuple[int, ...]
    itemsize: int
    nbytes: int

    def part(self, dim: int, first: int, count: int) -> Piece:
        def moved(start: tuple[int, ...]) -> tuple[int, ...]:
            return (*start[:dim], start[dim] + first, *start[dim + 1 :])

        return self._replace(
            source_start=moved(self.source_start),
            target_start=moved(self.target_start),
            size=(*self.size[:dim], count, *self.size[dim + 1 :]),
            nbytes=self.nbytes // self.size[dim] * count,
        )


class Share(NamedTuple):
    """A part of a tensor that some ranks of the source have and some of the destination need; starts as in `Piece`."""

    cell: tuple[int, ...]
    box: Box
    holders: tuple[int, ...]
    takers: tuple[int, ...]
    source_start: tuple[int, ...]
    target_start: tuple[int, ...]
    size: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The pieces that go to each rank of the destination.

    Attributes:
        sent: Those that other processes send it, large tensors first.
        kept: Those that its process has already.
        least: Bytes that a message may have however small the tensors are.
    """

    sent: tuple[tuple[Piece, ...], ...]
    kept: tuple[tuple[Piece, ...], ...]
    largest: int
    least: int = _LEAST

    @property
    def parcel(self) -> int:
        return max(self.least, min(_PARCEL, self.largest // _ON_THE_WAY))

    @property
    def bound(self) -> int:
        """The bytes that a rank may have on the way, as a source and again as a destination.

        Both together are at most the largest tensor, or twice `least` if that is more.
        """
        return max(self.least, min(_ON_THE_WAY * self.parcel, self.largest // 2))

    def schedule(self, rank: int) -> Iterator[tuple[Piece, ...]]:
        """The messages to one rank of the destination, each from one source; the sources take turns.

        The first turn differs from rank to rank, so that not all ask the same source at the same time.
        """
        given: dict[int, list[Piece]] = {}
        for piece in self.sent[rank]:
            given.setdefault(piece.source, []).append(piece)
        turns = sorted(given, key=lambda source: (source < rank, source))
        queues = [bundle(given[source], self.parcel) for source in turns]
        return (parcel for turn in zip_longest(*queues) for parcel in turn if parcel is not None)


def plan(source: Mapping[str, Grid], target: Mapping[str, Grid], homes: Sequence[int | None]) -> Plan:
    """Plan a move. Equal arguments give equal plans.

    Args:
        homes: For each rank of the target the rank of the source that is in the same process.

    Raises:
        ValueError: The source lacks a tensor or part of it, or the tensors differ in shape or dtype.
    """
    sent: list[list[Piece]] = [[] for _ in homes]
    kept: list[list[Piece]] = [[] for _ in homes]
    loads: Counter[int] = Counter()
    # Most tensors of a model are laid out like others.
    known: dict[tuple[Grid, Grid], list[Share]] = {}
    # The sort is stable: tensors of one size keep their order.
    for name in sorted(target, key=lambda name: -target[name].nbytes):
        _check(name, source.get(name), target[name])
        key = source[name], target[name]
        shares = known.get(key)
        if shares is None:
            shares = known[key] = _shares(*key)
        for cell, box, holders, takers, source_start, target_start, size, nbytes in shares:
            if not holders:
                raise ValueError(
                    f"no rank of the source has {_elements(box)} of {name!r}, which rank {takers[0]} needs"
                )
            itemsize = key[0].itemsize
            for rank in takers:
                home = homes[rank]
                if home is not None and key[0].cells[home] == cell:
                    kept[rank].append(Piece(name, home, source_start, target_start, size, itemsize, nbytes))
                    continue
                chosen = holders[0] if len(holders) == 1 else min(holders, key=loads.__getitem__)
                loads[chosen] += nbytes
                sent[rank].append(Piece(name, chosen, source_start, target_start, size, itemsize, nbytes))
    largest = max((grid.nbytes for grid in target.values()), default=0)
    return Plan(tuple(map(tuple, sent)), tuple(map(tuple, kept)), largest)


def relays(target: Mapping[str, Grid], homes: Sequence[int | None]) -> dict[int, int]:
    """For ranks that replicas can pass their shard on to: the rank that does so. Each rank passes it to two at most."""
    parents: dict[int, int] = {}
    replicas: dict[tuple[tuple[int, ...] | None, ...], list[int]] = {}
    for rank, home in enumerate(homes):
        if home is None:
            ranks = replicas.setdefault(tuple(grid.cells[rank] for grid in target.values()), [])
            if len(ranks) >= _CHILDREN:
                parents[rank] = ranks[len(ranks) // _CHILDREN - 1]
            ranks.append(rank)
    return parents


def relayed(source: Mapping[str, Grid], target: Mapping[str, Grid], homes: Sequence[int | None], count: int) -> Plan:
    """As `plan`; but replicas pass shards on: rank `r` of the target is, as a source, number `count + r`."""
    parents = relays(target, homes)
    rest = {
        name: grid._replace(cells=tuple(None if rank in parents else cell for rank, cell in enumerate(grid.cells)))
        for name, grid in target.items()
    }
    made = plan(source, rest, homes)
    sent = list(made.sent)
    for rank, parent in parents.items():
        boxes = ((name, grid, grid.box(rank)) for name, grid in target.items())
        sent[rank] = tuple(
            Piece(name, count + parent, start := (0,) * len(box), start, tuple(end - first for first, end in box),
                  grid.itemsize, grid.bytes_in(box))
            for name, grid, box in boxes if box is not None and grid.bytes_in(box)
        )  # fmt: skip
    return replace(made, sent=tuple(sent))


def _check(name: str, source: Grid | None, target: Grid) -> None:
    if source is None:
        raise ValueError(f"the source has no tensor {name!r}")
    if (source.shape, source.dtype) != (target.shape, target.dtype):
        raise ValueError(
            f"{name!r} is {source.dtype} of shape {source.shape} in the source, "
            f"and {target.dtype} of shape {target.shape} in the destination"
        )


def _shares(source: Grid, target: Grid) -> list[Share]:
    holders = _by_cell(source)
    shares: list[Share] = []
    for target_cell, takers in _by_cell(target).items():
        target_box = target.box_of(target_cell)
        for cell, box in _overlapping(source, target_box):
            source_start, target_start = _offset(box, source.box_of(cell)), _offset(box, target_box)
            size = tuple(stop - start for start, stop in box)
            have = tuple(holders.get(cell, ()))
            shares.append(Share(cell, box, have, tuple(takers), source_start, target_start, size, source.bytes_in(box)))
    return shares


def _by_cell(grid: Grid) -> dict[tuple[int, ...], list[int]]:
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, cell in enumerate(grid.cells):
        if cell is not None:
            found.setdefault(cell, []).append(rank)
    return found


def _overlapping(grid: Grid, box: Box) -> Iterator[tuple[tuple[int, ...], Box]]:
    near = [
        range(bisect_right(cuts, start) - 1, bisect_left(cuts, stop))
        for cuts, (start, stop) in zip(grid.cuts, box, strict=True)
    ]
    for cell in product(*near):
        common = overlap(grid.box_of(cell), box)
        if common is not None:
            yield cell, common


def _offset(inner: Box, outer: Box) -> tuple[int, ...]:
    return tuple(first - base for (first, _), (base, _) in zip(inner, outer, strict=True))


def _elements(box: Box) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


def bundle(pieces: Iterable[Piece], limit: int) -> list[tuple[Piece, ...]]:
    """Cut large pieces, and put small ones together, into parcels of at most `limit` bytes.

    In a parcel, pieces with larger elements come first: so each element is aligned if the first one is.
    """
    parcels: list[list[Piece]] = []
    room = 0
    for whole in pieces:
        for piece in (whole,) if whole.nbytes <= limit else _cut(whole, limit):
            if piece.nbytes > room:
                parcels.append([])
                room = limit
            parcels[-1].append(piece)
            room -= piece.nbytes
    return [tuple(sorted(parcel, key=_descending)) for parcel in parcels]


def _descending(piece: Piece) -> int:
    return -piece.itemsize


def _cut(piece: Piece, limit: int) -> Iterator[Piece]:
    dim = next((dim for dim, length in enumerate(piece.size) if length > 1), None)
    if piece.nbytes <= limit or dim is None:
        yield piece
        return
    length = piece.size[dim]
    step = max(1, limit * length // piece.nbytes)
    for first in range(0, length, step):
        yield from _cut(piece.part(dim, first, min(step, length - first)), limit)


def nbytes_in(parcels: Iterable[Sequence[Piece]]) -> int:
    return sum(piece.nbytes for pieces in parcels for piece in pieces)


def filtered(parcels: Iterable[Sequence[Piece]], wanted: Callable[[Piece], bool]) -> list[list[Piece]]:
    chosen = ([piece for piece in pieces if wanted(piece)] for pieces in parcels)
    return [pieces for pieces in chosen if pieces]


def by_source(parcels: Iterable[list[Piece]]) -> dict[int, list[list[Piece]]]:
    found: dict[int, list[list[Piece]]] = {}
    for pieces in parcels:
        found.setdefault(pieces[0].source, []).append(pieces)
    return found
