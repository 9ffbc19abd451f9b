"""The actors of a scope: makes, finds, names and stops them for `Scope`, `Placement`, `Mesh` and `Group`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

from aiodaft._protocol.calls.outgoing import NOWHERE, Location
from aiodaft._protocol.coordination.records import NamedActor
from aiodaft._protocol.groups.roster import Axes, Roster
from aiodaft._protocol.ids import ActorId, PeerId, node_of
from aiodaft._protocol.node.resources import Demand
from aiodaft._protocol.placement import Anchor, Request, Where
from aiodaft._protocol.supervision import Restart
from aiodaft._runtime.actors.host import Rosters
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.calls.following import FollowingTarget, followed
from aiodaft._runtime.node.worker import Tenant
from aiodaft._runtime.objects.ref_state import RefState, UnhandledErrors
from aiodaft._runtime.owning import Blueprint, Constraints, Owner, Seat
from aiodaft._runtime.platform.tasks import logger, see_through, wait_through
from aiodaft._runtime.scope_actors import ScopeActors, ScopeErrors
from aiodaft._runtime.supervision.child_spec import ChildSpec
from aiodaft.actor import Actor, Handle, handle_of, target_of
from aiodaft.exceptions import ActorDied, DaftError, InsufficientResources, NameTaken, OutcomeUnknown, RuntimeClosed
from aiodaft.group import Group
from aiodaft.grouping import GroupMembers
from aiodaft.placement import Mesh
from aiodaft.service import ServiceGroup

# Seconds after which the coordinator is asked again.
_PAUSE: Final = 0.5


def class_names(cls: type) -> tuple[str, ...]:
    """The names of a class and its bases."""
    return tuple(f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__)


@asynccontextmanager
async def reserved(owner: Owner, name: str, cls: type) -> AsyncGenerator[NamedActor]:
    """The actor with a name; or a reservation (`.reserved`), if there is none, which ends if the block raises.

    While another process makes an actor of that name, this waits.
    """
    tenant = owner.new_tenant()
    try:
        yield await owner.coordinator.get_or_reserve(NamedActor(name, *tenant, cls.__name__, class_names(cls)))
    except BaseException:
        if not owner.is_closed:
            # Also if it is not known whether it was granted.
            owner.process.create_task(_give_back(owner, name, tenant), name=f"give back the name {name!r}")
        raise


async def _give_back(owner: Owner, name: str, tenant: Tenant) -> None:
    # Others wait for it: also a coordinator that is started again has to know.
    while not owner.is_closed:
        try:
            await owner.coordinator.unreserve(name, *tenant)
        except DaftError as error:
            logger.debug("the name %r is not given back yet: %s", name, error)
            await asyncio.sleep(_PAUSE)
        else:
            return


async def register(owner: Owner, target: Target, cls: type, name: str, epoch: int = 0) -> None:
    """Give a name to an actor; `epoch`: that of the reservation, if there is one.

    Raises:
        NameTaken: Another actor has it.
        LeaseLost: The reservation is over, or the actor's node is not in the cluster.
    """
    supervised = isinstance(target, FollowingTarget)
    wanted = NamedActor(name, *target.identity, target.label, class_names(cls), supervised=supervised, epoch=epoch)
    granted = await owner.coordinator.register(wanted)
    await owner.nodes.of(granted.peer).named(granted)


async def found(owner: Owner, named: NamedActor, cls: type, sink: UnhandledErrors) -> Handle:
    """A handle of the actor with a name.

    Raises:
        TypeError: It is of another class.
        ActorDied: It is gone, and is not restarted.
    """
    if class_names(cls)[0] not in named.class_names:
        raise TypeError(f"{named.name!r} is {named.label}, which is no {cls.__name__}")
    if not named.supervised:
        return Handle(owner.target(named.peer, named.actor, named.label, sink), cls)
    if named.peer == owner.process.id:
        return Handle(await owner.directory.address(named.actor), cls)
    followed = owner.follow(named.peer, Location(NOWHERE, named.actor), named.label, sink)
    await followed.arrive()
    return Handle(followed, cls)


class Owned:
    """The actors of one scope, the scopes inside it, and the errors that it is told of."""

    def __init__(
        self, controller: Owner, errors: ScopeErrors, parent: Owned | None = None, restart: Restart | None = None
    ) -> None:
        self.controller = controller
        self.errors = errors
        self.actors = ScopeActors(controller, self, restart)
        self._parent = parent
        self._children: list[Owned] = []
        if parent is not None:
            parent._children.append(self)

    def check_open(self, what: str) -> None:
        """Raise RuntimeClosed unless the scope is open."""
        if self.errors.closing:
            raise RuntimeClosed(f"{what}: its scope is closed")
        self.controller.check_running(what)

    def target(self, actor: object) -> Target:
        """The target of an actor, not only of one incarnation.

        Raises:
            TypeError: It is no handle and no service.
            ValueError: It belongs to another runtime.
        """
        target = cast("Target", target_of(handle_of(actor)))
        if target.caller.process is not self.controller.process:
            raise ValueError(f"{target.label} belongs to another runtime, that of {target.caller.process.runtime_name}")
        return followed(target)

    def all_actors(self) -> list[Target]:
        """The actors of this scope and of those inside it, in the order in which they were made."""
        return [*reversed(list(self.actors)), *(target for child in self._children for target in child.all_actors())]

    # Messages to the outermost scope.

    def fail(self, error: BaseException, what: str) -> None:
        """Take an error that no code will see."""
        self.errors.fail(error, what)

    def actor_died(self, remote: PeerId, actor: ActorId, error: OutcomeUnknown) -> None:
        """Tell the scope of an actor that it died while no call to it was under way."""
        scope = self._owner_of(remote, actor)
        if scope is not None:
            scope.errors.fail(error, "an actor died while no call was under way")

    def node_gone(self, name: str, error: OutcomeUnknown, idle: Callable[[PeerId], bool]) -> None:
        """Tell the scopes of actors on a node that is gone, as far as no call to them is under way."""
        for scope, (remote, _) in list(self._owners()):
            if node_of(remote) == name and idle(remote):
                scope.errors.fail(error, "a node was lost while no call to an actor there was under way")

    def _owner_of(self, remote: PeerId, actor: ActorId) -> Owned | None:
        if (remote, actor) in self.actors:
            return self
        found = (child._owner_of(remote, actor) for child in self._children)
        return next((scope for scope in found if scope is not None), None)

    def _owners(self) -> Iterator[tuple[Owned, tuple[PeerId, ActorId]]]:
        """The actors of this scope and of those in it that are not supervised, each with its scope."""
        for target in self.actors:
            if not isinstance(target, FollowingTarget):
                yield self, target.identity
        for child in self._children:
            yield from child._owners()

    # Making.

    async def spawn_one(self, what: Blueprint, seat: Seat | None = None) -> Handle:
        """Make an actor; awaiting `spawn` does this."""
        if what.constraints.is_named:
            return await self._spawn_named(what, anew=True)
        return await self._spawn(what, seat)

    async def get_or_spawn(self, what: Blueprint) -> Handle:
        """Find the actor with the name among the constraints, or make it; awaiting `get_or_create` does this."""
        return await self._spawn_named(what, anew=False)

    async def _spawn_named(self, what: Blueprint, *, anew: bool) -> Handle:
        cls, constraints, controller = what.cls, what.constraints, self.controller
        self._check_spawning(cls)
        name = self.actors.check_named(cls, constraints)
        async with reserved(controller, name, cls) as held:
            if held.reserved:
                handle = await self._spawn(what)
                target = self.target(handle)
                try:
                    await register(controller, target, cls, name, held.epoch)
                    self._check_spawning(cls)
                    if constraints.lifetime is not None:
                        await controller.nodes.of(target.remote).keep(target.remote)
                except BaseException:
                    if not controller.is_closed:
                        await self.stop_handles([handle])
                    raise
                return handle
        if anew:
            raise NameTaken(f"the name {name!r} belongs to {held.label}")
        return await found(controller, held, cls, self.errors)

    async def _spawn(self, what: Blueprint, seat: Seat | None = None) -> Handle:
        cls, constraints = what.cls, what.constraints
        self._check_spawning(cls)
        label, reserved, enrolment = seat or (self.controller.new_label(cls), None, None)
        request = partial(self.request, label, what.demand, constraints)
        spec = ChildSpec(cls, label, what.args, what.kwargs, what.max_queue, enrolment)
        async with self.actors.spawning(partial(self._check_spawning, cls)):
            return await self.actors.make(spec, constraints, self.beside(constraints), reserved, request)

    def _check_spawning(self, cls: type) -> None:
        self.check_open(f"{cls.__name__} cannot be spawned")

    async def spawn_group(self, n: int, what: Blueprint, axes: Axes) -> Group[Any]:
        """Make a group of actors or services; awaiting `group` and `host_group` does this."""
        cls, controller = what.cls, self.controller
        self._check_spawning(cls)
        roster = Roster[Any](controller.new_group(cls), 0, 0, Axes())
        members = GroupMembers(self, controller, self.actors, what, roster)
        kind = Group if issubclass(cls, Actor) else ServiceGroup
        group: Group[Any] = kind(roster, cls, members)
        controller.process.part(Rosters).own(group._cell)
        try:
            await group.resize(n, axes=axes.sizes or None)
        except BaseException:
            if len(group):
                # They are made, and were being told of each other.
                await self.stop_handles(list(group))
            raise
        return group

    async def spawn_mesh(self, hosts: int, demand: Demand, constraints: Constraints) -> Mesh:
        """Reserve the slices of a mesh; awaiting `mesh` does this."""
        label = f"mesh of {hosts} x {demand.gpus:g} GPUs"
        self.check_open(f"a {label} cannot be reserved")
        request = await self.request(label, demand, constraints, hosts)
        scope = Owned(self.controller, _InnerErrors(self.controller, self.errors), self)
        try:
            sites = await scope.actors.carve(replace(request, own_nodes=True), constraints)
        except BaseException:
            if scope in self._children:
                self._children.remove(scope)
            raise
        return Mesh(scope, sites)

    async def request(self, label: str, demand: Demand, constraints: Constraints, count: int = 1) -> Request:
        """The needs of new actors, and the places of the actors that they are to be near to or apart from.

        Raises:
            ActorDied: No actor that they are to be near to is there.
            InsufficientResources: They are to share a process, and need GPUs.
        """
        await self.controller.ready()
        if constraints.beside is not None:
            if demand.gpus:
                raise InsufficientResources(
                    f"{label} lives in the process of another actor and shares its GPUs: ask for none"
                )
            return Request(label, demand, count)
        near, apart_from = await self._anchors(constraints.near), await self._anchors(constraints.apart_from)
        if constraints.near and not near:
            gone = " and ".join(self.target(actor).label for actor in constraints.near)
            raise ActorDied(f"{label} was to be near to {gone}, which is gone", executed=False)
        where = Where(constraints.node, constraints.labels or {}, near, apart_from)
        return Request(label, demand, count, where, constraints.spread)

    async def _anchors(self, actors: tuple[object, ...]) -> tuple[Anchor, ...]:
        """The places of these actors; without those that are gone."""
        found: list[Anchor] = []
        for target in map(self.target, actors):
            peer = await self.controller.directory.last_process(target)
            if peer is not None:
                found.append(Anchor(target.label, self.controller.nodes.name_of(peer)))
        return tuple(found)

    def beside(self, constraints: Constraints) -> Target | None:
        """The actor of which new ones share the process."""
        return None if constraints.beside is None else self.target(constraints.beside)

    # Stopping.

    async def end_block(self, handles: list[Any], graceful: bool) -> None:
        """Stop the actors of a block in this scope that ends: the last one first, or all at once.

        Cancellation: as in `stop_handles`.
        """
        if self.controller.is_closed:
            # The runtime has stopped them; or this is a forked child, to which they do not belong.
            return
        errors = _InnerErrors(self.controller, self.errors)
        errors.closing = True
        for handle in handles:
            for target in (cast("Target", target_of(handle_of(handle))), self.target(handle)):
                target.sink = errors
        await self.stop_handles(handles, graceful=graceful)

    async def stop_handles(
        self, handles: list[Any], first: Callable[[], Awaitable[None]] | None = None, *, graceful: bool = True
    ) -> None:
        """Stop actors, the last one first, after `first` has returned.

        Cancellation: the remaining ones are killed, and all are gone when this raises.
        """
        targets = [self.target(handle) for handle in reversed(handles)]

        def kill() -> None:
            # A closed runtime has stopped all actors.
            for target in targets if not self.controller.is_closed else ():
                self.controller.process.tasks.create_task(self.actors.kill(target), name=f"kill {target.label}")

        async def stop() -> None:
            if first is not None:
                await first()
            await self.actors.stop(targets, graceful=graceful)

        what = ", ".join(target.label for target in targets)
        await see_through(self.controller.start_task(stop(), f"stop {what}"), kill)

    async def stop_mesh(self, mesh: Mesh, graceful: bool = True) -> None:
        """Stop the actors on a mesh, the last one first or all at once, and release its slices. Idempotent.

        Raises:
            ValueError: It belongs to another runtime.

        Cancellation: the actors are killed, and are gone when this raises.
        """
        scope = cast("Owned", mesh._scope)
        if scope.controller is not self.controller:
            raise ValueError(
                f"{mesh!r:.80} belongs to another runtime, that of {scope.controller.process.runtime_name}"
            )
        interrupted = await scope.close(graceful=graceful)
        if interrupted is not None:
            raise interrupted

    async def close(self, *, graceful: bool) -> asyncio.CancelledError | None:
        """Close everything, even if the task is cancelled meanwhile; returns that cancellation."""
        self.errors.closing = True
        if self.controller.is_closed:
            # The runtime has stopped all actors.
            return None

        def kill() -> None:
            self.controller.process.tasks.create_task(self.actors.kill_all(), name="kill the actors of a scope")

        closing = self.controller.start_task(self._close_all(graceful=graceful), "close a scope")
        interrupted = await wait_through(closing, kill)
        if not closing.cancelled():
            # If the runtime was closed meanwhile, it is cancelled.
            closing.result()
        if self._parent is not None and self in self._parent._children:
            self._parent._children.remove(self)
        return interrupted

    async def _close_all(self, *, graceful: bool) -> None:
        self.actors.stop_waiting()
        for child in reversed(self._children):
            child.errors.closing = True
            await child._close_all(graceful=graceful)
        await self.actors.stop_all(graceful=graceful)


class _InnerErrors(ScopeErrors):
    """Errors of the actors of a block that is no scope, such as a mesh, are those of the scope around it."""

    def __init__(self, controller: Owner, around: ScopeErrors) -> None:
        super().__init__(controller)
        self._around = around

    def fail(self, error: BaseException, what: str) -> None:
        if not self.comes_of_closing(error):
            self._around.fail(error, what)

    def hold(self, state: RefState) -> None:
        if not self.comes_of_closing(state.error):
            self._around.hold(state)

    def settle(self, state: RefState) -> None:
        self._around.settle(state)
