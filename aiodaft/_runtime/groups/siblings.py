"""The calls of one call of a group: they meet in collectives, and when one fails, the others do not wait for it.

Their ids say that they belong together. Only the caller knows of all of them: it tells the others that one has failed.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, cast

from aiodaft._protocol.ids import KEYED, CallId, sibling_ids
from aiodaft._runtime.calls.call import CallState, Target
from aiodaft._runtime.calls.following import FollowingTarget
from aiodaft._runtime.groups.keyed import Keyed
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.serialization.errors import failed_beside
from aiodaft.actor import CallTarget
from aiodaft.exceptions import DaftError, OutcomeUnknown
from aiodaft.ref import Ref

# Seconds until a process is asked again whether it has a call.
_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.5


def numbers(first: CallTarget, count: int) -> Iterator[CallId | None]:
    """The ids of the calls that one call of a group makes; `first` is the target of one."""
    return iter(sibling_ids(cast("Target", first).caller.next_number(), count))


def join(refs: Sequence[Ref[Any]]) -> None:
    """Tell the other members when the call of one fails."""
    states = [state for state in map(state_of, refs) if isinstance(state, CallState)]
    if len(states) > 1:
        # Results that nobody holds any more are freed.
        calls = list(map(weakref.ref, states))
        for state in states:
            state.watch(partial(_over, calls))


def _over(calls: list[weakref.ref[CallState]], state: CallState) -> None:
    if state.error is None or not calls:
        return
    error = state.error
    # Deaths are told as they are.
    why = error if isinstance(error, OutcomeUnknown) else failed_beside(state.origin, error)
    for reference in calls:
        call = reference()
        if call is None or call is state or call.settled:
            continue
        # Its next incarnation would begin what the others have given up.
        call.apart = why
        state.process.tasks.create_task(_tell(reference, why), name="tell the member of a group that another failed")
    # The first error is told.
    calls.clear()


async def _tell(reference: weakref.ref[CallState], why: DaftError) -> None:
    """Tell the process that has a call, once it has it: the call may still wait here, or move with its actor."""
    pause = _PAUSE
    while (call := reference()) is not None and not call.settled:
        target = call.target
        if isinstance(target, FollowingTarget) and target.is_down:
            # Its next incarnation would begin what the others have given up.
            call.cancel(str(why))
            return
        if not _waits_here(call):
            keyed: Keyed = target.caller.handle(call.producer, KEYED, f"keyed collectives of {call.producer}", Keyed)
            # If the process is gone, the call ends, or goes to another one.
            with suppress(DaftError):
                if await keyed.beside_failed(call.number, why):
                    return
        del call
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _waits_here(call: CallState) -> bool:
    """Whether a call has not been sent: the connection has no room, or something before it waits."""
    if call.connection is not None:
        return call.connection.session.is_waiting(call.number)
    return call.objects.owner.running_call(call.process.id, call.number) is None
