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
from dataclasses import dataclass
from itertools import product, zip_longest
from typing import Final, NamedTuple

from aiodaft._protocol.groups.layout import Box, Grid, overlap

# The most bytes of one message, and how many of them a rank has on the way at a time.
_PARCEL: Final = 32 << 20
_ON_THE_WAY: Final = 4
# The least limit of a message, for small tensors too: a message costs as much time as the copy of that much.
_LEAST: Final = 256 << 10


class Piece(NamedTuple):
    """A part of a tensor that one rank of the source gives to one rank of the destination.

    Attributes:
        source_start: Its first element in the shard of that rank.
        target_start: Its first element in the shard of the rank that gets it.
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
    """A part of one tensor that some ranks of the source have and some of the destination need.

    Attributes:
        source_start: As in `Piece`, as are the others.
    """

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
    """The pieces that go to each rank.

    Attributes:
        sent: For each rank of the destination the pieces that other processes send it, large tensors first.
        kept: For each rank of the destination the pieces that its process has already.
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
    # The bytes that each source sends so far.
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
    """The cells that have elements of a box, each with its part of the box."""
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
