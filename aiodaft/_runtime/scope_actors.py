"""The actors of a scope: how they are made, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.calls.following import Location, PinnedTarget
from aiodaft._runtime.node.environment import WorkerEnvironment
from aiodaft._runtime.node.worker_table import Conditions
from aiodaft._runtime.platform.tasks import shield_from_anyio
from aiodaft._runtime.supervision.child_spec import WHY_STOPPED, ChildSpec, stop_actor, stop_in_turn
from aiodaft._runtime.supervision.directory import Child
from aiodaft._runtime.supervision.supervisor import Supervisor
from aiodaft.actor import Handle
from aiodaft.exceptions import CallCancelled, SerializationError, SpawnFailed
from aiodaft.supervision import Kind, Restart

if TYPE_CHECKING:
    from aiodaft._runtime.node.worker_table import Place
    from aiodaft.placement import Constraints
    from aiodaft.ref import Ref
    from aiodaft.runtime import Runtime
    from aiodaft.scope import Scope


class ScopeActors:
    """What one scope owns."""

    def __init__(self, runtime: Runtime, scope: Scope, restart: Restart | None) -> None:
        self._runtime = runtime
        self._scope = scope
        self._restart = restart
        # Those that the scope's policy watches.
        self._family: Supervisor | None = None
        self._owned: dict[tuple[PeerId, ActorId], Target] = {}
        # Actors that are being made, by the call that makes them.
        self._making: dict[Ref[Any], Target] = {}

    def __len__(self) -> int:
        return len(self._owned)

    def __iter__(self) -> Iterator[Target]:
        """The last one first."""
        return reversed(list(self._owned.values()))

    def __contains__(self, identity: tuple[PeerId, ActorId]) -> bool:
        return identity in self._owned

    # Making.

    async def make(self, recipe: ChildSpec, constraints: Constraints, beside: Target | None) -> Handle:
        """Make an actor, and take it back if that does not work out.

        Cancellation: an actor that is being made is taken back.
        """
        runtime, cls, label = self._runtime, recipe.cls, recipe.label
        watched = self._supervision(cls, constraints)
        host = None if beside is None else await runtime.supervisor.host_of(beside)
        place = await self._find_place(recipe, constraints, host, keep=watched is not None)
        if watched is None:
            target = Target(runtime.peer, place.peer, place.actor, label, self._scope)
            await self._host(target, recipe)
            self._owned[target.identity] = target
            return Handle(target, cls)
        family, kind = watched
        whereabouts = Location(place.peer, place.actor)
        followed = runtime.peer.followers.get(runtime.peer.process.id, whereabouts, label, self._scope)
        life = runtime.supervisor.begin(Child(followed, recipe, family, beside))
        try:
            await self._host(followed, recipe, again=True)
        except BaseException:
            runtime.supervisor.forget(life)
            raise
        self._owned[followed.identity] = followed
        family.join(life, kind)
        return Handle(followed if family.policy.follow else PinnedTarget(followed, whereabouts), cls)

    def _supervision(self, cls: type, constraints: Constraints) -> tuple[Supervisor, Kind] | None:
        """Who watches an actor, and of what kind it is; None if nobody does."""
        own = constraints.restart
        if self._restart is not None and not isinstance(own, Restart):
            self._family = self._family or self._new_family(self._restart)
            return self._family, own or self._restart.kind
        policy: Restart | None = own if isinstance(own, Restart) else getattr(cls, "__aiodaft_restart__", None)
        if isinstance(own, str):
            policy = replace(policy or Restart(), kind=own)
        return None if policy is None else (self._new_family(policy), policy.kind)

    def _new_family(self, policy: Restart) -> Supervisor:
        return Supervisor(self._runtime.supervisor, policy, self._runtime.stop_grace, self._scope.fail)

    async def _find_place(
        self, recipe: ChildSpec, constraints: Constraints, host: PeerId | None, *, keep: bool
    ) -> Place:
        runtime, cls = self._runtime, recipe.cls
        worker_environment = WorkerEnvironment.here() if host is None else None
        conditions = Conditions(constraints.patience_with(cls), worker_environment)
        placing: Ref[Place] = runtime.node.place(recipe.label, constraints.demand(cls), host, conditions, keep)
        try:
            return await placing
        except asyncio.CancelledError:
            if placing.done() and placing.exception() is None:
                # The place was found in the very moment of the cancellation: nobody else knows of it.
                place = await placing
                with shield_from_anyio():
                    await self._undo(Target(runtime.peer, place.peer, place.actor, recipe.label, self._scope))
            raise

    async def _host(self, target: Target, recipe: ChildSpec, *, again: bool = False) -> None:
        """Have the actor's process make it."""
        what = f"{recipe.cls.__name__} cannot be spawned"
        try:
            self._scope.check_open(what)
            making = recipe.make(self._runtime.peer, target.remote, target.actor, again=again)
            self._making[making] = target
            try:
                await making
            finally:
                del self._making[making]
            self._scope.check_open(what)
        except BaseException as error:
            with shield_from_anyio():
                await self._undo(target)
            if isinstance(error, CallCancelled):
                self._scope.check_open(what)
            if isinstance(error, SerializationError) and isinstance(error.__cause__, ImportError):
                raise SpawnFailed(
                    f"{recipe.label} cannot be made: its process cannot load what it needs: {error}"
                ) from error
            raise

    async def _undo(self, target: Target) -> None:
        undoing = self._runtime.start_task(self._vacate(target), f"take back {target.label}")
        await asyncio.wait([undoing])

    # Ending.

    async def stop(self, targets: Sequence[Target]) -> None:
        """Stop actors in this order, each within the grace time. Idempotent."""
        for target in targets:
            target.stopped = True
        await self._end(targets, graceful=True)

    async def kill(self, target: Target) -> None:
        """End an actor's process at once. Idempotent."""
        life = self._runtime.supervisor.retire(target)
        await self._runtime.node.kill(target.remote if life is None else life.place.peer, "killed by its owner")
        if life is not None:
            await life.settled()
        self._owned.pop(target.identity, None)

    async def kill_all(self) -> None:
        """End the processes of all, and let `stop_all` see to the rest."""
        node = self._runtime.node
        await asyncio.gather(*(node.kill(target.remote, "its scope was cancelled").ready() for target in self))

    async def stop_all(self, *, graceful: bool) -> None:
        """Stop all, the last one first; without grace all at once. Those that are being made are taken back."""
        await self._stop_making()
        await self._end(list(self), graceful=graceful)

    async def _end(self, targets: Sequence[Target], *, graceful: bool) -> None:
        runtime = self._runtime
        ending = [life for target in targets if (life := runtime.supervisor.retire(target)) is not None]
        await asyncio.gather(*(life.settled() for life in ending))
        if graceful:
            answers = await stop_in_turn(runtime.peer, targets, WHY_STOPPED, runtime.stop_grace)
        else:
            answers = await asyncio.gather(*(stop_actor(runtime.peer, target, WHY_STOPPED, 0) for target in targets))
        await asyncio.gather(*map(self._vacate, targets, answers))

    async def _stop_making(self) -> None:
        making = dict(self._making)
        for ref in making:
            ref.cancel()
        await asyncio.gather(*(ref.ready() for ref in making))
        await asyncio.gather(*(self._vacate(target) for target in making.values()))

    async def _vacate(self, target: Target, answers: bool = True) -> None:
        self._owned.pop(target.identity, None)
        runtime = self._runtime
        await runtime.coordinator.release(*target.identity)
        await runtime.node.vacate(target.remote, target.actor, WHY_STOPPED, answers=answers)
        runtime.supervisor.close(target)
