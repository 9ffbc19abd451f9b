"""The members of a group by rank, with an epoch that grows with every change. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from aiodaft._protocol.groups.axes import Axes
from aiodaft._protocol.ids import PeerId

T_co = TypeVar("T_co", covariant=True)

# The steps to a part: in each, the axes along which its members differ, or their ranks.
Steps: TypeAlias = tuple[tuple[str, ...] | tuple[int, ...], ...]


@dataclass(frozen=True)
class Roster(Generic[T_co]):
    """The members of a group at one epoch.

    Attributes:
        id: The name of the group, unique in its cluster: the owner's name for it, an @, and the owner.
        epoch: Counts the changes and restarts of its members, from 1. No two rosters of a group have the same.
        members: The members by rank; empty while they are being made.
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
        """Some of the members, in this order; `name` tells the part from the others of the group."""
        members = tuple(self.members[rank] for rank in ranks) if self.members else ()
        return Roster(f"{self.id}/{name}", self.epoch, len(ranks), axes, members, self.since)

    def along(self, rank: int, names: tuple[str, ...]) -> tuple[Roster[T_co], int]:
        """The members that differ from one only in some of the axes, and the rank of that one among them.

        Raises:
            ValueError: There is no such axis.
        """
        ranks, picked = self.axes.along(rank, names), self.axes.pick(names)
        fixed = self.axes.drop(names).pairs
        at = self.axes.coords(rank)
        where = ",".join(f"{name}={at[name]}" for name, _ in fixed)
        return self.part(ranks, f"{'+'.join(picked.sizes)}[{where}]", picked), ranks.index(rank)

    def some(self, rank: int, ranks: tuple[int, ...]) -> tuple[Roster[T_co], int]:
        """The members with these ranks, and the rank of one of them among them. Their order counts.

        Raises:
            ValueError: There is no such rank, one comes twice, or that of the member is none of them.
        """
        if len(set(ranks)) < len(ranks) or not all(0 <= one < self.size for one in ranks):
            raise ValueError(f"{list(ranks)}: a part of {self.id} has different ranks from 0 to {self.size - 1}")
        if rank not in ranks:
            raise ValueError(f"{list(ranks)}: rank {rank} of {self.id} is none of them, and so not in this part")
        # Many ranks have a short name, too, if they are a slice.
        first, last = ranks[0], ranks[-1]
        step = ranks[1] - first if len(ranks) > 1 else 1
        even = range(first, last + step, step)
        name = f"{even.start}:{even.stop}:{step}" if tuple(even) == ranks else ",".join(map(str, ranks))
        return self.part(ranks, name, Axes()), ranks.index(rank)

    def narrowed(self, rank: int, steps: Steps) -> tuple[Roster[T_co], int]:
        """The part of the group that several steps give, and the rank of a member in it."""
        roster = self
        for step in steps:
            names = [name for name in step if isinstance(name, str)]
            if names or not step:
                roster, rank = roster.along(rank, tuple(names))
            else:
                roster, rank = roster.some(rank, tuple(one for one in step if isinstance(one, int)))
        return roster, rank


def seats_after(size: int, staying: Sequence[int], n: int) -> tuple[int | None, ...]:
    """The holders of the first ranks after a change: former ranks, None for a new member. All others are new.

    Args:
        staying: The ranks of those that can stay, in order.
        n: The number of members after it. If it is at least `size`, ranks are kept; else the ranks are closed, and the
            last members leave if there are too many.
    """
    if n < size:
        return tuple(staying[:n])
    kept = frozenset(staying)
    return tuple(rank if rank in kept else None for rank in range(size))
