"""The order of calls of one group by several processes: its owner gives those of the others turns among its own calls.

    caller -- the calls ----------------------------> members, where they wait for their turns
      |---- order --> owner -- a turn for each -----> in the order of the owner's own calls; see `actors.turns`

Only calls of methods that run one at a time need this: others do not keep each other from a collective.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias, cast

from aiodaft._protocol.groups.roster import Roster
from aiodaft._protocol.ids import ORDERING, ActorId, CallId, PeerId, is_attached, number_of
from aiodaft._runtime.actors.enlisted import changed
from aiodaft._runtime.actors.hosted_actor import serving
from aiodaft._runtime.actors.turns import TURN
from aiodaft._runtime.calls.call import Caller, CallState
from aiodaft._runtime.calls.rosters import Rosters
from aiodaft._runtime.groups.meeting_place import target_of_member
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.platform.context import under
from aiodaft.actor import Actor
from aiodaft.methods import MethodSpec, method
from aiodaft.ref import Ref

# The number of an actor, and that of a call of it.
_Call: TypeAlias = tuple[int, int]


class Ordering(Actor):
    """What the owner of a group, and the processes that call it besides, ask each other."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        # Calls of this process that wait for turns; and what it has asked of owners.
        self._waiting: dict[CallId, CallState] = {}
        self._asked: set[Ref[None]] = set()

    # At a caller.

    def needs_turns(self, roster: Roster[Any], spec: MethodSpec) -> bool:
        """Whether the calls of one call of a group wait for turns."""
        one_at_a_time = spec.rules.on_thread or spec.rules.concurrency is not None
        here = self._caller.process.id
        # To a controller that is attached to a cluster, no process can connect.
        return one_at_a_time and roster.owner != here and not is_attached(here)

    def ask(self, roster: Roster[Any], refs: Sequence[Ref[Any]]) -> None:
        """Ask the owner of a group for the turns of calls that were made just now. From any thread."""
        states = cast("list[CallState]", list(map(state_of, refs)))
        if self._caller.process.is_here:
            self._ask(roster, states)
        else:
            self._caller.process.call_soon(partial(self._ask, roster, states))

    def _ask(self, roster: Roster[Any], states: list[CallState]) -> None:
        for state in states:
            self._waiting[state.number] = state
            state.watch(lambda over: self._waiting.pop(over.number, None))
        with under(None):
            calls: list[_Call] = [(number_of(state.target.actor), state.number) for state in states]
            asked = ordering_of(self._caller, roster.owner).order(roster.id, roster.epoch, calls)
        state_of(asked).mark_seen()
        self._asked.add(asked)
        state_of(asked).watch(partial(self._answered, asked, states))

    def _answered(self, asked: Ref[None], states: list[CallState], answer: Any) -> None:
        self._asked.discard(asked)
        for state in states if answer.error is not None else ():
            if not state.settled:
                state.cancel(f"the owner of the group gives it no turn: {answer.error}")

    @method(ordered=False)
    async def over(self, number: int) -> None:
        """Wait until a call that waits for its turn is over."""
        state = self._waiting.get(CallId(number))
        if state is not None:
            over = asyncio.Event()
            state.watch(lambda _: over.set())
            await over.wait()

    # At the owner.

    # Ordered: the turns of all members are in the order in which they were asked for.
    @method
    async def order(self, group: str, epoch: int, calls: list[_Call]) -> None:
        """Give calls of the members their turns; returns when all have begun or are over.

        Raises:
            GroupChanged: A member has left the group.
            Exception: A member is gone, or does not hear from the caller.
        """
        caller, cell = serving().caller, self._caller.process.part(Rosters).find(group)
        members = () if cell is None else cell.roster.members
        targets = {number_of(target.actor): target for target in map(target_of_member, members)}
        if cell is None or not all(number_of(ActorId(actor)) in targets for actor, _ in calls):
            raise changed(group, epoch, None if cell is None else cell.roster.epoch, "a call")
        turns = [targets[number_of(ActorId(actor))].call(TURN, (caller, number), {}) for actor, number in calls]
        for turn in turns:
            state_of(turn).mark_seen()
        await asyncio.gather(*turns)


def ordering_of(caller: Caller, remote: PeerId) -> Ordering:
    """What a process answers about the order of calls."""
    return cast("Ordering", caller.handle(remote, ORDERING, f"order of calls in {remote}", Ordering))


def ask_over(caller: Caller, peer: PeerId, number: CallId) -> Ref[None]:
    """Ask the maker of a call when that is over."""
    over: Ref[None] = cast("Any", ordering_of(caller, peer)).over(number)
    state_of(over).mark_seen()
    return over
