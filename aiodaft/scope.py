"""Scopes own actors and errors: the end of a scope stops its actors, and raises the errors that no code has seen."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, cast

from aiodaft._protocol.diagnostics.unhandled import Unhandled
from aiodaft._protocol.groups.axes import Axes
from aiodaft._protocol.groups.roster import Roster
from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft._protocol.node.resources import Demand
from aiodaft._protocol.placement.request import Anchor, Request, Where
from aiodaft._protocol.supervision.supervision import Restart
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.calls.following import FollowingTarget, followed
from aiodaft._runtime.calls.rosters import Rosters
from aiodaft._runtime.objects.ref_state import RefState
from aiodaft._runtime.owning import Owner
from aiodaft._runtime.platform.error_log import log_error
from aiodaft._runtime.platform.tasks import logger, see_through, shield_from_anyio
from aiodaft._runtime.scope_actors import Blueprint, Constraints, ScopeActors, Seat
from aiodaft._runtime.supervision.child_spec import ChildSpec
from aiodaft.actor import Actor, Handle, class_of, target_of
from aiodaft.exceptions import (
    ActorDied,
    CallCancelled,
    InsufficientResources,
    NameTaken,
    OutcomeUnknown,
    RuntimeClosed,
)
from aiodaft.group import Group
from aiodaft.grouping import GroupMembers
from aiodaft.info import ActorInfo, look_at
from aiodaft.naming import found, register, reserved
from aiodaft.placement import Mesh, Spawner
from aiodaft.service import Service, ServiceGroup

__all__ = ["Scope"]

T = TypeVar("T")


class Scope(Spawner):
    """An `async with` block that owns actors: `async with rt.scope() as s`.

    The end of the block stops its actors, the last one first; if it ends by an error, calls under way are cancelled. As
    in an `asyncio.TaskGroup`, an error that no code will see (of a call with a dropped ref, or of an actor that died
    while no call was under way) cancels the body. When the block ends, it raises such errors and the unseen errors of
    refs in an ExceptionGroup. A `Runtime` does not cancel its body.
    """

    def __init__(self, controller: Owner, parent: Scope | None = None, restart: Restart | None = None) -> None:
        self._controller = controller
        self._parent = parent
        self._scope_actors = ScopeActors(controller, self, restart)
        self._children: list[Scope] = []
        self._unhandled = Unhandled()
        self._held: dict[RefState, None] = {}
        self._task: asyncio.Task[Any] | None = None
        self._cancelled_task = False
        self._closing = False

    # The block.

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._controller.is_left_behind:
            # A forked child leaves the block too, but the parent owns the actors.
            return
        cancelled = await self._uncancel(error)
        interrupted = await self._close(graceful=error is None and not self._cancelled_task)
        if (group := self._errors_after(error)) is not None:
            raise group from None
        if error is None and interrupted is not None and not cancelled:
            raise interrupted

    def _errors_after(self, error: BaseException | None) -> BaseExceptionGroup[BaseException] | None:
        """The group to raise instead of the error of the body; None: raise that error as it is."""
        for state in self._unseen():
            assert state.error is not None
            self._unhandled.add(state.error)
        return self._unhandled.group(None if isinstance(error, asyncio.CancelledError) else error)

    async def _uncancel(self, error: BaseException | None) -> bool:
        """Take back the cancellation by `fail`; False if there was none, or if other code cancelled the task too."""
        if not self._cancelled_task:
            return False
        if not isinstance(error, asyncio.CancelledError):
            # The body ended before the scope's cancellation reached it: the cancellation arrives here.
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                logger.debug("the scope's own cancellation arrived after its body")
        task = self._task
        return task is None or task.uncancel() == 0

    async def _close(self, *, graceful: bool) -> asyncio.CancelledError | None:
        """Close everything, even if the task is cancelled meanwhile; returns that cancellation."""
        self._closing = True
        if self._controller.is_closed:
            # The runtime has stopped all actors.
            return None
        closing = self._controller.start_task(self._close_all(graceful=graceful), "close a scope")
        interrupted: asyncio.CancelledError | None = None
        with shield_from_anyio():
            while not closing.done():
                try:
                    await asyncio.wait([closing])
                except asyncio.CancelledError as cancelled:
                    if interrupted is None:
                        self._controller.process.tasks.create_task(
                            self._scope_actors.kill_all(), name="kill the actors of a scope"
                        )
                    interrupted = cancelled
        if not closing.cancelled():
            # If the runtime was closed meanwhile, it is cancelled.
            closing.result()
        if self._parent is not None and self in self._parent._children:
            self._parent._children.remove(self)
        return interrupted

    async def _close_all(self, *, graceful: bool) -> None:
        self._scope_actors.stop_waiting()
        for child in reversed(self._children):
            child._closing = True
            await child._close_all(graceful=graceful)
        await self._scope_actors.stop_all(graceful=graceful)

    def _unseen(self) -> list[RefState]:
        """The refs with errors that no code has seen; called once, at the end."""
        if self._held and not self._controller.is_closed:
            # A raised error refers to frames, and these to refs: only the garbage collector frees such a cycle.
            gc.collect()
            self._controller.objects.drop_now()
        # Other threads may mark errors as seen meanwhile.
        unseen = [state for state in list(self._held) if not state.seen]
        self._held = {}
        for state in unseen:
            state.seen = True
        return unseen

    def __dir__(self) -> list[str]:
        return [
            "group", "host", "host_group", "info", "kill", "mesh", "on", "rebind", "scope", "spawn", "stop",
            "stop_group", "stop_mesh",
        ]  # fmt: skip

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} stays in the process that opened it: pass handles of actors")

    # The errors of its actors' refs.

    def fail(self, error: BaseException, what: str) -> None:
        """Cancel the body because of an error that no code will see; the block raises the error."""
        if not self._comes_of_closing(error):
            self._unhandled.add(error)
            self._stop_body(error, what)

    def _stop_body(self, error: BaseException, what: str) -> None:
        if self._task is None:
            # Opened without a block.
            log_error(what, error)
        elif not self._closing and not self._cancelled_task:
            self._cancelled_task = True
            self._task.cancel()

    def hold(self, state: RefState) -> None:
        """Keep a ref with an error that no code has seen."""
        if not self._comes_of_closing(state.error):
            self._held[state] = None

    def settle(self, state: RefState) -> None:
        """Forget a ref: code has seen its error."""
        self._held.pop(state, None)

    def _comes_of_closing(self, error: BaseException | None) -> bool:
        """Whether closing this scope caused the error of a call."""
        return self._closing and isinstance(error, OutcomeUnknown | RuntimeClosed | CallCancelled)

    # Spawning.

    def scope(self, *, restart: Restart | None = None) -> Scope:
        """A scope inside this one: `async with rt.scope() as s`.

        Args:
            restart: The policy for the actors of this scope, which are siblings; not for scopes inside it. It overrides
                a policy of the class line; `on` overrides it.

        Raises:
            TypeError: `restart` is not a policy.
        """
        if restart is not None and not isinstance(restart, Restart):
            raise TypeError(f"restart={restart!r:.80} is not an aiodaft.Restart")
        self.check_open("a scope cannot be opened")
        child = Scope(self._controller, self, restart)
        self._children.append(child)
        return child

    def _owner_of(self, remote: PeerId, actor: ActorId) -> Scope | None:
        if (remote, actor) in self._scope_actors:
            return self
        found = (child._owner_of(remote, actor) for child in self._children)
        return next((scope for scope in found if scope is not None), None)

    def _owners(self) -> Iterator[tuple[Scope, tuple[PeerId, ActorId]]]:
        """The actors of this scope and of those in it that are not supervised, each with its scope."""
        for target in self._scope_actors:
            if not isinstance(target, FollowingTarget):
                yield self, target.identity
        for child in self._children:
            yield from child._owners()

    def check_open(self, what: str) -> None:
        """Raise RuntimeClosed unless the scope is open."""
        if self._closing:
            raise RuntimeClosed(f"{what}: its scope is closed")
        self._controller.check_running(what)

    def _spawning(self) -> tuple[Scope, Constraints]:
        return self, Constraints()

    async def spawn_one(self, what: Blueprint, seat: Seat | None = None) -> Handle:
        """Make an actor; awaiting `spawn` does this."""
        if what.constraints.is_named:
            return await self._spawn_named(what, anew=True)
        return await self._spawn(what, seat)

    async def get_or_spawn(self, what: Blueprint) -> Handle:
        """Find the actor with the name among the constraints, or make it; awaiting `get_or_create` does this."""
        return await self._spawn_named(what, anew=False)

    async def _spawn_named(self, what: Blueprint, *, anew: bool) -> Handle:
        cls, constraints, controller = what.cls, what.constraints, self._controller
        self._check_spawning(cls)
        name = self._scope_actors.check_named(cls, constraints)
        async with reserved(controller, name, cls) as held:
            if held.reserved:
                handle = await self._spawn(what)
                target = self._target(handle)
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
        return await found(controller, held, cls, self)

    async def _spawn(self, what: Blueprint, seat: Seat | None = None) -> Handle:
        cls, constraints = what.cls, what.constraints
        self._check_spawning(cls)
        label, reserved, enrolment = seat or (self._controller.new_label(cls), None, None)
        request = partial(self.request, label, what.demand, constraints)
        spec = ChildSpec(cls, label, what.args, what.kwargs, what.max_queue, enrolment)
        return await self._scope_actors.make(spec, constraints, self.beside(constraints), reserved, request)

    def _check_spawning(self, cls: type) -> None:
        self.check_open(f"{cls.__name__} cannot be spawned")

    async def spawn_group(self, n: int, what: Blueprint, axes: Axes) -> Group[Any]:
        """Make a group of actors or services; awaiting `group` and `host_group` does this."""
        cls, controller = what.cls, self._controller
        self._check_spawning(cls)
        roster = Roster[Any](controller.new_group(cls), 0, 0, Axes())
        members = GroupMembers(self, controller, self._scope_actors, what, roster)
        kind = Group if issubclass(cls, Actor) else ServiceGroup
        group: Group[Any] = kind(roster, cls, members)
        controller.process.part(Rosters).own(group._cell)
        try:
            await group.resize(n, axes=axes.sizes or None)
        except BaseException:
            if len(group):
                # They are made, and were being told of each other.
                await self.stop_group(group)
            raise
        return group

    async def spawn_mesh(self, hosts: int, demand: Demand, constraints: Constraints) -> Mesh:
        """Reserve the slices of a mesh; awaiting `mesh` does this."""
        label = f"mesh of {hosts} x {demand.gpus:g} GPUs"
        self.check_open(f"a {label} cannot be reserved")
        request = await self.request(label, demand, constraints, hosts)
        scope = _MeshScope(self._controller, self)
        self._children.append(scope)
        try:
            sites = await scope._scope_actors.carve(replace(request, own_nodes=True), constraints)
        except BaseException:
            if scope in self._children:
                self._children.remove(scope)
            raise
        return Mesh(scope, sites)

    async def request(self, label: str, demand: Demand, constraints: Constraints, count: int = 1) -> Request:
        """What new actors need, and where the actors are that they are to be near to or apart from.

        Raises:
            ActorDied: No actor that they are to be near to is there.
            InsufficientResources: They are to share a process, and need GPUs.
        """
        await self._controller.ready()
        if constraints.beside is not None:
            if demand.gpus:
                raise InsufficientResources(
                    f"{label} lives in the process of another actor and shares its GPUs: ask for none"
                )
            return Request(label, demand, count)
        near, apart_from = await self._anchors(constraints.near), await self._anchors(constraints.apart_from)
        if constraints.near and not near:
            gone = " and ".join(self._target(actor).label for actor in constraints.near)
            raise ActorDied(f"{label} was to be near to {gone}, which is gone", executed=False)
        where = Where(constraints.node, constraints.labels or {}, near, apart_from)
        return Request(label, demand, count, where, constraints.spread)

    async def _anchors(self, actors: tuple[object, ...]) -> tuple[Anchor, ...]:
        """Where these actors are; without those that are gone."""
        found: list[Anchor] = []
        for target in map(self._target, actors):
            peer = await self._controller.directory.last_process(target)
            if peer is not None:
                found.append(Anchor(target.label, self._controller.nodes.name_of(peer)))
        return tuple(found)

    def beside(self, constraints: Constraints) -> Target | None:
        """The actor of which new ones share the process."""
        return None if constraints.beside is None else self._target(constraints.beside)

    # Stopping.

    async def stop(self, actor: object) -> None:
        """Stop an actor: it refuses new calls, gives the others `stop_grace`, then its process ends. Idempotent.

        Cancellation: the actor is killed, and is gone when this raises.
        """
        await self.stop_handles([actor])

    async def kill(self, actor: object) -> None:
        """Kill an actor's process, with every actor in it. Calls under way fail with ActorDied. Idempotent.

        Cancellation: raised when the process has ended.
        """
        target = self._target(actor)
        await see_through(self._controller.start_task(self._scope_actors.kill(target), f"kill {target.label}"))

    async def stop_group(self, group: Group[Any]) -> None:
        """Stop every member of a group, the last rank first.

        Cancellation: the remaining members are killed, and all are gone when this raises.
        """
        await self.stop_handles(list(group))

    async def stop_mesh(self, mesh: Mesh) -> None:
        """Stop the actors on a mesh, the last one first, and release its slices. Idempotent.

        Cancellation: the actors are killed, and are gone when this raises.
        """
        scope = mesh._scope if isinstance(mesh, Mesh) else None
        if not isinstance(scope, Scope) or scope._controller is not self._controller:
            raise ValueError(f"{mesh!r:.80} is no mesh of this runtime")
        interrupted = await scope._close(graceful=True)
        if interrupted is not None:
            raise interrupted

    async def stop_handles(self, handles: list[Any], first: Callable[[], Awaitable[None]] | None = None) -> None:
        """Stop actors, the last one first, after `first` has returned. Cancellation: see `stop_group`."""
        targets = [self._target(handle) for handle in reversed(handles)]

        def kill() -> None:
            # A closed runtime has stopped all actors.
            for target in targets if not self._controller.is_closed else ():
                self._controller.process.tasks.create_task(self._scope_actors.kill(target), name=f"kill {target.label}")

        async def stop() -> None:
            if first is not None:
                await first()
            await self._scope_actors.stop(targets)

        what = ", ".join(target.label for target in targets)
        await see_through(self._controller.start_task(stop(), f"stop {what}"), kill)

    # Inspecting.

    async def info(self, actor: object) -> ActorInfo:
        """The state of an actor. If its process does not answer, the result has what its node knows."""
        return await look_at(self._controller, self._target(actor), class_of(handle_of(actor)))

    async def rebind(self, actor: T) -> T:
        """A handle of the actor's current or next incarnation; the same handle if it follows restarts.

        Raises:
            ActorDied: The actor is gone, and is not restarted.
        """
        handle, target = handle_of(actor), self._target(actor)
        if not isinstance(target, FollowingTarget) or target.owner != self._controller.process.id:
            return actor
        address = await self._controller.directory.address(target.number)
        if address is target_of(handle):
            return actor
        new = Handle(address, class_of(handle))
        return cast("T", Service(new, class_of(handle)) if isinstance(actor, Service) else new)

    def _target(self, actor: object) -> Target:
        """The target of an actor, not only of one incarnation."""
        target = cast("Target", target_of(handle_of(actor)))
        if target.caller.process is not self._controller.process:
            raise ValueError(f"{target.label} belongs to another runtime, that of {target.caller.process.runtime_name}")
        return followed(target)


class _MeshScope(Scope):
    """Owns the slices of a mesh and the actors on them; their errors are those of the scope around it."""

    def fail(self, error: BaseException, what: str) -> None:
        if not self._comes_of_closing(error):
            self._around.fail(error, what)

    def hold(self, state: RefState) -> None:
        if not self._comes_of_closing(state.error):
            self._around.hold(state)

    def settle(self, state: RefState) -> None:
        self._around.settle(state)

    @property
    def _around(self) -> Scope:
        assert self._parent is not None
        return self._parent


def handle_of(actor: object) -> object:
    """The handle of an actor or a service."""
    return actor.handle if isinstance(actor, Service) else actor
