"""The members of a group by rank, with an epoch that grows with every change. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from aiodaft._protocol.groups.axes import Axes
from aiodaft._protocol.ids import PeerId

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Roster(Generic[T_co]):
    """The members of a group at one epoch.

    Attributes:
        id: The name of the group, unique in its cluster: the owner's name for it, an @, and the owner.
        epoch: Counts the changes and restarts of its members, from 1. No two rosters of a group have the same.
        size: The number of members.
        axes: The grid that the ranks form.
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

    def along_all(self, rank: int, uses: Iterable[tuple[str, ...]]) -> tuple[Roster[T_co], int]:
        roster = self
        for names in uses:
            roster, rank = roster.along(rank, names)
        return roster, rank


def seats_after(size: int, staying: Sequence[int], n: int) -> tuple[int | None, ...]:
    """The holders of the first ranks after a change: former ranks, None for a new member. All others are new.

    Args:
        size: The number of members before.
        staying: The ranks of those that can stay, in order.
        n: The number of members after it. If it is at least `size`, ranks are kept; else the ranks are closed, and the
            last members leave if there are too many.
    """
    if n < size:
        return tuple(staying[:n])
    kept = frozenset(staying)
    return tuple(rank if rank in kept else None for rank in range(size))
