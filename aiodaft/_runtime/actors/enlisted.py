"""The groups that the actors of this process are members of, as the owners of the groups have told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aiodaft._protocol.groups.roster import Roster
from aiodaft._protocol.ids import ActorId, number_of
from aiodaft.exceptions import GroupChanged


class Standing:
    """The place of an actor in its group at one epoch. The members become known when all are made."""

    def __init__(self, roster: Roster[Any], rank: int) -> None:
        self.roster = roster
        self.rank = rank
        # Set when the group has changed since, or the actor has left it.
        self.over = asyncio.Event()

    @property
    def is_current(self) -> bool:
        return not self.over.is_set()


class Enlisted:
    """The standing of each actor of one process that is a member of a group."""

    def __init__(self) -> None:
        self._standings: dict[ActorId, Standing] = {}
        # Told of each actor whose group has changed, or whose members have become known.
        self.on_told: list[Callable[[ActorId], object]] = []
        # Told of each actor that is gone.
        self.on_forgotten: list[Callable[[ActorId], object]] = []

    def find(self, actor: ActorId) -> Standing | None:
        """The standing of an actor now; None if it is no member."""
        return self._standings.get(actor)

    def has(self, actor: ActorId) -> bool:
        return any(number_of(other) == number_of(actor) for other in self._standings)

    def has_several_of(self, group: str) -> bool:
        """Whether several members of a group are in this process."""
        return sum(standing.roster.id == group for standing in self._standings.values()) > 1

    def enlist(self, actor: ActorId, roster: Roster[Any], rank: int) -> None:
        """Note the roster and rank that the owner of a group has sent to a member, also before the member is made."""
        known = self._standings.get(actor)
        if known is not None and known.roster.epoch == roster.epoch:
            known.roster = roster
        else:
            if known is not None:
                known.over.set()
            self._standings[actor] = Standing(roster, rank)
        for told in self.on_told:
            told(actor)

    def renew(self, actor: ActorId, epoch: int, since: int) -> bool:
        """Note a new epoch of a group with the members that it has `since` another; whether the actor knows these."""
        known = self._standings.get(actor)
        if known is None or not known.roster.is_complete or known.roster.since != since:
            return False
        self.enlist(actor, replace(known.roster, epoch=epoch), known.rank)
        return True

    def discharge(self, actor: ActorId) -> None:
        """An actor has left its group, and finishes the calls that it has."""
        known = self._standings.get(actor)
        if known is not None:
            known.over.set()

    def forget(self, actor: ActorId) -> None:
        known = self._standings.pop(actor, None)
        if known is not None:
            known.over.set()
            for told in self.on_forgotten:
                told(actor)


def changed(group: str, epoch: int, newest: int | None = None, what: str = "this") -> GroupChanged:
    """The error of an object (`what`) that belongs to an earlier epoch of a group."""
    now = "" if newest is None else f", it has epoch {newest} now"
    error = GroupChanged(f"{group} has changed: {what} is of epoch {epoch}{now}; use what current_group() gives now")
    error.group = group
    return error
