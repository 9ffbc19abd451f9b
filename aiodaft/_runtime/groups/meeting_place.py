"""The meetings of a group's members: at one of them, which tells all the outcome, and hears of deaths.

`_protocol.groups.meeting` decides on the outcomes. A place asks the process of every other member when that member is
gone, once for as long as the group has its epoch: a meeting costs no message besides those of the members that come.
`MeetingPlaces` has the places of one process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

from aiodaft._protocol.diagnostics.deadlock import CallAt
from aiodaft._protocol.groups.lateness import Gathering
from aiodaft._protocol.groups.meeting import Coming, Meetings, Outcome
from aiodaft._protocol.groups.roster import Steps
from aiodaft._protocol.ids import ActorId, CallId, PeerId, number_of
from aiodaft._runtime.actors.host import Enlisted, changed
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.calls.following import FollowingTarget, followed
from aiodaft._runtime.diagnostics.await_chains import Behind, Frames, add_rule, check_untimed
from aiodaft._runtime.diagnostics.watchdog import Watchdog
from aiodaft._runtime.groups.part import Joining
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization.errors import add_note, copy_error
from aiodaft.actor import handle_of, target_of
from aiodaft.exceptions import ActorDied, DaftError
from aiodaft.ref import Ref

Whereabouts: TypeAlias = tuple[PeerId, ActorId]
Conclude: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]
AskGone: TypeAlias = Callable[[PeerId, ActorId], Ref[None]]


@dataclass(eq=False, slots=True)
class _Ticket:
    brought: Any
    told: asyncio.Future[Any]


class MeetingPlace:
    """The meetings of a group, or of a part of it, at one epoch and one member."""

    def __init__(self, process: Process, group: str, size: int, ask_gone: AskGone) -> None:
        self._process = process
        self._group = group
        self._table: Meetings[_Ticket] = Meetings(size)
        self._ask_gone = ask_gone
        self._members: list[Target] = []
        self._watching: list[asyncio.Task[None]] = []

    def __len__(self) -> int:
        return len(self._table)

    def open(self) -> list[Gathering]:
        return self._table.open()

    async def come(self, coming: Coming, brought: Any, conclude: Conclude, timeout: float | None) -> Any:
        """Wait until all have come; returns the result for this member, by the `conclude` of the last one that comes.

        Args:
            conclude: Gets the values of all. It must not block; its error is raised at all members.

        Raises:
            ValueError: The members do not agree.
            TimeoutError: Not all came in the time of one of them.
            ActorDied: A member is gone.
            Exception: The fault of a member, or the error given to `close`.

        Cancellation: the member has not come.
        """
        ticket = _Ticket(brought, self._process.loop.create_future())
        self._tell(self._table.come(coming, ticket, self._process.env.monotonic()), conclude)
        if not ticket.told.done():
            self._process.part(Watchdog).look_later()
        timer = None
        if timeout is not None and not ticket.told.done():
            timer = self._process.loop.call_later(timeout, self._expire, coming, ticket, timeout)
        try:
            return await ticket.told
        except asyncio.CancelledError:
            # Members that have come to the same meeting have the same terms.
            self._tell(self._table.withdraw(coming.name, coming.rank, ticket), conclude)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            # The error of its future leads here: a cycle would keep the member's value.
            del ticket

    def missing(self, coming: Coming, ticket: _Ticket) -> list[CallAt]:
        """The work, within the same, of members that have not come to a meeting, for the search for deadlocks.

        Raises:
            LookupError: It is not known: they come by themselves, or the members are not known yet.
        """
        within, ranks = self._table.missing(coming.name, coming.rank, ticket)
        if within is None:
            raise LookupError("any of their calls may come")
        owner, *numbers = cast("tuple[Any, ...]", within)
        members = [self._members[rank] for rank in ranks]
        return [CallAt(member.remote, owner, CallId(0), number_of(member.actor), tuple(numbers)) for member in members]

    def leave(self, left: Coming, missed: int | None) -> None:
        """A member waits no longer: its meeting fails with the fault; without one, it counts as not come."""
        if left.fault is None:
            self._table.forget(left)
        else:
            self._tell(self._table.leave(left, missed))

    def watch(self, members: Iterable[Target], but: int) -> None:
        if not self._members:
            self._members = list(members)
            for rank, member in enumerate(self._members):
                if rank != but:
                    watch = partial(self._process.tasks.create_task, self._watch(rank, member), name="watch a member")
                    # In a context of its own: the call that came first ends before.
                    self._watching.append(Context().run(watch))

    def close(self, error: Exception) -> None:
        for task in self._watching:
            task.cancel()
        self._tell(self._table.close(error))

    def _expire(self, coming: Coming, ticket: _Ticket, seconds: float) -> None:
        self._tell(self._table.expire(coming.name, coming.rank, ticket, seconds))

    def _tell(self, outcomes: Iterable[Outcome[_Ticket]], conclude: Conclude | None = None) -> None:
        for outcome in outcomes:
            tickets, error = list(outcome.tickets.values()), outcome.error
            results: Sequence[Any] = ()
            if error is None:
                assert conclude is not None
                try:
                    results = Context().run(conclude, [ticket.brought for ticket in tickets])
                except Exception as raised:  # noqa: BLE001 - each member gets it
                    error = raised
            for index, ticket in enumerate(tickets):
                if ticket.told.done():
                    continue
                if error is None:
                    ticket.told.set_result(results[index])
                else:
                    # An error that the table keeps for late members must hold no frames of a member, nor its notes.
                    own = error is outcome.error or isinstance(error, DaftError)
                    ticket.told.set_exception(copy_error(error) if own else error)

    async def _watch(self, rank: int, member: Target) -> None:
        who = f"this was {member.label}, rank {rank} of {self._group}"
        lost = await loss_of(member, who, self._ask_gone)
        if isinstance(member, FollowingTarget):
            # Its next incarnation comes with a new epoch of the group, which ends the meetings that begin here
            # until then.
            self._tell(self._table.lose(rank, lost))
            try:
                await whereabouts_of(member)
                return
            except DaftError as error:
                add_note(error, who)
                lost = error
        self.close(lost)


def _at_meeting(frames: Frames) -> Behind:
    inside = frames[-1].f_locals
    check_untimed(inside["timeout"])
    place: MeetingPlace = inside["self"]
    return place.missing(inside["coming"], inside["ticket"])


add_rule(MeetingPlace.come, _at_meeting)


class MeetingPlaces:
    """The places at the members in this process.

    Args:
        ask_gone: Asks a process when a member there is gone.
    """

    def __init__(self, process: Process, enlisted: Enlisted, ask_gone: AskGone) -> None:
        self._process = process
        self._enlisted = enlisted
        self._ask_gone = ask_gone
        self._places: dict[tuple[ActorId, str, int], tuple[MeetingPlace, Steps]] = {}
        self._gone: dict[ActorId, asyncio.Event] = {}
        enlisted.on_told.append(self._told)
        enlisted.on_forgotten.append(self._forgotten)
        process.part(Watchdog).sources.append(self.open)

    def __len__(self) -> int:
        return sum(len(place) for place, _ in self._places.values())

    def open(self) -> list[Gathering]:
        return [gathering for place, _ in self._places.values() for gathering in place.open()]

    def place_for(self, joining: Joining) -> MeetingPlace:
        """The place where a member joins.

        Raises:
            ActorDied: The member is gone.
            GroupChanged: The group has a newer epoch.
        """
        where = ActorId(joining.at), joining.group, joining.epoch
        if where in self._places:
            return self._places[where][0]
        standing = self._enlisted.find(where[0])
        if standing is None:
            raise ActorDied(f"{joining.coming.title}: the member where they meet was stopped", executed=False)
        if standing.roster.epoch > joining.epoch:
            raise changed(joining.group, joining.epoch, standing.roster.epoch)
        place = MeetingPlace(self._process, joining.group, joining.size, self._ask_gone)
        self._places[where] = place, joining.steps
        self._told(where[0])
        return place

    def leave(self, joining: Joining, missed: int | None) -> None:
        found = self._places.get((ActorId(joining.at), joining.group, joining.epoch))
        if found is not None:
            found[0].leave(joining.coming, missed)

    async def wait_gone(self, actor: ActorId) -> None:
        if self._enlisted.find(actor) is not None:
            await self._gone.setdefault(actor, asyncio.Event()).wait()

    def _told(self, actor: ActorId) -> None:
        standing = self._enlisted.find(actor)
        if standing is None:
            return
        for where, (place, steps) in list(self._places.items()):
            at, group, epoch = where
            if at != actor:
                continue
            if epoch < standing.roster.epoch:
                del self._places[where]
                place.close(changed(group, epoch, standing.roster.epoch))
            elif epoch == standing.roster.epoch and standing.roster.is_complete:
                roster, rank = standing.roster.narrowed(standing.rank, steps)
                place.watch(map(target_of_member, roster.members), but=rank)

    def _forgotten(self, actor: ActorId) -> None:
        gone = self._gone.pop(actor, None)
        if gone is not None:
            gone.set()
        for where in [where for where in self._places if where[0] == actor]:
            place, _ = self._places.pop(where)
            place.close(ActorDied(f"a member of {where[1]} was stopped"))


async def loss_of(member: Target, who: str, ask_gone: AskGone) -> DaftError:
    try:
        await ask_gone(*await whereabouts_of(member))
        lost: DaftError = ActorDied(f"{member.label} was stopped")
    except DaftError as error:
        lost = error
    add_note(lost, who)
    return lost


async def whereabouts_of(member: Target) -> Whereabouts:
    if not isinstance(member, FollowingTarget):
        return member.remote, member.actor
    place = await member.locate(wait=True)
    if place.ended is not None:
        raise place.ended
    return place.peer, place.actor


def target_of_member(member: Any) -> Target:
    return followed(cast("Target", target_of(handle_of(member))))
