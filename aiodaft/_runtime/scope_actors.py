"""The actors of one scope: makes, stops and kills them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from aiodaft._protocol.calls.following import Location
from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft._protocol.node.liveness import Patience
from aiodaft._protocol.node.resources import Demand
from aiodaft._protocol.supervision.supervision import Kind, Restart, supervision_of
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.calls.following import PinnedTarget
from aiodaft._runtime.controller import Controller
from aiodaft._runtime.node.environment import WorkerEnvironment
from aiodaft._runtime.node.worker import Conditions, Place
from aiodaft._runtime.objects.ref_state import UnhandledErrors
from aiodaft._runtime.platform.tasks import shield_from_anyio
from aiodaft._runtime.supervision.child_spec import WHY_STOPPED, ChildSpec, stop_actor, stop_in_turn
from aiodaft._runtime.supervision.supervisor import Child, Supervisor
from aiodaft.actor import Handle
from aiodaft.exceptions import CallCancelled, SerializationError, SpawnFailed
from aiodaft.ref import Ref


class Constraints(NamedTuple):
    """What `on(...)` was given; None where nothing was."""

    cpus: float | None = None
    gpus: float | None = None
    resources: Mapping[str, float] | None = None
    node: str | None = None
    beside: Any = None
    patience: Patience | None = None
    restart: Restart | Kind | None = None
    max_queue: int | None = None

    def demand(self, cls: type) -> Demand:
        """The resources that an actor of this class needs."""
        base: Demand = getattr(cls, "__aiodaft_demand__", Demand())
        if self.beside is not None:
            # An actor in another actor's process uses that process's GPUs.
            base = replace(base, gpus=0)
        return Demand(
            cpus=base.cpus if self.cpus is None else self.cpus,
            gpus=base.gpus if self.gpus is None else self.gpus,
            custom=base.custom if self.resources is None else dict(self.resources),
        )

    def patience_with(self, cls: type) -> Patience | None:
        """The patience with an actor of this class; None where neither `on` nor the class line gives one."""
        return self.patience or getattr(cls, "__aiodaft_patience__", None)

    def max_queue_with(self, cls: type) -> int | None:
        """How many calls may wait at an actor of this class; None if that is not bounded."""
        return self.max_queue or getattr(cls, "__aiodaft_max_queue__", None)


class OwningScope(UnhandledErrors, Protocol):
    """What actors need of their scope."""

    def check_open(self, what: str) -> None: ...


class ScopeActors:
    """The actors that one scope owns."""

    def __init__(self, controller: Controller, scope: OwningScope, restart: Restart | None) -> None:
        self._controller = controller
        self._scope = scope
        self._restart = restart
        # Supervises actors by the scope's own policy; made for the first of them.
        self._supervisor: Supervisor | None = None
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

    async def make(self, spec: ChildSpec, constraints: Constraints, beside: Target | None) -> Handle:
        """Make an actor; if that fails, free its place.

        Cancellation: the actor is taken back.
        """
        controller, cls, label = self._controller, spec.cls, spec.label
        watched = self._supervision(cls, constraints)
        host = None if beside is None else await controller.directory.host_of(beside)
        place = await self._find_place(spec, constraints, host, keep=watched is not None)
        if watched is None:
            target = controller.target(place.peer, place.actor, label, self._scope)
            await self._host(target, spec)
            self._owned[target.identity] = target
            return Handle(target, cls)
        supervisor, kind = watched
        location = Location(place.peer, place.actor)
        followed = controller.follow(location, label, self._scope)
        child = controller.directory.begin(Child(followed, spec, supervisor, beside))
        try:
            await self._host(followed, spec, again=True)
        except BaseException:
            controller.directory.forget(child)
            raise
        self._owned[followed.identity] = followed
        supervisor.join(child, kind)
        return Handle(followed if supervisor.policy.follow else PinnedTarget(followed, location), cls)

    def _supervision(self, cls: type, constraints: Constraints) -> tuple[Supervisor, Kind] | None:
        """An actor's supervisor and its kind of restart; None if it is not supervised."""
        found = supervision_of(constraints.restart, getattr(cls, "__aiodaft_restart__", None), self._restart)
        if found is None:
            return None
        if not found.shared:
            return self._new_supervisor(found.policy), found.kind
        self._supervisor = self._supervisor or self._new_supervisor(found.policy)
        return self._supervisor, found.kind

    def _new_supervisor(self, policy: Restart) -> Supervisor:
        controller = self._controller
        return controller.directory.new_supervisor(policy, controller.options.stop_grace, self._scope.fail)

    async def _find_place(self, spec: ChildSpec, constraints: Constraints, host: PeerId | None, *, keep: bool) -> Place:
        cls = spec.cls
        environment = WorkerEnvironment.here() if host is None else None
        conditions = Conditions(constraints.patience_with(cls), environment)
        placing: Ref[Place] = self._controller.node.place(spec.label, constraints.demand(cls), host, conditions, keep)
        try:
            return await placing
        except asyncio.CancelledError:
            if placing.done() and placing.exception() is None:
                # The place was found while the cancellation was on its way: only this code can free it.
                place = await placing
                await self._undo(self._controller.target(place.peer, place.actor, spec.label, self._scope))
            raise

    async def _host(self, target: Target, spec: ChildSpec, *, again: bool = False) -> None:
        what = f"{spec.cls.__name__} cannot be spawned"
        try:
            self._scope.check_open(what)
            making = spec.make(self._controller.peer.caller, target.remote, target.actor, again=again)
            self._making[making] = target
            try:
                await making
            finally:
                del self._making[making]
            self._scope.check_open(what)
        except BaseException as error:
            await self._undo(target)
            if isinstance(error, CallCancelled):
                self._scope.check_open(what)
            if isinstance(error, SerializationError) and isinstance(error.__cause__, ImportError):
                raise SpawnFailed(
                    f"{spec.label} cannot be made: its process cannot load what it needs: {error}"
                ) from error
            raise

    async def _undo(self, target: Target) -> None:
        undoing = self._controller.start_task(self._vacate(target), f"take back {target.label}")
        with shield_from_anyio():
            await asyncio.wait([undoing])

    # Ending.

    async def stop(self, targets: Sequence[Target]) -> None:
        """Stop actors in this order, each within the grace time. Idempotent."""
        for target in targets:
            target.stopped = True
        await self._end(targets, graceful=True)

    async def kill(self, target: Target) -> None:
        """End an actor's process at once. Idempotent."""
        controller = self._controller
        child = controller.directory.retire(target)
        await controller.node.kill(target.remote if child is None else child.place.peer, "killed by its owner")
        if child is not None:
            await child.settled()
        self._owned.pop(target.identity, None)

    async def kill_all(self) -> None:
        """End the processes of all actors; `stop_all` still has to free their places."""
        node = self._controller.node
        await asyncio.gather(*(node.kill(target.remote, "its scope was cancelled").ready() for target in self))

    async def stop_all(self, *, graceful: bool) -> None:
        """Take back the actors that are being made, then stop all others: the last one first, or all at once."""
        making = dict(self._making)
        for ref in making:
            ref.cancel()
        await asyncio.gather(*(ref.ready() for ref in making))
        await asyncio.gather(*(self._vacate(target) for target in making.values()))
        await self._end(list(self), graceful=graceful)

    async def _end(self, targets: Sequence[Target], *, graceful: bool) -> None:
        controller = self._controller
        children = [child for target in targets if (child := controller.directory.retire(target)) is not None]
        await asyncio.gather(*(child.settled() for child in children))
        caller = controller.peer.caller
        if graceful:
            answers = await stop_in_turn(caller, targets, WHY_STOPPED, controller.options.stop_grace)
        else:
            answers = await asyncio.gather(*(stop_actor(caller, target, WHY_STOPPED, 0) for target in targets))
        await asyncio.gather(*map(self._vacate, targets, answers))

    async def _vacate(self, target: Target, answers: bool = True) -> None:
        self._owned.pop(target.identity, None)
        controller = self._controller
        await controller.coordinator.release(*target.identity)
        await controller.node.vacate(target.remote, target.actor, WHY_STOPPED, answers=answers)
        controller.directory.close(target)
