"""How the owner of a group makes its members, tells them who is in it, and stops them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, cast

from aiodaft._protocol.calls.following import NOWHERE
from aiodaft._protocol.groups.roster import Roster
from aiodaft._protocol.node.resources import Demand
from aiodaft._protocol.placement.request import Request
from aiodaft._protocol.supervision.child import REACHABLE, ChildState
from aiodaft._runtime.agent import agent_of
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.calls.following import FollowingTarget, followed
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.owning import Owner
from aiodaft._runtime.scope_actors import Blueprint, Constraints, Reserved, ScopeActors, Seat
from aiodaft._runtime.supervision.child_spec import Enrolment
from aiodaft.actor import CallTarget, Handle, target_of
from aiodaft.exceptions import OutcomeUnknown
from aiodaft.group import Group
from aiodaft.ref import Ref


class GroupScope(Protocol):
    """What a group uses of the scope that owns its members."""

    def check_open(self, what: str) -> None: ...
    async def request(self, label: str, demand: Demand, constraints: Constraints, count: int = 1) -> Request: ...
    def beside(self, constraints: Constraints) -> Target | None: ...
    async def spawn_one(self, what: Blueprint, seat: Seat | None = None) -> Handle: ...
    async def stop_handles(self, handles: list[Any], first: Callable[[], Awaitable[None]] | None = None) -> None: ...


class GroupMembers:
    """The members of one group, for the process that owns them."""

    def __init__(self, scope: GroupScope, owner: Owner, actors: ScopeActors, what: Blueprint) -> None:
        self._scope = scope
        self._owner = owner
        self._actors = actors
        self._what = what
        # What each member is told, also when it is made again.
        self._enrolments: dict[CallTarget, Enrolment] = {}

    async def grow(self, wanted: Roster[Any], ranks: Sequence[int]) -> list[Handle]:
        """Make new members for these ranks of `wanted`: all of them or none.

        Cancellation: they are taken back.
        """
        if not ranks:
            return []
        cls = self._what.cls
        self._scope.check_open(f"{cls.__name__} cannot be spawned")
        base = self._owner.new_label(cls)
        gangs = self._gangs(ranks)
        shares = await self._reserve(base, gangs)
        where = [there for gang, there in gangs for _ in gang]
        made: dict[int, Handle] = {}

        async def make(rank: int, share: Reserved, there: Constraints) -> None:
            seat = Seat(share.wish.label, share, Enrolment(wanted, rank))
            handle = made[rank] = await self._scope.spawn_one(self._what._replace(constraints=there), seat)
            self._enrolments[target_of(handle)] = seat.enrolment

        try:
            # Waits for all, even if one fails or all are cancelled: a cancelled spawn stops its actor.
            results = await asyncio.gather(*map(make, ranks, shares, where), return_exceptions=True)
            for error in filter(None, results):
                raise error
        except BaseException:
            self._actors.release(shares)
            await self.stop([made[rank] for rank in ranks if rank in made])
            raise
        return [made[rank] for rank in ranks]

    def _gangs(self, ranks: Sequence[int]) -> list[tuple[Sequence[int], Constraints]]:
        """The ranks that are placed together, and their constraints: one place, or wherever there is room.

        Beside a group, each rank has a place of its own: the process of the same rank there.
        """
        given = self._what.constraints
        if not isinstance(given.beside, Group):
            return [(ranks, given)]
        hosts, end = list(given.beside), max(ranks) + 1
        if len(hosts) < end:
            raise ValueError(f"{end} members go beside {given.beside!r}: there have to be as many, for rank by rank")
        return [([rank], given._replace(beside=hosts[rank])) for rank in ranks]

    async def _reserve(self, base: str, gangs: list[tuple[Sequence[int], Constraints]]) -> list[Reserved]:
        """Reserve the shares of all members, or of none."""
        shares: list[Reserved] = []
        try:
            for ranks, there in gangs:
                request = await self._scope.request(base, there.demand(self._what.cls), there, len(ranks))
                shares += await self._actors.reserve(request, ranks, there, self._scope.beside(there))
        except BaseException:
            self._actors.release(shares)
            raise
        return shares

    def tell(self, roster: Roster[Any], handles: list[Any]) -> Awaitable[object]:
        """Tell every member that is up; the others are told before they are up again.

        Args:
            roster: The members as users see them: handles or services.
            handles: Their handles.

        Returns:
            Await it to know that they know; if that is cancelled, they are told nevertheless. A member that dies
            meanwhile is told when it is made again.
        """
        targets = [cast("Target", target_of(member)) for member in handles]
        self._enrolments = {target: self._enrolments[target] for target in targets}
        for rank, enrolment in enumerate(self._enrolments.values()):
            enrolment.roster, enrolment.rank = roster, rank
        told = [self._tell(enrolment, target) for target, enrolment in self._enrolments.items()]

        async def wait() -> None:
            await asyncio.gather(*(ref.ready() for ref in told if ref is not None))

        # A task that holds the refs: without them, the calls are cancelled.
        return asyncio.shield(self._owner.start_task(wait(), f"tell the members of {roster.id}"))

    def _tell(self, enrolment: Enrolment, target: CallTarget) -> Ref[None] | None:
        actor = _actor_of(target)
        child = self._owner.directory.find(actor)
        if child is not None and child.state not in REACHABLE:
            return None
        told = enrolment.tell(self._owner.peer.caller, actor.remote, actor.actor)
        state_of(told).mark_seen()
        return told

    async def gone(self, roster: Roster[Any]) -> list[int]:
        """The ranks of the members that are gone for good."""
        found = await asyncio.gather(*(self._is_gone(_actor_of(target_of(member))) for member in roster.members))
        return [rank for rank, is_gone in enumerate(found) if is_gone]

    async def _is_gone(self, actor: Target) -> bool:
        child, peer = self._owner.directory.find(actor), actor.remote
        if isinstance(actor, FollowingTarget) and (child is None or child.state not in REACHABLE):
            return child is None
        sign = agent_of(self._owner.peer.caller, peer).report(actor.actor)
        await sign.ready()
        if not isinstance(sign.exception(), OutcomeUnknown):
            return False
        while child is not None and child.state in REACHABLE and child.place.peer == peer:
            # Its supervisor is about to hear of it.
            await child.changed()
        return child is None or child.state is ChildState.OVER

    async def see_off(self, leaving: list[Any], calls: list[set[Any]]) -> None:
        """Stop members that are in the group no more, the last rank first, when the calls under way there have ended.

        Args:
            leaving: The members.
            calls: The states of the calls of each.

        Cancellation: they are killed.
        """
        caller, actors = self._owner.peer.caller, [_actor_of(target_of(member)) for member in leaving]

        async def end() -> None:
            for actor in actors:
                agent_of(caller, actor.remote).discharge.tell(actor.actor)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._owner.process.options.stop_grace):
                    await asyncio.gather(*map(self._end_use, actors, calls))

        await self._scope.stop_handles(leaving, end)

    async def _end_use(self, actor: Target, calls: set[Any]) -> None:
        """Wait until calls have ended, and the process of an actor may end."""
        await asyncio.gather(*map(_over, calls))
        if isinstance(actor, FollowingTarget) and actor.place.peer == NOWHERE:
            return
        unneeded = agent_of(self._owner.peer.caller, actor.remote).unneeded(actor.actor)
        state_of(unneeded).mark_seen()
        await unneeded.ready()

    async def stop(self, members: list[Any]) -> None:
        """Stop new members that do not get into the group."""
        for member in members:
            self._enrolments.pop(target_of(member), None)
        await self._scope.stop_handles(members)


def _actor_of(target: CallTarget) -> Target:
    return followed(cast("Target", target))


async def _over(call: Any) -> None:
    over = asyncio.Event()
    call.watch(lambda _: over.set())
    await over.wait()
