"""Named axes of a group: the ranks as the points of a grid, as in a device mesh. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import cast


@dataclass(frozen=True)
class Axes:
    """The names and sizes of axes. Ranks run through the grid row by row: the last axis changes fastest.

    Without axes, a group has ranks only.
    """

    pairs: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, sizes: object, count: int) -> Axes:
        """Axes with these sizes, by name, for so many members; None: without axes.

        Raises:
            TypeError: A name is not a string, or a size is not an integer.
            ValueError: A size is below 1, or the grid has another number of points.
        """
        if sizes is None:
            return cls()
        if not isinstance(sizes, Mapping):
            raise TypeError(f"axes={sizes!r:.80}: a dict is needed, such as {{'dp': 2, 'tp': 2}}")
        pairs: list[tuple[str, int]] = []
        for name, size in cast("Mapping[object, object]", sizes).items():
            if not isinstance(name, str) or isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"axes: {name!r:.80}: {size!r:.80} is not a name with a whole number")
            if size < 1:
                raise ValueError(f"axes: {name!r} has {size} places: at least 1 is needed")
            pairs.append((name, size))
        made = cls(tuple(pairs))
        if made.pairs and made.count != count:
            raise ValueError(f"axes {made} have {made.count} places, for {count} members")
        return made

    @property
    def sizes(self) -> Mapping[str, int]:
        return MappingProxyType(dict(self.pairs))

    @property
    def count(self) -> int:
        return prod(size for _, size in self.pairs)

    def resized(self, count: int) -> Axes:
        """The same axes for another number of members: the first one grows or shrinks, so that places stay.

        Raises:
            ValueError: The other axes do not divide the number.
        """
        if not self.pairs:
            return self
        (first, _), *others = self.pairs
        rest = prod(size for _, size in others)
        if count % rest or not count:
            raise ValueError(f"axes {self} do not fit {count} members: give the new ones by `axes={{...}}`")
        return Axes(((first, count // rest), *others))

    def coords(self, rank: int) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for name, size in reversed(self.pairs):
            rank, found[name] = divmod(rank, size)
        return MappingProxyType({name: found[name] for name, _ in self.pairs})

    def pick(self, names: Iterable[str]) -> Axes:
        """Some of the axes, in the order of the grid.

        Raises:
            ValueError: There is no such axis, or no name.
        """
        wanted = tuple(names)
        known = [name for name, _ in self.pairs]
        for name in wanted:
            if name not in known:
                has = (
                    f"it has {', '.join(map(repr, known))}" if known else "it has none: `rt.group(n, Class, axes=...)`"
                )
                raise ValueError(f"the group has no axis {name!r}: {has}")
        if not wanted:
            raise ValueError("the name of at least one axis is needed")
        return Axes(tuple(pair for pair in self.pairs if pair[0] in wanted))

    def drop(self, names: Iterable[str]) -> Axes:
        wanted = set(names)
        return Axes(tuple(pair for pair in self.pairs if pair[0] not in wanted))

    def blocks(self, names: Iterable[str]) -> list[tuple[int, ...]]:
        """The ranks at each place on some of the axes: blocks in the order of the places, ranks in their order."""
        picked = self.pick(names)
        blocks: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.count):
            at = self.coords(rank)
            blocks.setdefault(tuple(at[name] for name, _ in picked.pairs), []).append(rank)
        return [tuple(ranks) for ranks in blocks.values()]

    def leads(self, names: Iterable[str], places: Mapping[str, int]) -> list[tuple[int, tuple[int, ...]]]:
        """The block at each place on some of the axes, as the rank that speaks for it and the others.

        Args:
            places: The place on other axes of the rank that speaks; negative ones count from the end. Default: 0.

        Raises:
            ValueError: There is no such axis or place.
        """
        wanted, others = tuple(names), self.drop(names)
        for name, place in places.items():
            size = dict(others.pairs).get(name)
            if size is None:
                raise ValueError(f"result={{{name!r}: {place}}}: {name!r} is not one of the other axes, {others}")
            if not -size <= place < size:
                raise ValueError(f"result={{{name!r}: {place}}}: the axis has the places 0 to {size - 1}")
        at = {name: places.get(name, 0) % size for name, size in others.pairs}
        found: list[tuple[int, tuple[int, ...]]] = []
        for block in self.blocks(wanted):
            lead = next(rank for rank in block if at.items() <= self.coords(rank).items())
            found.append((lead, tuple(rank for rank in block if rank != lead)))
        return found

    def along(self, rank: int, names: Iterable[str]) -> tuple[int, ...]:
        """The ranks, this one among them, that differ from it only in some of the axes."""
        moving = {name for name, _ in self.pick(names).pairs}
        at = self.coords(rank)
        fixed = [(name, place) for name, place in at.items() if name not in moving]
        every = ((other, self.coords(other)) for other in range(self.count))
        return tuple(other for other, there in every if all(there[name] == place for name, place in fixed))

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in self.pairs) or "(none)"


def even_shares(rows: int, count: int) -> list[slice]:
    """Parts whose sizes differ by at most one, the larger ones first, as of `torch.tensor_split`; some may be empty."""
    size, more = divmod(rows, count)
    starts = [index * size + min(index, more) for index in range(count + 1)]
    return [slice(first, last) for first, last in pairwise(starts)]
