"""How the owner of a group makes its members, tells them who is in it, and stops them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Protocol, cast

from aiodaft._protocol.groups.roster import Roster
from aiodaft._protocol.node.resources import Demand
from aiodaft._protocol.placement.request import Request
from aiodaft._protocol.supervision.child import REACHABLE
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.calls.following import PinnedTarget
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.owning import Owner
from aiodaft._runtime.scope_actors import Constraints, Reserved, ScopeActors, Seat
from aiodaft._runtime.supervision.child_spec import Enrolment
from aiodaft.actor import Handle, target_of
from aiodaft.group import Group
from aiodaft.ref import Ref


class GroupScope(Protocol):
    """What a group uses of the scope that owns its members."""

    def check_open(self, what: str) -> None: ...
    async def request(self, label: str, demand: Demand, constraints: Constraints, count: int = 1) -> Request: ...
    def beside(self, constraints: Constraints) -> Target | None: ...
    async def spawn_one(
        self,
        cls: type,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        constraints: Constraints,
        seat: Seat | None = None,
    ) -> Handle: ...
    async def stop_handles(self, handles: list[Any]) -> None: ...


class GroupMembers:
    """The members of one group, for the process that owns them."""

    def __init__(
        self,
        scope: GroupScope,
        owner: Owner,
        actors: ScopeActors,
        cls: type,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        constraints: Constraints,
    ) -> None:
        self._scope = scope
        self._owner = owner
        self._actors = actors
        self._class = cls
        self._args = args
        self._kwargs = kwargs
        self._constraints = constraints
        # By rank.
        self._enrolments: list[Enrolment] = []

    async def grow(self, wanted: Roster[Any]) -> list[Handle]:
        """Make the members that `wanted` has more: all of them or none.

        Cancellation: they are taken back.
        """
        cls, first = self._class, len(self._enrolments)
        self._scope.check_open(f"{cls.__name__} cannot be spawned")
        base = self._owner.new_label(cls)
        gangs = self._gangs(first, wanted.size)
        shares = await self._reserve(base, gangs)
        labels = [share.wish.label for share in shares]
        where = [there for ranks, there in gangs for _ in ranks]
        enrolments = [Enrolment(wanted, rank) for rank in range(first, wanted.size)]
        made: dict[str, Handle] = {}

        async def make(label: str, share: Reserved, enrolment: Enrolment, there: Constraints) -> None:
            seat = Seat(label, share, enrolment)
            made[label] = await self._scope.spawn_one(cls, self._args, self._kwargs, there, seat)

        try:
            # Waits for all, even if one fails or all are cancelled: a cancelled spawn stops its actor.
            results = await asyncio.gather(*map(make, labels, shares, enrolments, where), return_exceptions=True)
            for error in filter(None, results):
                raise error
        except BaseException:
            self._actors.release(shares)
            await self._scope.stop_handles([made[label] for label in labels if label in made])
            raise
        self._enrolments += enrolments
        return [made[label] for label in labels]

    def _gangs(self, first: int, end: int) -> list[tuple[range, Constraints]]:
        """The ranks that are placed together, and their constraints: one place, or wherever there is room.

        Beside a group, each rank has a place of its own: the process of the same rank there.
        """
        given = self._constraints
        if not isinstance(given.beside, Group):
            return [(range(first, end), given)]
        hosts = list(given.beside)
        if len(hosts) < end:
            raise ValueError(f"{end} members go beside {given.beside!r}: there have to be as many, for rank by rank")
        return [(range(rank, rank + 1), given._replace(beside=hosts[rank])) for rank in range(first, end)]

    async def _reserve(self, base: str, gangs: list[tuple[range, Constraints]]) -> list[Reserved]:
        """Reserve the shares of all members, or of none."""
        shares: list[Reserved] = []
        try:
            for ranks, there in gangs:
                request = await self._scope.request(base, there.demand(self._class), there, len(ranks))
                shares += await self._actors.reserve(request, ranks.start, there, self._scope.beside(there))
        except BaseException:
            self._actors.release(shares)
            raise
        return shares

    def tell(self, roster: Roster[Any], handles: list[Any]) -> Awaitable[object]:
        """Tell every member that is up; the others are told before they are up again.

        Returns:
            Await it to know that they know. A member that dies meanwhile is told when it is made again.
        """
        del self._enrolments[roster.size :]
        for enrolment in self._enrolments:
            enrolment.roster = roster
        told = [self._tell(enrolment, handle) for enrolment, handle in zip(self._enrolments, handles, strict=True)]
        return asyncio.gather(*(ref.ready() for ref in told if ref is not None))

    def _tell(self, enrolment: Enrolment, handle: object) -> Ref[None] | None:
        target = cast("Target", target_of(handle))
        if isinstance(target, PinnedTarget):
            target = target.followed
        child = self._owner.directory.find(target)
        if child is not None and child.state not in REACHABLE:
            return None
        told = enrolment.tell(self._owner.peer.caller, target.remote, target.actor)
        state_of(told).mark_seen()
        return told

    async def shrink(self, surplus: list[Any]) -> None:
        """Stop members that are in the group no more, the last rank first.

        Cancellation: they are killed.
        """
        await self._scope.stop_handles(surplus)
