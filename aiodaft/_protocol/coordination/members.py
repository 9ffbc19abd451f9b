"""The table of members: the nodes of the cluster. Pure.

A node's name belongs to one incarnation, until its lease is over: a node that cannot be reached may still be alive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aiodaft._protocol.coordination.records import Member
from aiodaft.exceptions import LeaseLost, NameTaken


class MemberTable:
    """Members by name. Only `put` changes anything; decisions do not."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._by_epoch: dict[int, Member] = {}

    def get(self, name: str) -> Member | None:
        return self._members.get(name)

    def of(self, epoch: int) -> Member | None:
        return self._by_epoch.get(epoch)

    def all(self) -> list[Member]:
        return [self._members[name] for name in sorted(self._members)]

    def admit(self, wanted: Member) -> int:
        """The epoch of a process that asks again, because it missed the answer; 0: it needs a new one.

        Raises:
            NameTaken: Another process has the name.
        """
        held = self._members.get(wanted.name)
        if held is None:
            return 0
        if held.peer == wanted.peer:
            return held.epoch
        raise NameTaken(
            f"{held.peer} at {held.address} is node {wanted.name!r}; the name is free when that node leaves, or is not "
            "heard for the time of its lease"
        )

    def check_holds(self, claimed: Member, *, recovering: bool) -> None:
        """Raise LeaseLost unless a node still has its epoch, after a restart of the coordinator or a lost link.

        `recovering`: members that the coordinator does not know may have leases.
        """
        held = self._members.get(claimed.name)
        if held is None:
            known = recovering
        elif held.epoch == claimed.epoch:
            known = held.peer == claimed.peer
        else:
            # The coordinator does not know the newer incarnation: its store had lost the end of its log.
            known = recovering and held.epoch < claimed.epoch
        if not known:
            raise LeaseLost(f"node {claimed.name!r} is not a member any more; it has to join as a new incarnation")

    def note_free(self, epoch: int, free: Mapping[str, float]) -> None:
        member = self._by_epoch[epoch]
        self._members[member.name] = self._by_epoch[epoch] = replace(member, free=dict(free))

    def put(self, name: str, record: Member | None) -> Member | None:
        """Carry out a change; returns the former record."""
        before = self._members.pop(name, None)
        if before is not None:
            del self._by_epoch[before.epoch]
        if record is not None:
            self._members[name] = self._by_epoch[record.epoch] = record
        return before
