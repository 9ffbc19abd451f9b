"""The changes of a group by its owner: it makes the members, tells each of the others, and stops them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final, TypeAlias, TypeVar, cast

from aiodaft._protocol.calls.outgoing import NOWHERE
from aiodaft._protocol.groups.roster import Axes, Roster, seats_after
from aiodaft._protocol.ids import node_of
from aiodaft._protocol.supervision import REACHABLE, ChildState
from aiodaft._runtime.actors.host import RosterCell, Rosters
from aiodaft._runtime.agent import Enrolment, agent_of
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.calls.following import FollowingTarget, followed
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.placing import Blueprint, Constraints, Reserved
from aiodaft._runtime.scope_actors import ScopeActors
from aiodaft.actor import Actor, CallTarget, Handle, target_of
from aiodaft.exceptions import OutcomeUnknown, PeerLost
from aiodaft.group import Group, Prepare
from aiodaft.ref import Ref
from aiodaft.service import ServiceGroup

ActorT = TypeVar("ActorT")

_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 1.0

_Told: TypeAlias = tuple[CallTarget, Ref[Any]]
# Gives the members of a group, which are encoded once.
_Encoded: TypeAlias = Callable[[], Ref[tuple[Any, ...]]]

# The changes whose `prepare` the running code belongs to.
_preparing_here: ContextVar[tuple[Roster[Any] | None, ...]] = ContextVar("aiodaft_preparing", default=())


async def spawn_group(scope: ScopeActors, n: int, what: Blueprint, axes: Axes) -> Group[Any]:
    """Make a group of actors or services; awaiting `group` does this."""
    cls, owner = what.cls, scope.owner
    scope.check_spawning(cls)
    roster = Roster[Any](owner.new_group(cls), 0, 0, Axes())
    members = GroupMembers(scope, what, roster)
    kind = Group if issubclass(cls, Actor) else ServiceGroup
    group: Group[Any] = kind(roster, cls, members)
    owner.process.part(Rosters).own(group._cell)
    try:
        await group.resize(n, axes=axes.sizes or None)
    except BaseException:
        if len(group):
            # They are made, and were being told of each other.
            await scope.stop_handles(list(group))
        raise
    return group


class GroupMembers:
    """The members of one group, in the process that owns them, and their changes, one after the other."""

    def __init__(self, scope: ScopeActors, what: Blueprint, roster: Roster[Any]) -> None:
        self._scope = scope
        self._owner = scope.owner
        self._what = what
        # With the handles of the members.
        self.cell = RosterCell(roster)
        # Also of changes that failed: no two changes have the same.
        self._last_epoch = roster.epoch
        self._turn = asyncio.Lock()
        self._preparing: Roster[Any] | None = None
        # The enrolment of each member, also for its next incarnation.
        self._enrolments: dict[CallTarget, Enrolment] = {}

    @asynccontextmanager
    async def changing(self, group: Group[Any]) -> AsyncGenerator[None]:
        """The turn of one change.

        Raises:
            RuntimeError: The `prepare` of a change of the group wants to change it.
        """
        if self._preparing in _preparing_here.get():
            raise RuntimeError(f"{group!r} is being changed, and its `prepare` cannot change it")
        async with self._turn:
            yield

    async def change(
        self,
        group: Group[ActorT],
        staying: Sequence[int],
        n: int,
        axes: Mapping[str, int] | None,
        prepare: Prepare[ActorT] | None,
    ) -> None:
        """Change the members: those at some ranks stay, as far as there are places for them; new ones fill the rest.

        If that leaves the group as it is, it gets no new epoch.
        """
        old = self.cell.roster
        grid = old.axes.resized(n) if axes is None else Axes.of(axes, n)
        seats = seats_after(old.size, staying, n)
        free: Sequence[int] = range(len(seats), n)
        if None in seats:
            free = [*(rank for rank, seat in enumerate(seats) if seat is None), *free]
        if n == old.size and not free and grid == old.axes:
            return
        epoch = self._next_epoch()
        wanted = Roster[Any](old.id, epoch, n, grid, since=epoch)
        new = await self._grow(wanted, free)
        joining = iter(new)
        taken = [next(joining) if seat is None else old.members[seat] for seat in seats]
        wanted = replace(wanted, members=(*taken, *joining))
        try:
            if new and prepare is not None:
                await self._prepare(wanted, [group._member(handle) for handle in new], prepare)
            await self._introduce(new, replace(wanted, members=tuple(map(group._member, wanted.members))))
        except BaseException:
            await self._stop(new)
            raise
        # A restart may have given the group a newer epoch meanwhile.
        epoch = wanted.epoch if wanted.epoch == self._last_epoch else self._next_epoch()
        # Before members are stopped, so that no new call goes to them.
        self.cell.change(replace(wanted, epoch=epoch))
        told = self._tell(replace(self.cell.roster, members=tuple(group)))
        leaving = [member for rank, member in enumerate(old.members) if rank not in seats]
        for member in leaving:
            del self._enrolments[target_of(member)]
        if leaving:
            await self._see_off(leaving, [group._calls.forget(target_of(member)) for member in leaving])
        await told

    def renew(self) -> Awaitable[object]:
        """Give the group a new epoch. Await the result to know that the members know it."""
        self.cell.change(replace(self.cell.roster, epoch=self._next_epoch()))
        members = self.cell.roster.members
        known = self._enrolments[target_of(members[0])].roster.members if members else ()
        return self._tell(replace(self.cell.roster, members=known))

    def _next_epoch(self) -> int:
        self._last_epoch += 1
        return self._last_epoch

    async def _prepare(self, wanted: Roster[Any], new: list[ActorT], prepare: Prepare[ActorT]) -> None:
        token = _preparing_here.set((*_preparing_here.get(), wanted))
        self._preparing = wanted
        try:
            await prepare(new)
        finally:
            self._preparing = None
            _preparing_here.reset(token)

    async def _grow(self, wanted: Roster[Any], ranks: Sequence[int]) -> list[Handle]:
        """Make new members for these ranks of `wanted`: all of them or none.

        Cancellation: they are taken back.
        """
        if not ranks:
            return []
        cls = self._what.cls
        self._scope.check_spawning(cls)
        self._what.check_size(wanted.size)
        base = self._owner.new_label(cls)
        gangs = self._gangs(ranks)
        shares = await self._reserve(base, gangs)
        where = [there for gang, there in gangs for _ in gang]
        made: dict[int, Handle] = {}

        async def make(rank: int, share: Reserved, there: Constraints) -> None:
            enrolment, what = Enrolment(wanted, rank, self.renew), self._what.of_rank(rank, there)
            handle = made[rank] = await self._scope.spawn_one(what, share, enrolment)
            self._enrolments[target_of(handle)] = enrolment

        try:
            # Waits for all, even if one fails or all are cancelled: a cancelled spawn stops its actor.
            results = await asyncio.gather(*map(make, ranks, shares, where), return_exceptions=True)
            for error in filter(None, results):
                raise error
        except BaseException:
            self._scope.release(shares)
            await self._stop([made[rank] for rank in ranks if rank in made])
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
                shares += await self._scope.reserve(request, ranks, there)
        except BaseException:
            self._scope.release(shares)
            raise
        return shares

    async def _introduce(self, new: list[Handle], roster: Roster[Any]) -> None:
        """Before a call can get to them."""
        members = cache(partial(self._encoded, roster))
        for target in map(target_of, new):
            self._enrolments[target].roster = roster
        await self._arrived(
            [told for target in map(target_of, new) for told in self._tell_one(target, members)],
            roster,
            members,
        )

    def _encoded(self, roster: Roster[Any]) -> Ref[tuple[Any, ...]]:
        return Ref(self._owner.peer.objects.refs.put(roster.members, f"the members of {roster.id}"))

    def _tell(self, roster: Roster[Any]) -> Awaitable[object]:
        """Tell every member that is up; the others are told before they are up again.

        Args:
            roster: With the members as users see them: handles or services.

        Returns:
            Await it to know that they know; if that is cancelled, they are told nevertheless. A member that dies
            meanwhile is told when it is made again.
        """
        told: list[_Told] = []
        members = cache(partial(self._encoded, roster))
        for rank, target in enumerate(map(target_of, self.cell.roster.members)):
            enrolment = self._enrolments[target]
            enrolment.roster, enrolment.rank = roster, rank
            if enrolment.is_behind or not enrolment.knows_members:
                told += self._tell_one(target, members)
        # A task that holds the refs: without them, the calls are cancelled.
        wait = self._owner.start_task(self._arrived(told, roster, members), f"tell the members of {roster.id}")
        return asyncio.shield(wait)

    def _tell_one(self, target: CallTarget, members: _Encoded) -> list[_Told]:
        actor, enrolment = _actor_of(target), self._enrolments[target]
        child = self._owner.directory.find(actor)
        if child is not None and child.state not in REACHABLE:
            return []
        where = self._owner.peer.caller, actor.remote, actor.actor
        told = enrolment.tell_epoch(*where) if enrolment.knows_members else enrolment.tell(*where, members())
        state_of(told).mark_seen()
        return [(target, told)]

    async def _arrived(self, told: list[_Told], roster: Roster[Any], members: _Encoded) -> None:
        """Wait until members know the news, or are gone."""
        pause = _PAUSE
        while told:
            doubtful: list[CallTarget] = []
            reached = True
            for target, answer in told:
                await answer.ready()
                enrolment, error = self._enrolments.get(target), answer.exception()
                if enrolment is None or (error is None and answer.result() is not False):
                    continue
                # Something that it was told earlier, or this, was lost with a connection.
                enrolment.doubt()
                if error is None or self._may_live(_actor_of(target), error):
                    doubtful.append(target)
                    reached = reached and error is None
            if not reached:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            # A later change is told by itself.
            latest = [one for one in doubtful if one in self._enrolments and self._enrolments[one].roster is roster]
            told = [one for target in latest for one in self._tell_one(target, members)]

    def _may_live(self, actor: Target, error: BaseException) -> bool:
        """Whether a member that could not be told may live: only the connection broke, and its node is a member."""
        connection = self._owner.peer.connections.get(actor.remote)
        may_come_back = connection is None or connection.renewable or connection.lost is None
        return type(error) is PeerLost and may_come_back and self._owner.nodes.is_member(node_of(actor.remote))

    async def gone(self) -> list[int]:
        """The ranks of the members that are gone for good."""
        members = map(_actor_of, map(target_of, self.cell.roster.members))
        found = await asyncio.gather(*map(self._is_gone, members))
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

    async def _see_off(self, leaving: list[Any], calls: list[set[Any]]) -> None:
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
        await asyncio.gather(*map(_over, calls))
        if isinstance(actor, FollowingTarget) and actor.place.peer == NOWHERE:
            return
        unneeded = agent_of(self._owner.peer.caller, actor.remote).unneeded(actor.actor)
        state_of(unneeded).mark_seen()
        await unneeded.ready()

    async def _stop(self, members: list[Any]) -> None:
        for member in members:
            self._enrolments.pop(target_of(member), None)
        await self._scope.stop_handles(members)


def _actor_of(target: CallTarget) -> Target:
    return followed(cast("Target", target))


async def _over(call: Any) -> None:
    over = asyncio.Event()
    call.watch(lambda _: over.set())
    await over.wait()
