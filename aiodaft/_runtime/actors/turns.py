"""The turns of calls of a group whose method runs one at a time, at the member: in the order of the group's owner.

The calls of a group by its owner come in one order at all members. Those by another process could come in between
elsewhere at each member; then two members would each run the call that the other one waits for in a collective. So
such a call waits for its turn: a call of TURN that the owner makes of each member, in the order of its own calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

from aiodaft._protocol.calls.call import Turn
from aiodaft._protocol.calls.mailbox import Rules
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._runtime.actors.hosted_actor import HostedActor, InboundCall, serving
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.process import Process
from aiodaft.methods import MethodSpec, Options
from aiodaft.ref import Ref

# The name is no identifier: no class has such a method.
_NAME: Final = "a turn"


class Turns:
    """The turns of calls of the members in this process.

    Args:
        process: This process.
        ask_over: Asks the maker of a call when that is over.
    """

    def __init__(self, process: Process, ask_over: Callable[[PeerId, CallId], Ref[None]]) -> None:
        self._process = process
        self._ask_over = ask_over
        # By the maker and the number of a call. The call, and what brings its turn, hold it.
        self._known: weakref.WeakValueDictionary[tuple[PeerId, CallId], Turn] = weakref.WeakValueDictionary()

    def came(self, call: InboundCall) -> None:
        """A call came that waits for its turn."""
        call.turn = self._of(call.caller, call.number)

    async def bring(self, hosted: HostedActor, caller: PeerId, number: CallId) -> None:
        """Bring the turn of a call; returns when that starts, or is over: later calls of the owner wait for this.

        Raises:
            RuntimeError: The maker of the call does not answer whether it is over.
        """
        turn, over = self._of(caller, number), self._process.loop.create_future()

        def end(_: object = None) -> None:
            if not over.done():
                over.set_result(None)

        turn.is_here, turn.taken = True, end
        hosted.look_again()
        if not over.done():
            asked = self._ask_over(caller, number)
            state_of(asked).watch(end)
            await over
            if asked.done() and (error := asked.exception()) is not None:
                # Not an error of this process, after which the turn would come again.
                raise RuntimeError(f"it is not known whether the call will come: {error}")

    def _of(self, caller: PeerId, number: CallId) -> Turn:
        return self._known.setdefault((caller, number), Turn())


async def _bring(_: Any, caller: str, number: int) -> None:
    hosted = serving().hosted
    await hosted._process.part(Turns).bring(hosted, PeerId(caller), CallId(number))


# A segment: what comes behind it waits until it is over. Made again if the member is restarted or moves.
TURN: Final = MethodSpec(_NAME, _NAME, _bring, Options(Rules(_NAME, segment=True), retries=1 << 30))
