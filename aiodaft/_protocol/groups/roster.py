"""The members of a group by rank, with an epoch that grows with every change. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Generic, TypeAlias, TypeVar, cast

from aiodaft._protocol.ids import PeerId


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
        """The first axis grows or shrinks, so that places stay.

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
        """In the order of the grid.

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
        """In the order of the places; ranks in their order."""
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


T_co = TypeVar("T_co", covariant=True)

# The steps to a part: in each, the axes along which its members differ, or their ranks.
Steps: TypeAlias = tuple[tuple[str, ...] | tuple[int, ...], ...]


@dataclass(frozen=True)
class Roster(Generic[T_co]):
    """The members of a group at one epoch.

    Attributes:
        id: Unique in its cluster: the owner's name for it, an @, and the owner.
        epoch: Counts the changes and restarts of its members, from 1.
        members: By rank; empty while they are being made.
        since: The epoch at which it got these members. Later epochs with the same `since` have the same members.
    """

    id: str
    epoch: int
    size: int
    axes: Axes
    members: tuple[T_co, ...] = ()
    since: int = 0

    @property
    def is_complete(self) -> bool:
        return len(self.members) == self.size

    @property
    def owner(self) -> PeerId:
        return PeerId(self.id.partition("@")[2])

    def part(self, ranks: tuple[int, ...], name: str, axes: Axes) -> Roster[T_co]:
        """`name` tells the part from the others of the group."""
        members = tuple(self.members[rank] for rank in ranks) if self.members else ()
        return Roster(f"{self.id}/{name}", self.epoch, len(ranks), axes, members, self.since)

    def along(self, rank: int, names: tuple[str, ...]) -> tuple[Roster[T_co], int]:
        """The members that differ from one only in some of the axes, and its rank among them.

        Raises:
            ValueError: There is no such axis.
        """
        ranks, picked = self.axes.along(rank, names), self.axes.pick(names)
        fixed = self.axes.drop(names).pairs
        at = self.axes.coords(rank)
        where = ",".join(f"{name}={at[name]}" for name, _ in fixed)
        return self.part(ranks, f"{'+'.join(picked.sizes)}[{where}]", picked), ranks.index(rank)

    def some(self, rank: int, ranks: tuple[int, ...]) -> tuple[Roster[T_co], int]:
        """The members with these ranks, in this order, and the rank of one of them among them.

        Raises:
            ValueError: There is no such rank, one comes twice, or that of the member is none of them.
        """
        if len(set(ranks)) < len(ranks) or not all(0 <= one < self.size for one in ranks):
            raise ValueError(f"{list(ranks)}: a part of {self.id} has different ranks from 0 to {self.size - 1}")
        if rank not in ranks:
            raise ValueError(f"{list(ranks)}: rank {rank} of {self.id} is none of them, and so not in this part")
        first, last = ranks[0], ranks[-1]
        step = ranks[1] - first if len(ranks) > 1 else 1
        even = range(first, last + step, step)
        name = f"{even.start}:{even.stop}:{step}" if tuple(even) == ranks else ",".join(map(str, ranks))
        return self.part(ranks, name, Axes()), ranks.index(rank)

    def narrowed(self, rank: int, steps: Steps) -> tuple[Roster[T_co], int]:
        roster = self
        for step in steps:
            names = [name for name in step if isinstance(name, str)]
            if names or not step:
                roster, rank = roster.along(rank, tuple(names))
            else:
                roster, rank = roster.some(rank, tuple(one for one in step if isinstance(one, int)))
        return roster, rank


def seats_after(size: int, staying: Sequence[int], n: int) -> tuple[int | None, ...]:
    """The holders of the first ranks after a change: former ranks, None for a new member.

    Args:
        staying: The ranks of those that can stay.
        n: The number of members after it. Unless it is below `size`, ranks are kept; else they are closed, and the last
            members leave if there are too many.
    """
    if n < size:
        return tuple(staying[:n])
    kept = frozenset(staying)
    return tuple(rank if rank in kept else None for rank in range(size))
