"""Groups that came from another process: their rosters follow the changes that the owner of the group makes.

A `RosterCell` has the roster as this process knows it; all copies of a group in a process share one. As long as one
lives, this process asks the owner for the next change, which is answered when there is one.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from aiodaft._protocol.groups.roster import Roster
from aiodaft._runtime.platform.tasks import logger
from aiodaft._runtime.process import Process
from aiodaft.exceptions import DaftError
from aiodaft.ref import Ref

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
    """The groups that one process knows of."""

    def __init__(self, process: Process, ask: AskOwner) -> None:
        self._process = process
        self._ask = ask
        self._known: weakref.WeakValueDictionary[str, RosterCell] = weakref.WeakValueDictionary()

    def own(self, cell: RosterCell) -> None:
        """A group of this process: others ask it for changes."""
        self._known[cell.roster.id] = cell

    def find(self, group: str) -> RosterCell | None:
        return self._known.get(group)

    def copy(self, roster: Roster[Any]) -> RosterCell:
        """The cell of a group that came with this roster, from any thread."""
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
