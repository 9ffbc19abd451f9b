"""The supervisor: an ordinary actor that knows where restarted actors are. What restarts them is in `family`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aiodaft._protocol.ids import ActorId, PeerId, epoch_of
from aiodaft._runtime.calls.following import NOWHERE, FollowingTarget, Location, PinnedTarget
from aiodaft._runtime.serialization.errors import copy_error
from aiodaft._runtime.supervision.child_spec import WHY_STOPPED
from aiodaft.actor import Actor
from aiodaft.exceptions import ActorDied, DaftError, OutcomeUnknown
from aiodaft.methods import method

if TYPE_CHECKING:
    from aiodaft._runtime.calls.call import Target
    from aiodaft._runtime.peer import Peer
    from aiodaft._runtime.supervision.child_spec import ChildSpec
    from aiodaft._runtime.supervision.supervisor import Supervisor
    from aiodaft.ref import Ref

T = TypeVar("T")

# Actors that ended for good and are remembered to say why.
_REMEMBERED: Final = 1024


class ChildState(Enum):
    """How a supervised actor is."""

    STARTING = "its process is being made"
    UP = "it takes calls"
    LEAVING = "it is to be stopped, for the sake of a sibling"
    DOWN = "it waits for its turn to be started"
    RETIRED = "it takes calls, and is not restarted any more"
    OVER = "it is gone for good"


class Child:
    """One supervised actor, from its first incarnation to the end of its last."""

    def __init__(self, target: FollowingTarget, recipe: ChildSpec, family: Supervisor, beside: Target | None) -> None:
        self.target = target
        self.recipe = recipe
        self.family = family
        self.beside = beside
        self.state = ChildState.STARTING
        # The incarnation that is there, or was last.
        self.place = target.place
        self.restarts = 0
        self.last_error: BaseException | None = None
        # How it ended while it was being made; why it is to end for good once it is stopped.
        self.crash: OutcomeUnknown | None = None
        self.final: DaftError | None = None
        # When it may be started, and what it waits for.
        self.due = 0.0
        self.pending: Ref[Any] | None = None
        self._news = asyncio.Event()

    @property
    def number(self) -> ActorId:
        """What its incarnations have in common."""
        return self.target.number

    @property
    def label(self) -> str:
        """What it is called."""
        return self.target.label

    @property
    def epoch(self) -> int:
        """The number of its incarnation."""
        return epoch_of(self.place.actor)

    def become(self, state: ChildState) -> None:
        """Change the state, and tell those who wait for that."""
        self.state = state
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def wait_for(self, ref: Ref[T]) -> T:
        """Wait for a call that is part of a restart."""
        self.pending = ref
        if self.final is not None:
            self.interrupt()
        try:
            return await ref
        finally:
            self.pending = None

    def interrupt(self) -> None:
        """The restart under way is not wanted any more."""
        if self.pending is not None:
            self.pending.cancel()

    async def settled(self) -> None:
        """Wait until it is up for good, or over."""
        while self.state not in {ChildState.RETIRED, ChildState.OVER}:
            await self.changed()

    async def changed(self) -> None:
        """Wait until the state changes."""
        await self._news.wait()


class Directory(Actor):
    """Knows every supervised actor of its process."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        # Told of actors that are gone for good.
        self.on_over: Callable[[ActorId], object] = lambda number: None
        self._lives: dict[ActorId, Child] = {}
        self._ended: dict[ActorId, DaftError] = {}

    @method
    async def whereabouts(self, number: int, wait: bool) -> Location:
        """Where an actor is; if it is down, and `wait`, as soon as it is somewhere."""
        life = self._lives.get(ActorId(number))
        if life is None:
            ended = self._ended.get(ActorId(number)) or ActorDied("the actor was stopped", executed=False)
            return Location(NOWHERE, ActorId(number), ended)
        while wait and life.state not in {ChildState.UP, ChildState.RETIRED, ChildState.OVER}:
            await life.changed()
        if life.state is ChildState.OVER:
            return Location(NOWHERE, life.place.actor, life.target.ended)
        up = life.state in {ChildState.UP, ChildState.RETIRED}
        return life.place if up else Location(NOWHERE, life.place.actor)

    @method
    async def process_of(self, number: int) -> PeerId:
        """The process that an actor is in, once it is up.

        Raises:
            ActorDied: It is gone for good.
        """
        found = await self.whereabouts(number, wait=True)
        if found.ended is not None:
            raise copy_error(found.ended)
        return found.peer

    async def host_of(self, target: Target) -> PeerId:
        """The process of any actor; that of a supervised one once it is up. Raises as `process_of`."""
        return await self.process_of(target.number) if isinstance(target, FollowingTarget) else target.remote

    def find(self, target: Target) -> Child | None:
        """The life of an actor, as long as it lasts."""
        return self._lives.get(target.number) if isinstance(target, FollowingTarget) else None

    async def address(self, number: ActorId) -> Target:
        """Where handles of an actor lead, as its policy says, once it is up.

        Raises:
            ActorDied: It is gone for good.
        """
        found = await self.whereabouts(number, wait=True)
        life = self._lives.get(number)
        if found.ended is not None or life is None:
            raise copy_error(found.ended or ActorDied("the actor was stopped", executed=False))
        return life.target if life.family.policy.follow else PinnedTarget(life.target, found)

    def begin(self, life: Child) -> Child:
        """An actor is being made for the first time."""
        self._lives[life.number] = life
        return life

    def forget(self, life: Child) -> None:
        """It could not be made."""
        self._lives.pop(life.number, None)
        life.family.forget(life)
        life.become(ChildState.OVER)
        life.recipe.free()

    def end(self, life: Child, error: DaftError) -> None:
        """An actor is gone for good."""
        if life.state is ChildState.OVER:
            return
        self.forget(life)
        self._ended[life.number] = error
        while len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]
        life.target.end(error)
        self.on_over(life.number)
        self.peer.node_agent().vacate.tell(life.place.peer, life.place.actor, str(error))

    def process_ended(self, remote: PeerId, error: OutcomeUnknown, wanted: bool) -> None:
        """A process ended: what it had is restarted, or gone."""
        for life in [life for life in self._lives.values() if life.place.peer == remote]:
            if life.state is ChildState.STARTING:
                life.crash = error
            elif life.state is ChildState.RETIRED or (life.state is ChildState.UP and wanted):
                self.end(life, error)
            elif life.state is ChildState.UP:
                life.family.crashed(life, error)

    def retire(self, target: Target) -> Child | None:
        """The owner wants no more of an actor: it is not restarted any more. A restart under way is taken back.

        Returns:
            Its life, which has `settled` when the actor is either up or over; None if nobody watches it.
        """
        life = self.find(target)
        if life is None:
            return None
        life.family.leave(life)
        if life.final is None:
            life.final = ActorDied(f"{life.label} was stopped: {WHY_STOPPED}", executed=False)
            life.final.actor = life.label
        if life.state is ChildState.UP:
            life.become(ChildState.RETIRED)
        elif life.state is ChildState.DOWN:
            self.end(life, life.final)
        else:
            life.interrupt()
        return life

    def close(self, target: Target) -> None:
        """An actor was stopped by its owner."""
        life = self.find(target)
        if life is not None and life.final is not None:
            self.end(life, life.final)
