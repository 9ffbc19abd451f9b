"""The meetings of a group's members: at one of them, which tells all the outcome, and hears of deaths.

`_protocol.groups.meeting` decides on the outcomes. A place asks the process of every other member when that member is
gone, once for as long as the group has its epoch: a meeting costs no message besides those of the members that come.
`MeetingPlaces` has the places of one process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextvars import Context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast
from zlib import crc32

from aiodaft._protocol.diagnostics.failures import CallAt
from aiodaft._protocol.groups.collective import meets_with_values, plan_of, results_of, star, values_of
from aiodaft._protocol.groups.meeting import Coming, Gathering, Meetings, Outcome
from aiodaft._protocol.groups.roster import Roster, Steps
from aiodaft._protocol.ids import ActorId, CallId, PeerId, number_of
from aiodaft._runtime.actors.host import Enlisted, Standing, changed
from aiodaft._runtime.actors.hosted_actor import InboundCall
from aiodaft._runtime.calls.call import Caller, Target
from aiodaft._runtime.calls.following import FollowingTarget, followed
from aiodaft._runtime.diagnostics.await_chains import Behind, Frames, add_rule, check_untimed
from aiodaft._runtime.diagnostics.watchdog import Watchdog
from aiodaft._runtime.graphs.graph_value import Opaque
from aiodaft._runtime.groups.collectives import Collectives, Members, OfAll, Reducer, kind_of, nbytes_of
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization.decoder import ReceivedValue
from aiodaft._runtime.serialization.errors import add_note, copy_error
from aiodaft._runtime.serialization.small import encode_small
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


# The part of one member in a keyed collective, and its message to the one where they meet.


@dataclass(frozen=True, slots=True)
class Part:
    """The part of one member in a collective.

    Attributes:
        root: The rank that alone has a value or gets a result, if that is so.
        timeout: Seconds that the others may be late.
        lengths: Of `reduce_scatter`: the rows of each member. None: equal parts.
        finish: Makes the result of the value that comes. It may take long.
    """

    operation: str
    key: Hashable
    roster: Roster[Any]
    steps: Steps
    rank: int
    standing: Standing
    op: Reducer = "sum"
    root: int = 0
    timeout: float | None = None
    lengths: tuple[int, ...] | None = None
    finish: Callable[[Any], Any] | None = None

    @property
    def label(self) -> str:
        return self.operation if self.key is None else f"{self.operation} {self.key!r}"

    @property
    def title(self) -> str:
        return f"{self.label} of {self.roster.id}"

    @property
    def reduces(self) -> bool:
        return self.operation in {"all_reduce", "reduce", "reduce_scatter"}

    @property
    def has_value(self) -> bool:
        return self.operation != "barrier" and self.rank in values_of(self.operation, self.roster.size, self.root)

    def terms(self, value: Any) -> dict[str, Hashable]:
        terms: dict[str, Hashable] = {"operation": self.operation, "root": self.root}
        if self.reduces:
            op = self.op
            terms["op"] = _name_of(op) if callable(op) else op
            terms["value"] = kind_of(value)
        if self.lengths is not None:
            terms["lengths"] = self.lengths
        return terms

    @property
    def meets_at(self) -> int:
        """The rank where members meet: keys spread the work."""
        return crc32(repr(self.key).encode()) % self.roster.size


@dataclass(frozen=True)
class Joining:
    """The message of a member to the one where they meet; fields as in `Part`."""

    at: int
    group: str
    epoch: int
    steps: Steps
    size: int
    coming: Coming
    timeout: float | None
    nbytes: int | None


# The form in which a value travels to the meeting and back: a small one encoded, one that is reduced there as the only
# item of a list, of others the ref. A result may come in a tuple, with refs of the values that the member makes of its
# own one for others.
Packed: TypeAlias = bytes | list[Any] | Opaque | tuple[Any, ...] | None


class Brought(NamedTuple):
    process: PeerId
    nbytes: int | None
    value: Packed


@dataclass(eq=False, slots=True)
class Joined:
    at: tuple[PeerId, Joining] | None = None
    void: bool = False


@dataclass(eq=False, slots=True)
class Taking:
    """A call of `Keyed.take_part`. `withdrawn`: the member has not come; `left`: it waits no longer, while its call
    goes on.
    """

    part: Part
    # The call of the member that has begun it, and the scope inside which it meets others; as in `Coming`.
    call: InboundCall | None
    within: Hashable
    number: int
    outcome: Any = None
    # Set when the member where the others meet was told, or is not to be told; and that of the collective before.
    told: asyncio.Event = field(default_factory=asyncio.Event)
    before: asyncio.Event | None = None
    has_begun: bool = False
    joined: Joined = field(default_factory=Joined)
    # Why it was withdrawn: the member has not come.
    withdrawn: DaftError | None = None
    # The others get this: the member waits no longer, while its call goes on.
    left: DaftError | None = None

    def now(self, coming: Coming, brought: Packed) -> tuple[Coming, Packed]:
        """Its message: a fault if the member waits no longer. Raises the fault if it has not come at all."""
        if self.left is None:
            return coming, brought
        if self.joined.void:
            raise self.left
        return replace(coming, fault=self.left), None

    async def turn(self) -> None:
        """Wait for the earlier collectives of this member: the order of its calls counts, not that of their values."""
        if self.before is not None:
            await self.before.wait()


def _name_of(function: Callable[..., Any]) -> str:
    if isinstance(function, OfAll):
        function = function.function
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


# A collective: its name, its root, and the lengths of parts.
_What: TypeAlias = tuple[str, int, tuple[int, ...] | None]


class MeetingValues:
    """Packs the values of members in this process; for members that meet here, makes their results."""

    def __init__(self, caller: Caller, store: Store, collectives: Collectives) -> None:
        self._caller = caller
        self._store = store
        self._collectives = collectives

    def pack(self, part: Part, value: Any) -> tuple[int | None, Packed]:
        if not part.has_value:
            return None, None
        nbytes = nbytes_of(value) or None
        if not callable(part.op):
            small = encode_small((value,), by_name=False)
            if small is not None:
                return nbytes, small[0]
            if nbytes is not None and meets_with_values(part.operation, part.roster.size, nbytes):
                return nbytes, [value]
        return nbytes, self._kept(value, part.title)

    async def unpack(self, answer: Packed) -> Any:
        match answer:
            case Opaque():
                return await answer.content
            case tuple():
                result, *beside = answer
                for one in beside:
                    # From then on the member may write to its value.
                    await one.content.ready()
                return None if result is None else await result.content
            case None:
                return None
            case _:
                return self._given(answer)

    async def apart(self, value: Any, title: str) -> Any:
        state = self._caller.objects.refs.put(value, title)
        assert state.stored is not None
        state.stored.origins = []
        received = await self._caller.objects.transfer.take_own(state.stored)
        return await self._store.decode(received, refs=received.refs)

    def conclude(self, coming: Coming, size: int, op: Reducer, brought: Sequence[Brought]) -> list[Packed]:
        operation, root = cast("str", coming.terms["operation"]), cast("int", coming.terms["root"])
        lengths = cast("tuple[int, ...] | None", coming.terms.get("lengths"))
        answers: list[Packed] = [None] * size
        if operation == "barrier":
            return answers
        given = [brought[rank] for rank in values_of(operation, size, root)]
        here = not callable(op) and all(isinstance(one.value, bytes | list) for one in given)
        work, places = (operation, root, lengths), [one.process for one in brought]
        if not here:
            return self._carry_out(work, op, coming.title, given, places)
        results = self._compute(work, op, coming.title, given, places)
        for rank, result in zip(results_of(operation, size, root), results, strict=True):
            answers[rank] = result
        return answers

    def _compute(
        self, what: _What, op: Reducer, title: str, given: Sequence[Brought], places: Sequence[PeerId]
    ) -> list[Packed]:
        (operation, root, lengths), size = what, len(places)
        plan = plan_of(operation, size, root, 0, lengths, one_memory=True, elementwise=True)
        if operation == "all_reduce":
            plan = star(size)
        values = [self._given(cast("bytes | list[Any]", one.value)) for one in given]
        results = self._collectives.carry_out(plan, values, op, title)
        encoded: dict[int, Packed] = {}
        for result in results:
            if id(result) not in encoded:
                small = encode_small((result,), by_name=False)
                if small is not None:
                    encoded[id(result)] = small[0]
                elif meets_with_values(operation, size, nbytes_of(result)):
                    encoded[id(result)] = [result]
                else:
                    encoded[id(result)] = self._kept(result, title)
        return [encoded[id(result)] for result in results]

    def _carry_out(
        self, what: _What, op: Reducer, title: str, given: Sequence[Brought], places: Sequence[PeerId]
    ) -> list[Packed]:
        (operation, root, lengths), size = what, len(places)
        refs = [
            one.value.content if isinstance(one.value, Opaque) else
            self._kept(self._given(cast("bytes | list[Any]", one.value)), title).content
            for one in given
        ]  # fmt: skip
        # In these plans the root comes first, and then all members.
        members = Members(refs, [places[root], *places] if len(given) < size else places)
        sizes = [one.nbytes for one in given if one.nbytes is not None]
        nbytes = max(sizes) if len(sizes) == len(given) else None
        as_far = {"one_memory": members.one_memory, "elementwise": not callable(op)}
        plan = plan_of(operation, size, root, nbytes, lengths, **as_far)
        made, results = (
            members.make(plan, op, title),
            dict(zip(results_of(operation, size, root), plan.results, strict=True)),
        )
        answers = list[Packed]()
        for rank in range(size):
            own = rank if len(given) == size else 0 if rank == root else None
            beside = [] if own is None else plan.beside(own, results.get(rank))
            for number in (*beside, *plan.results):
                # Members get the errors; one that is gone, or does not wait any more, does not.
                state_of(made[number]).mark_seen()
            result = Opaque(made[results[rank]]) if rank in results else None
            answers.append((result, *(Opaque(made[number]) for number in beside)))
        return answers

    def _kept(self, value: Any, title: str) -> Opaque:
        return Opaque(Ref(self._caller.objects.refs.put(value, title)))

    def _given(self, packed: bytes | list[Any]) -> Any:
        return packed[0] if isinstance(packed, list) else self._decoded(packed)

    def _decoded(self, payload: bytes) -> Any:
        return self._store.decode_now(ReceivedValue(payload, None, [], []))
