"""Calls of a system actor in the process of another actor, its host, also if that is restarted.

Eager calls go to one process: the one where the host is, or, while it is down, its next one (`TargetBeside`). Those of
a captured graph go to where the host is when the graph is deployed (`AlwaysBeside`).
"""

from __future__ import annotations

from typing import Any

from aiodaft._protocol.calls.following import NOWHERE
from aiodaft._protocol.connections.messages import WANT_REPLY
from aiodaft._protocol.ids import ActorId, CallId, PeerId
from aiodaft._runtime.calls.call import CallState, Request, Target
from aiodaft._runtime.calls.following import FollowingTarget
from aiodaft._runtime.calls.outgoing import Backlog
from aiodaft._runtime.platform.context import current_terms
from aiodaft.methods import MethodSpec
from aiodaft.ref import Ref


class Beside(Target):
    """A system actor in the process of its host. `remote` is its process, or NOWHERE if the host is down."""

    __slots__ = ("_host",)

    def __init__(self, host: Target, remote: PeerId, actor: ActorId, label: str) -> None:
        super().__init__(host.caller, remote, actor, label, host.sink)
        self._host = host

    @property
    def host(self) -> Target:
        return self._host


class TargetBeside(Beside):
    """A system actor in the next process of a supervised actor: calls wait until that is known.

    If the actor is not made again, they fail as its own calls do.
    """

    __slots__ = ("_backlog",)

    def __init__(self, followed: FollowingTarget, actor: ActorId) -> None:
        super().__init__(followed, NOWHERE, actor, f"what is beside {followed.label}")
        self._backlog = Backlog(self.caller, followed.label)
        self.process.tasks.create_task(self._find(followed), name=f"find {self.label}")

    def call(
        self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any], number: CallId | None = None
    ) -> Ref[Any]:
        if self.remote != NOWHERE:
            return super().call(spec, args, kwargs, number)
        if number is None:
            number = self.caller.next_number()
        state = CallState(self, spec, number)
        request = Request(self, spec, args, kwargs, number, WANT_REPLY, state)
        request.terms = current_terms.get()
        self._backlog.admit(request)
        return Ref(state)

    async def _find(self, followed: FollowingTarget) -> None:
        try:
            await followed.arrive()
        except Exception as error:  # noqa: BLE001 - the waiting calls fail with it
            self._backlog.fail(error)
            return
        self.remote = followed.remote
        for request in self._backlog.take_all():
            self.caller.sender.submit_later(request)


class AlwaysBeside(Beside):
    """A system actor in the process of its host, wherever that is. Only graphs that are captured call it.

    `remote` is where it was at the capture; each deployment of the graph asks the host.
    """

    __slots__ = ()

    def __init__(self, host: Target, actor: ActorId) -> None:
        down = isinstance(host, FollowingTarget) and host.is_down
        super().__init__(host, NOWHERE if down else host.remote, actor, host.label)

    def __str__(self) -> str:
        return f"{self.label} in {self.host.remote}"
