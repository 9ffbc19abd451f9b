"""The calls of one call of a group: when one fails, the others do not wait for its member in collectives.

Only the caller knows which calls belong together: it tells the processes of the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from aiodaft._protocol.ids import KEYED
from aiodaft._runtime.calls.call import CallState
from aiodaft._runtime.calls.following import FollowingTarget
from aiodaft._runtime.groups.keyed import Keyed
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.serialization.errors import failed_beside
from aiodaft.exceptions import OutcomeUnknown
from aiodaft.ref import Ref


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
    others, error = [call() for call in calls], state.error
    # Deaths are told as they are.
    why = error if isinstance(error, OutcomeUnknown) else failed_beside(state.origin, error)
    # The first error is told.
    calls.clear()
    for other in others:
        if other is None or other.settled:
            continue
        target = other.target
        if isinstance(target, FollowingTarget) and target.is_down:
            # Its next incarnation would begin what the others have given up.
            other.cancel(str(why))
        else:
            keyed: Keyed = target.caller.handle(other.producer, KEYED, f"keyed collectives of {other.producer}", Keyed)
            keyed.beside_failed.tell(other.number, why)
