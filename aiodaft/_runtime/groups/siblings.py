"""The calls of one call of a group: they meet in collectives, and when one fails, the others do not wait for it.

Their ids say that they belong together. Only the caller knows of all of them: it tells the others that one has failed.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias, cast

from aiodaft._protocol.ids import KEYED, CallId, sibling_ids
from aiodaft._runtime.calls.call import CallState, Target
from aiodaft._runtime.calls.following import FollowingTarget, followed
from aiodaft._runtime.groups.keyed import Keyed
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.serialization.errors import failed_beside
from aiodaft.actor import CallTarget
from aiodaft.exceptions import DaftError, OutcomeUnknown
from aiodaft.ref import Ref

# Seconds until a process is asked again whether it has a call.
_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.5

# Tells a process something about a call of the number; whether it has that call.
Say: TypeAlias = Callable[[Keyed, CallId], Ref[bool]]


def numbers(first: CallTarget, count: int, roster: int = 0) -> Iterator[CallId | None]:
    """The ids of the calls that one call of a group makes; `first` is the target of one; `roster`: see `roster_of`."""
    return iter(sibling_ids(cast("Target", first).caller.next_number(), count, roster))


def join(refs: Sequence[Ref[Any]]) -> None:
    states = [state for state in map(state_of, refs) if isinstance(state, CallState)]
    if len(states) > 1:
        siblings = Siblings(states)
        for state in states:
            state.siblings = siblings
            state.watch(siblings.over)


class Siblings:
    """The calls of one call of a group."""

    def __init__(self, states: Sequence[CallState]) -> None:
        # Results that nobody holds any more are freed.
        self._calls = list(map(weakref.ref, states))
        # The first error is told.
        self.failed: DaftError | None = None
        # The members whose calls have returned, and the label of the calls; and the calls that were made again.
        self._ended: dict[Hashable, str] = {}
        self._again: list[weakref.ref[CallState]] = []

    def over(self, state: CallState) -> None:
        if self.failed is not None:
            return
        error = state.error
        if error is None:
            self._ended[followed(state.target).identity] = state.origin
            self._tell(self._again, self._say_who_ended)
            return
        # Deaths are told as they are.
        self.failed = error if isinstance(error, OutcomeUnknown) else failed_beside(state.origin, error)
        self._tell(self._calls, self._say_why)

    def made_again(self, state: CallState) -> None:
        """A call is made again. Those that have returned do not come to its collectives."""
        self._again.append(weakref.ref(state))
        if self._ended:
            self._tell(self._again[-1:], self._say_who_ended)

    def _tell(self, calls: Sequence[weakref.ref[CallState]], say: Say) -> None:
        for reference in calls:
            if (call := reference()) is not None and not call.settled:
                telling = self._tell_one(reference, say)
                call.process.tasks.create_task(telling, name="tell the member of a group what became of another")

    async def _tell_one(self, reference: weakref.ref[CallState], say: Say) -> None:
        """Tell the process that has a call, once it has it: the call may still wait here, or move with its actor."""
        pause = _PAUSE
        while (call := reference()) is not None and not call.settled:
            target = call.target
            if self.failed is not None and isinstance(target, FollowingTarget) and target.is_down:
                # Its next incarnation would begin collectives that the others have given up.
                call.cancel(str(self.failed))
                return
            if not _waits_here(call):
                keyed: Keyed = target.caller.handle(
                    call.producer, KEYED, f"keyed collectives of {call.producer}", Keyed
                )
                # If the process is gone, the call ends, or goes to another one.
                with suppress(DaftError):
                    if await say(keyed, call.number):
                        return
            del call
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _say_why(self, keyed: Keyed, number: CallId) -> Ref[bool]:
        assert self.failed is not None
        return keyed.beside_failed(number, self.failed)

    def _say_who_ended(self, keyed: Keyed, number: CallId) -> Ref[bool]:
        return keyed.beside_ended(number, self._ended)


def _waits_here(call: CallState) -> bool:
    """Whether a call has not been sent: the connection has no room, or something before it waits."""
    if call.connection is not None:
        return call.connection.session.is_waiting(call.number)
    return call.objects.owner.running_call(call.process.id, call.number) is None
