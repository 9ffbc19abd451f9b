"""Layouts: which part of a tensor each rank of a group has. Pure.

A tensor is cut in each dimension, so that its parts form a grid; a rank has one cell of the grid, or nothing. Ranks
with the same cell are replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple, TypeAlias

from aiodaft._protocol.groups.axes import Axes

# The first element and the end in each dimension.
Box: TypeAlias = tuple[tuple[int, int], ...]


class Grid(NamedTuple):
    """The parts of one tensor.

    Attributes:
        cuts: For each dimension the bounds of its intervals: 0, ..., length.
        cells: For each rank the numbers of its intervals; None if it has nothing.
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


def even_cuts(length: int, parts: int) -> tuple[int, ...]:
    """The bounds of the parts of a dimension as `torch.chunk` and DTensor cut it, with empty parts at the end."""
    step = -(-length // parts)
    return tuple(min(length, index * step) for index in range(parts + 1))


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
    """Cut a tensor by a rule.

    Raises:
        ValueError: The rule does not fit the shape or the axes.
    """
    sizes = axes.sizes
    _check(name, rule, sizes)
    cuts: list[tuple[int, ...]] = []
    for dim, length in enumerate(rule.shape):
        parts = prod(sizes[axis] for axis in rule.dims.get(dim, ()))
        given = rule.lengths.get(dim)
        if given is None:
            cuts.append(even_cuts(length, parts))
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


def _check(name: str, rule: Rule, axes: Mapping[str, int]) -> None:
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
