"""The groups that the actors of this process are members of, as the owners of the groups have told."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from aiodaft._protocol.groups.roster import Roster
from aiodaft._protocol.ids import ActorId, number_of
from aiodaft._runtime.platform.tasks import logger
from aiodaft._runtime.process import Process
from aiodaft.exceptions import DaftError, GroupChanged
from aiodaft.ref import Ref


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
    def __init__(self) -> None:
        self._standings: dict[ActorId, Standing] = {}
        # Told of each actor whose group has changed, or whose members have become known.
        self.on_told: list[Callable[[ActorId], object]] = []
        # Told of each actor that is gone.
        self.on_forgotten: list[Callable[[ActorId], object]] = []

    def find(self, actor: ActorId) -> Standing | None:
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
    now = "" if newest is None else f", it has epoch {newest} now"
    error = GroupChanged(f"{group} has changed: {what} is of epoch {epoch}{now}; use what current_group() gives now")
    error.group = group
    return error


# Groups that came from another process: their rosters follow the changes that the owner of the group makes.
#
# A `RosterCell` has the roster as this process knows it; all copies of a group in a process share one. As long as one
# lives, this process asks the owner for the next change, which is answered when there is one.

# Asks the owner of a group for its roster, once that has another epoch than this one: without the members if they are
# the same. None if the group is gone.
AskOwner: TypeAlias = Callable[[Roster[Any]], Ref[Roster[Any] | None]]


class RosterCell:
    """The newest roster of a group that this process knows."""

    def __init__(self, roster: Roster[Any]) -> None:
        self.roster = roster
        # Whether changes come here.
        self.follows = True
        self._changed = asyncio.Event()

    def change(self, roster: Roster[Any]) -> None:
        self.roster = roster
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def after(self, epoch: int) -> Roster[Any]:
        while self.roster.epoch <= epoch:
            await self._changed.wait()
        return self.roster


class Rosters:
    def __init__(self, process: Process, ask: AskOwner) -> None:
        self._process = process
        self._ask = ask
        self._known: weakref.WeakValueDictionary[str, RosterCell] = weakref.WeakValueDictionary()

    def own(self, cell: RosterCell) -> None:
        self._known[cell.roster.id] = cell

    def find(self, group: str) -> RosterCell | None:
        return self._known.get(group)

    def copy(self, roster: Roster[Any]) -> RosterCell:
        cell = self._known.get(roster.id)
        if cell is None:
            cell = self._known[roster.id] = RosterCell(roster)
            self._process.call_soon(partial(self._begin, weakref.ref(cell)))
        elif cell.roster.epoch < roster.epoch:
            self._process.call_soon(partial(cell.change, roster))
            if not cell.follows:
                cell.follows = True
                self._process.call_soon(partial(self._begin, weakref.ref(cell)))
        return cell

    def _begin(self, cell: weakref.ref[RosterCell]) -> None:
        known = cell()
        if known is None or self._process.closed is not None:
            return
        # In a context of its own: the call that brought the group may have ended long before.
        follow = partial(self._process.tasks.create_task, self._follow(cell), name=f"follow {known.roster.id}")
        task = Context().run(follow)
        weakref.finalize(known, self._process.call_soon, task.cancel).atexit = False

    async def _follow(self, cell: weakref.ref[RosterCell]) -> None:
        while (known := cell()) is not None:
            roster = known.roster
            # Not kept while this waits: without copies, the task is cancelled.
            del known
            found: Roster[Any] | None = None
            try:
                found = await self._ask(roster)
            except DaftError as error:
                logger.debug("%s is not followed any more: %s", roster.id, error)
            known = cell()
            if known is None:
                return
            if found is None:
                known.follows = False
                return
            if found.since == roster.since:
                found = replace(found, members=roster.members)
            if found.epoch > known.roster.epoch:
                known.change(found)
