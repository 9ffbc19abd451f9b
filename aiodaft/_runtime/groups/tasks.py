"""The tasks of a pool: calls that wait here until a member is free. One that dies takes none of them along."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from aiodaft._protocol.connections.messages import WANT_REPLY
from aiodaft._protocol.ids import ActorId, CallId
from aiodaft._protocol.node.liveness import Health
from aiodaft._runtime.calls.backlog import Backlog
from aiodaft._runtime.calls.call import Request, Target
from aiodaft._runtime.calls.following import FollowingCall, FollowingTarget
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.groups.member_calls import MemberCalls, Unit
from aiodaft.actor import CallTarget
from aiodaft.exceptions import DaftError
from aiodaft.methods import MethodSpec
from aiodaft.ref import Ref

# No actor of this process has this number, so each call comes to `missed`.
_NOBODY: Final = ActorId(-1)


class TaskQueue(Target):
    """The members of a pool as one target of calls.

    Args:
        label: The name of the pool, for errors.
        like: A member.
        members: Gives the members that may get tasks now.
        calls: Knows the calls that are under way.
        room: The tasks that a member may have under way.
    """

    __slots__ = ("_awaited", "_backlog", "_calls", "_members", "_room", "ended")

    def __init__(
        self, label: str, like: Target, members: Callable[[], Sequence[Unit]], calls: MemberCalls, room: int
    ) -> None:
        super().__init__(like.caller, like.caller.process.id, _NOBODY, label, like.sink)
        self._backlog = Backlog(like.caller, label)
        self._members = members
        self._calls = calls
        self._room = room
        self._awaited: set[FollowingTarget] = set()
        # As of a `FollowingTarget`: a call that waits here is the call of a member later.
        self.ended = None

    def call(
        self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any], number: CallId | None = None
    ) -> Ref[Any]:
        state = FollowingCall(self, spec, self.caller.next_number() if number is None else number)
        request = state.request = Request(self, spec, args, kwargs, state.number, WANT_REPLY, state)
        # The state of the call frees the arguments.
        request.again = True
        self.caller.outgoing.submit(request)
        return Ref(state)

    def missed(self, request: Request, connection: Connection | None) -> None:
        """Let a task wait, with its arguments as they are now."""
        if self._backlog.admit(request):
            self.hand_out()

    def forget(self, number: CallId) -> None:
        self._backlog.forget(number)

    def hand_out(self) -> None:
        """Give tasks to members that are free."""
        while self._backlog and (target := self._free_member()) is not None:
            request = self._backlog.take_first()
            if request is None:
                continue
            state = request.state
            assert isinstance(state, FollowingCall)
            state.target = request.target = target
            self._calls.begin(target, state)
            state.watch(lambda _: self.hand_out())
            self.caller.sender.submit_later(request)
        if self._backlog:
            for unit in self._members():
                self._await_restart(unit.target)

    def _await_restart(self, member: CallTarget) -> None:
        """Hand tasks out once a member is up that is being restarted."""
        if isinstance(member, FollowingTarget) and member.is_down and member not in self._awaited:
            self._awaited.add(member)
            self.process.tasks.create_task(self._arrives(member), name=f"wait for {member.label}")

    async def _arrives(self, member: FollowingTarget) -> None:
        try:
            with suppress(DaftError):
                await member.arrive()
        finally:
            self._awaited.discard(member)
        self.hand_out()

    def _free_member(self) -> Target | None:
        """The member with the fewest tasks, rather one that is up; None if one that is up has to be waited for."""
        members = [unit.target for unit in self._members()]
        up = [target for target in members if target.health() is Health.ALIVE]
        found = min(up or members, key=self._calls.under_way, default=None)
        if found is None or self._calls.under_way(found) >= self._room:
            return None
        assert isinstance(found, Target)
        return found
