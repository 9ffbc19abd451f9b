"""Keyed collectives: methods of the members of a group take part, each with its value, and meet at one member.

    method -- take_part --> `Keyed` of its process -- join --> `Keyed` of the member where they meet

Small values come with `join`, and so do those that are quickly reduced at one member; its answers have the results: one
round trip. Of other values the refs come: when all are there, the plan of the collective on refs is carried out, so
values go from member to member. `MeetingPlaces` knows the members that have come, `MeetingValues` makes their results.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Hashable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from aiodaft._protocol.groups.collective import Work, runs_on_loop
from aiodaft._protocol.groups.meeting import Coming
from aiodaft._protocol.ids import KEYED, ActorId, CallId, PeerId
from aiodaft._runtime.actors.host import Enlisted
from aiodaft._runtime.actors.hosted_actor import InboundCall, serving
from aiodaft._runtime.calls.call import Caller, Target
from aiodaft._runtime.calls.following import FollowingTarget
from aiodaft._runtime.graphs.graph_value import Opaque
from aiodaft._runtime.groups.collectives import Collectives, Reducer, bytes_in
from aiodaft._runtime.groups.meeting_place import (
    Brought,
    Joined,
    Joining,
    MeetingPlaces,
    MeetingValues,
    Packed,
    Part,
    Taking,
    Whereabouts,
    target_of_member,
    whereabouts_of,
)
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.platform.tasks import Terms, current_terms, terms_of, trace_of, under
from aiodaft._runtime.serialization.errors import add_note, copy_error
from aiodaft.actor import Actor
from aiodaft.exceptions import ActorDied, CallCancelled, DaftError, GroupChanged, SerializationError
from aiodaft.methods import method, specs_of
from aiodaft.ref import Ref

T = TypeVar("T")

# A member waits so much longer for the one where they meet, which names the late members to all.
GRACE: float = 0.9
# The collectives that a call has left, and that are forgotten if it fails.
_REMEMBERED: Final = 99

FindCall: TypeAlias = Callable[[PeerId, CallId], InboundCall | None]


class Keyed(Actor):
    """Takes part for the members in this process; and those that meet at one of them join here."""

    def __init__(
        self, caller: Caller, store: Store, enlisted: Enlisted, collectives: Collectives, find_call: FindCall
    ) -> None:
        self._caller = caller
        self._process = caller.process
        self._enlisted = enlisted
        self._find_call = find_call
        self._values = MeetingValues(caller, store, collectives)
        self._places = MeetingPlaces(caller.process, enlisted, partial(ask_gone, caller))
        self._ends: dict[InboundCall, list[Callable[[DaftError], object]]] = {}
        # Told of each call that takes part in nothing any more, and why.
        self.on_withdrawn: list[Callable[[InboundCall, DaftError], object]] = []
        self._left_by: WeakKeyDictionary[InboundCall, deque[Joined]] = WeakKeyDictionary()
        # The members whose calls had ended when these calls were made again.
        self._ended_beside: WeakKeyDictionary[InboundCall | None, dict[Hashable, str]] = WeakKeyDictionary()
        # By the state of the call of `take_part`, until that is over.
        self._open: dict[Any, Taking] = {}
        # Whether the last that a member has begun is told, by the group, its epoch, the member, the key, and `within`.
        self._last: WeakValueDictionary[Hashable, asyncio.Event] = WeakValueDictionary()

    def begin(self, part: Part, value: Any, call: InboundCall | None, within: Hashable) -> Ref[Any]:
        """Take part; returns a ref of the member's result, at once and in any thread.

        Args:
            within: See `Coming`.
        """
        if call is not None and call.apart is not None:
            raise apart(part.title, call.apart)
        target = Target(self._caller, self._process.id, KEYED, part.roster.id, None)
        taking = Taking(part, call, within, self._process.next_number())
        line = part.roster.id, part.roster.epoch, part.rank, part.key, within
        taking.before, self._last[line] = self._last.get(line), taking.told
        # A deadline ends the wait for the result: then the others are told, as in `_left`.
        with under(_terms_without_end()):
            result: Ref[Any] = target.call(_TAKE_PART.named(part.label), (Opaque(taking), value), {})
        state = state_of(result)
        state.mark_seen()
        outcome: Ref[Any] = target.call(_OUTCOME.named(part.label), (Opaque(taking), Opaque(result)), {})
        taking.outcome = state_of(outcome)
        taking.outcome.watch(partial(self._left, taking, state))
        self._open[state] = taking
        # A member that drops the result has taken part nevertheless.
        state.watch(self._over, interested=True)
        if call is not None and call.apart is not None:
            self.withdraw(call, call.apart)
        return outcome

    def _over(self, state: Any) -> None:
        taking = self._open.pop(state)
        process = self._process
        if taking.has_begun or taking.withdrawn is not None or self._is_late(taking) or process.closed is not None:
            taking.told.set()
        else:
            # The value was the result of a call that failed, or is not waited for any more.
            excuse = self._excuse(taking, taking.left or _unusable(taking.part, "value", state.error))
            process.tasks.create_task(excuse, name=f"excuse a member from {taking.part.label}")

    def _left(self, taking: Taking, state: Any, outcome: Any) -> None:
        """If the wait of a member was cancelled before all had come, they do not wait for each other."""
        # Its error leads to frames that have the `Taking`: a cycle would keep the value.
        taking.outcome = None
        if outcome.error is None or state.settled or taking.withdrawn is not None or self._process.closed is not None:
            return
        if self._is_late(taking):
            self._take_back(taking, state, CallCancelled("the deadline passed"))
            return
        part, call = taking.part, taking.call
        taking.left = CallCancelled(
            f"{part.title}: rank {part.rank} has left it: its wait for the result was cancelled"
        )
        if call is not None:
            self._left_by.setdefault(call, deque(maxlen=_REMEMBERED)).append(taking.joined)
        if taking.joined.at is not None:
            self._tell_left(taking.joined, taking.left)
        elif not taking.has_begun:
            state.cancel(str(taking.left))

    def _tell_left(self, joined: Joined, fault: DaftError | None, missed: int | None = None) -> None:
        """Tell the place that a member has left; without a fault, that the call that has left there has failed."""
        if joined.at is not None:
            peer, joining = joined.at
            left = replace(joining, coming=replace(joining.coming, terms={}, fault=fault))
            Target(self._caller, peer, KEYED, joining.group, None).tell(_LEAVE, (left, missed), {})

    def _expect_no_more(self, taking: Taking, ended: Mapping[Hashable, str]) -> None:
        """A member takes part in a call that was made again: members whose calls have ended do not come."""
        part, call = taking.part, taking.call
        for rank, member in enumerate(part.roster.members):
            what = ended.get(target_of_member(member).identity)
            if what is not None and taking.joined.at and call is not None:
                again = f"{call.label} was made again at rank {part.rank}"
                why = CallCancelled(f"{part.title}: {again}, and rank {rank} does not come: {what} has returned")
                self._tell_left(taking.joined, why, rank)
                self._left_by.setdefault(call, deque(maxlen=_REMEMBERED)).append(taking.joined)

    def _is_late(self, taking: Taking) -> bool:
        return taking.call is not None and self._process.is_past(taking.call.deadline)

    def _take_back(self, taking: Taking, state: Any, why: DaftError) -> None:
        taking.withdrawn = why
        if taking.outcome is not None:
            taking.outcome.mark_seen()
        state.cancel(str(why))

    def withdraw(self, call: InboundCall, why: DaftError | None) -> None:
        """A call of a member fails: it has not taken part in collectives that some members have not come to.

        Args:
            why: The reason why it takes part in nothing any more. None: because it has ended.
        """
        call.apart = why or call.apart
        if why is not None:
            for end in self._ends.get(call, ()):
                end(why)
            for told in self.on_withdrawn:
                told(call, why)
        for state, taking in list(self._open.items()):
            if taking.call is call:
                ended = f"{call.label} of {call.hosted.name} ended before all had come"
                self._take_back(taking, state, why or CallCancelled(ended))
        for joined in self._left_by.pop(call, ()):
            # So the call can be made again, with others that had not come.
            joined.void = True
            self._tell_left(joined, None)

    @contextmanager
    def ending(self, call: InboundCall, end: Callable[[DaftError], object]) -> Generator[None]:
        """In the block, `end` is called with the reason if the call takes part in nothing any more."""
        ends = self._ends.setdefault(call, [])
        ends.append(end)
        try:
            if call.apart is not None:
                self._process.call_soon(partial(end, call.apart))
            yield
        finally:
            ends.remove(end)
            if not ends:
                self._ends.pop(call, None)

    @method(ordered=False)
    async def beside_failed(self, number: int, why: DaftError) -> bool:
        """Another call of the same call of a group has failed: this one takes part in no collective any more.

        Returns:
            Whether the call is here; else it is over, or has not come yet.
        """
        call = self._find_call(serving().caller, CallId(number))
        if call is not None:
            self.withdraw(call, why)
            if not call.begun:
                call.hosted.look_again()
        return call is not None

    @method(ordered=False)
    async def beside_ended(self, number: int, ended: dict[Hashable, str]) -> bool:
        """A call was made again: of the same call of a group, the calls of these members have ended.

        Returns:
            As `beside_failed` does.
        """
        call = self._find_call(serving().caller, CallId(number))
        if call is not None:
            self._ended_beside.setdefault(call, {}).update(ended)
            for taking in self._open.values():
                if taking.call is call:
                    self._expect_no_more(taking, ended)
        return call is not None

    # The member does not await the call that takes part: that one goes on until the others are told.
    @method(ordered=False)
    async def outcome(self, given: Opaque, result: Opaque) -> Any:
        taking: Taking = given.content
        call = serving()
        call.spec = call.spec.named(taking.part.title)
        try:
            await result.content.ready()
            return await result.content
        except Exception:
            if taking.withdrawn is not None:
                raise apart(taking.part.title, taking.withdrawn) from None
            if not taking.has_begun:
                # The others get this error, and not that of the call of this member.
                await taking.told.wait()
            raise
        finally:
            # As in `_left`: its error leads here.
            del result

    # Unordered: a call that waits for its value does not hold up the next one.
    @method(ordered=False)
    async def take_part(self, given: Opaque, value: Any) -> Any:
        taking: Taking = given.content
        taking.has_begun = True
        part = taking.part
        # Members in one process would pass the objects themselves.
        apart = self._enlisted.has_several_of(part.standing.roster.id)
        try:
            value = await self._values.apart(value, part.title) if apart else value
            terms, nbytes, brought = part.terms(value), *self._values.pack(part, value)
        except Exception as error:
            await self._excuse(taking, _unusable(part, "value", error))
            raise
        coming = Coming(part.key, part.title, part.rank, terms, number=taking.number, within=taking.within)
        del value
        await taking.turn()
        try:
            answer = await self._join(taking, part.op, coming, nbytes, brought)
            if isinstance(brought, Opaque):
                await brought.content.ready()
            result = await self._values.unpack(answer)
            return await self._finished(part, await self._values.apart(result, part.title) if apart else result)
        except DaftError as error:
            add_note(error, f"raised for {part.title}")
            raise

    async def _finished(self, part: Part, value: Any) -> Any:
        if part.finish is None:
            return value
        finish = partial(part.finish, value)
        if runs_on_loop(Work.JOIN, bytes_in(value), by_function=False):
            return finish()
        return await serving().hosted.thread.run(finish)

    async def _join(self, taking: Taking, op: Reducer, coming: Coming, nbytes: int | None, brought: Packed) -> Any:
        part, roster = taking.part, taking.part.roster
        member = target_of_member(roster.members[part.meets_at])
        peer, actor = _known_place(member) or await _find(part, member)
        while True:
            coming, brought = taking.now(coming, brought)
            where = actor, roster.id, roster.epoch, part.steps, roster.size
            joining = Joining(*where, coming, part.timeout, nbytes)
            target = Target(self._caller, peer, KEYED, roster.id, None)
            try:
                answer = target.call(_JOIN.named(part.label), (joining, brought, op), {})
            except SerializationError as error:
                await self._excuse(taking, _unusable(part, "op" if callable(op) else "value", error))
                raise
            taking.joined.at = peer, joining
            if taking.call in self._ended_beside:
                self._expect_no_more(taking, self._ended_beside[taking.call])
            if coming.fault is None:
                taking.told.set()
            await _ready_in_time(part, answer)
            try:
                return await answer
            except GroupChanged as error:
                if error.group == roster.id:
                    # Then `current_group()` gives the new epoch.
                    await part.standing.over.wait()
                raise
            except ActorDied as error:
                connection, before = self._caller.connections.get(peer), (peer, actor)
                if connection is not None and connection.lost is not None:
                    _name_place(part, member, error)
                if error.executed is False and isinstance(member, FollowingTarget):
                    # It was not there any more; where it is now, the group has a new epoch.
                    peer, actor = await _find(part, member)
                if before == (peer, actor):
                    raise
            finally:
                # As in `_left`: its error leads here.
                del answer

    async def _excuse(self, taking: Taking, fault: Exception) -> None:
        part = taking.part
        current_terms.set(_terms_without_end())
        coming = Coming(part.key, part.title, part.rank, {}, fault, taking.number, taking.within)
        try:
            await taking.turn()
            with suppress(ValueError, DaftError):
                await self._join(taking, "sum", coming, None, None)
        finally:
            taking.told.set()

    # Ordered: the joins of a member count in their order.
    @method
    async def join(self, joining: Joining, brought: Packed, op: Reducer) -> Any:
        """Come to a meeting here; returns the member's result.

        Raises:
            Exception: As `MeetingPlace.come` does.
            GroupChanged: The group has a newer epoch.
        """
        call = serving()
        call.spec = call.spec.named(joining.coming.title)
        mine = Brought(call.caller, joining.nbytes, brought)
        conclude = partial(self._values.conclude, joining.coming, joining.size, op)
        return await self._places.place_for(joining).come(joining.coming, mine, conclude, joining.timeout)

    # Ordered: after the call of `join`.
    @method
    async def leave(self, joining: Joining, missed: int | None) -> None:
        self._places.leave(joining, missed)

    @method(ordered=False)
    async def gone(self, actor: int) -> None:
        await self._places.wait_gone(ActorId(actor))

    @property
    def meetings(self) -> int:
        return len(self._places)


_TAKE_PART: Final = specs_of(Keyed)["take_part"]
_OUTCOME: Final = specs_of(Keyed)["outcome"]
_JOIN: Final = specs_of(Keyed)["join"]
_LEAVE: Final = specs_of(Keyed)["leave"]


async def _in_time(part: Part, waiting: Awaitable[T]) -> T:
    if part.timeout is None:
        return await waiting
    try:
        async with asyncio.timeout(part.timeout + GRACE):
            return await waiting
    except TimeoutError:
        raise TimeoutError(
            f"{part.title}: rank {part.meets_at}, where the members meet for this key, did not answer in "
            f"{part.timeout + GRACE:g} s"
        ) from None


async def _ready_in_time(part: Part, answer: Ref[Any]) -> None:
    if part.timeout is None:
        return
    state_of(answer).mark_seen()
    try:
        await _in_time(part, answer.ready())
    except asyncio.CancelledError:
        # Withdraw the join: the next call of this member must not count as this one.
        answer.cancel()
        await answer.ready()
        raise


def belongs_to(call: InboundCall | None) -> Hashable:
    """The call of a group, or the run of a graph, that the code of a call is part of; None if it is of none.

    Code that a call leaves behind is of none.
    """
    return None if call is None or call.answered else call.within


def _unusable(part: Part, what: str, error: BaseException | None) -> ValueError:
    return ValueError(f"{part.title}: the {what} of rank {part.rank} cannot be used: {error}")


def apart(title: str, why: DaftError) -> DaftError:
    """The error of a collective, or of a receive, in which a call does not take part any more."""
    error = copy_error(why)
    add_note(error, f"raised for {title}")
    return error


def _terms_without_end() -> Terms | None:
    return terms_of(None, trace_of(current_terms.get()))


def ask_gone(caller: Caller, peer: PeerId, actor: ActorId) -> Ref[None]:
    keyed: Keyed = caller.handle(peer, KEYED, f"members in {peer}", Keyed)
    return keyed.gone(actor)


def _known_place(member: Target) -> Whereabouts | None:
    if isinstance(member, FollowingTarget):
        connection = member.caller.connections.get(member.remote)
        here = member.remote == member.caller.process.id and member.actor in member.caller.actors
        if member.ended is not None or not (here or (connection is not None and connection.lost is None)):
            return None
    return member.remote, member.actor


async def _find(part: Part, member: Target) -> Whereabouts:
    try:
        return await _in_time(part, whereabouts_of(member))
    except DaftError as error:
        _name_place(part, member, error)
        raise


def _name_place(part: Part, member: Target, error: DaftError) -> None:
    add_note(error, f"this was {member.label}, rank {part.meets_at} of {part.roster.id}")
