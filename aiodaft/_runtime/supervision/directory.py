"""The directory of the actors that are restarted: an actor of the controller, which callers ask where they are."""

from __future__ import annotations

from collections.abc import Callable

from aiodaft._protocol.calls.following import NOWHERE, Location
from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft._protocol.supervision.child import REACHABLE, ChildEvent, ChildState, Fate, fate_of
from aiodaft._protocol.supervision.supervision import Restart
from aiodaft._runtime.calls.call import Caller, Target
from aiodaft._runtime.calls.following import FollowingTarget, PinnedTarget
from aiodaft._runtime.node.node_agent import NodeAgent
from aiodaft._runtime.peer import Locator
from aiodaft._runtime.serialization.errors import copy_error
from aiodaft._runtime.supervision.child_spec import WHY_STOPPED
from aiodaft._runtime.supervision.supervisor import Child, Supervisor
from aiodaft.exceptions import ActorDied, DaftError, OutcomeUnknown
from aiodaft.methods import method


class Directory(Locator):
    """Knows every supervised actor of its process."""

    def __init__(self, caller: Caller, node: NodeAgent) -> None:
        self._caller = caller
        self._node = node
        # Called with the number of an actor that is over.
        self.on_over: Callable[[ActorId], object] = lambda number: None
        self._children: dict[ActorId, Child] = {}
        self._ended: dict[ActorId, DaftError] = {}

    def new_supervisor(self, policy: Restart, grace: float, fail: Callable[[BaseException, str], object]) -> Supervisor:
        return Supervisor(self._caller, self._node, self.end, policy, grace, fail)

    @method
    async def locate(self, number: int, wait: bool) -> Location:
        child = self._children.get(ActorId(number))
        if child is None:
            ended = self._ended.get(ActorId(number)) or ActorDied("the actor was stopped", executed=False)
            return Location(NOWHERE, ActorId(number), ended)
        while wait and child.state not in {*REACHABLE, ChildState.OVER}:
            await child.changed()
        if child.state in REACHABLE:
            return child.place
        return Location(NOWHERE, child.place.actor, child.target.ended if child.state is ChildState.OVER else None)

    async def host_of(self, target: Target) -> PeerId:
        """The process of any actor; that of a supervised one once it is up.

        Raises:
            ActorDied: The actor is over.
        """
        if not isinstance(target, FollowingTarget):
            return target.remote
        found = await self.locate(target.number, wait=True)
        if found.ended is not None:
            raise copy_error(found.ended)
        return found.peer

    def find(self, target: Target) -> Child | None:
        """The child that an actor is, if it is supervised and not over."""
        return self._children.get(target.number) if isinstance(target, FollowingTarget) else None

    async def address(self, number: ActorId) -> Target:
        """The target for handles of an actor, as its policy says, once it is up.

        Raises:
            ActorDied: The actor is over.
        """
        found = await self.locate(number, wait=True)
        child = self._children.get(number)
        if found.ended is not None or child is None:
            raise copy_error(found.ended or ActorDied("the actor was stopped", executed=False))
        return child.target if child.supervisor.policy.follow else PinnedTarget(child.target, found)

    def begin(self, child: Child) -> Child:
        """Add a child that is being made for the first time."""
        self._children[child.number] = child
        return child

    def forget(self, child: Child) -> None:
        self._children.pop(child.number, None)
        child.supervisor.forget(child)
        child.handle(ChildEvent.ENDED)
        child.spec.free()

    def end(self, child: Child, error: DaftError) -> None:
        """Remove a child that is over. Idempotent."""
        if child.number not in self._children:
            return
        self.forget(child)
        self._ended[child.number] = error
        while len(self._ended) > self._caller.process.env.remembered:
            del self._ended[next(iter(self._ended))]
        child.target.end(error)
        self.on_over(child.number)
        self._node.vacate.tell(child.place.peer, child.place.actor, str(error))

    def process_ended(self, remote: PeerId, error: OutcomeUnknown, wanted: bool) -> None:
        """Restart the actors of a process that ended, or end them if that was wanted."""
        for child in [child for child in self._children.values() if child.place.peer == remote]:
            match fate_of(child.state, wanted=wanted):
                case Fate.NOT_MADE:
                    child.crash = error
                case Fate.RESTART:
                    child.supervisor.crashed(child, error)
                case Fate.OVER:
                    self.end(child, error)
                case Fate.NOTHING:
                    pass

    def retire(self, target: Target) -> Child | None:
        """Restart an actor no more, at its owner's wish; a restart under way is taken back.

        Returns:
            The child, which has `settled` when the actor is either up or over; None if it is not supervised.
        """
        child = self.find(target)
        if child is None:
            return None
        child.supervisor.leave(child)
        if child.final is None:
            child.final = ActorDied(f"{child.label} was stopped: {WHY_STOPPED}", executed=False)
            child.final.actor = child.label
        child.handle(ChildEvent.NO_MORE)
        if child.state is ChildState.OVER:
            self.end(child, child.final)
        elif child.state is ChildState.ENDING:
            child.interrupt()
        return child

    def close(self, target: Target) -> None:
        """End an actor that its owner has stopped."""
        child = self.find(target)
        if child is not None and child.final is not None:
            self.end(child, child.final)
