"""The actors of one scope: makes, finds, names, stops and kills them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar, cast

from aiodaft._protocol.calls.outgoing import Location
from aiodaft._protocol.ids import ActorId, PeerId, epoch_of, incarnation, node_of
from aiodaft._protocol.node.resources import Demand, Wish
from aiodaft._protocol.placement import Anchor, Request, Where
from aiodaft._protocol.supervision import Kind, Restart, supervision_of
from aiodaft._runtime.agent import WHY_STOPPED, ChildSpec, Enrolment, stop_actor, stop_in_turn
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.calls.following import FollowingTarget, PinnedTarget, followed
from aiodaft._runtime.node.nodes import Nodes, Site
from aiodaft._runtime.node.worker import Conditions, Place, Tenant, WorkerEnvironment
from aiodaft._runtime.owning import InnerErrors, Owner, ScopeErrors
from aiodaft._runtime.placing import Blueprint, Constraints, FixedSites, Order, Reserved, Waiting
from aiodaft._runtime.platform.tasks import see_through, shield_from_anyio, wait_through
from aiodaft._runtime.supervision.supervisor import Child, Move, Supervisor
from aiodaft.actor import Handle, handle_of, target_of
from aiodaft.exceptions import (
    ActorDied,
    CallCancelled,
    CoordinatorUnavailable,
    DaftError,
    InsufficientResources,
    NameTaken,
    OutcomeUnknown,
    RuntimeClosed,
    SerializationError,
    SpawnFailed,
)
from aiodaft.ref import Ref

T = TypeVar("T")


class ScopeActors:
    """The actors of one scope, the scopes inside it, and the errors that it is told of."""

    def __init__(
        self, owner: Owner, errors: ScopeErrors, parent: ScopeActors | None = None, restart: Restart | None = None
    ) -> None:
        self.owner = owner
        self.errors = errors
        self._parent = parent
        self._children: list[ScopeActors] = []
        if parent is not None:
            parent._children.append(self)
        self._restart = restart
        self._supervisor: Supervisor | None = None
        self._targets: dict[tuple[PeerId, ActorId], Target] = {}
        # For each actor that is being spawned: the timeout that ends that, and the future of its end.
        self._spawning: dict[asyncio.Timeout, asyncio.Future[None]] = {}
        # The tasks that take back actors whose spawn has failed or was cancelled.
        self._undoing: set[asyncio.Task[None]] = set()
        self._slices: list[Reserved] = []
        # Set when nothing waits for resources any more.
        self._over = asyncio.Event()

    def __len__(self) -> int:
        return len(self._targets)

    def __iter__(self) -> Iterator[Target]:
        """The last one first."""
        return reversed(list(self._targets.values()))

    def all_actors(self) -> list[Target]:
        """The actors of this scope and of those inside it, in the order in which they were made."""
        return [*self._targets.values(), *(target for child in self._children for target in child.all_actors())]

    def check_open(self, what: str) -> None:
        if self.errors.closing:
            raise RuntimeClosed(f"{what}: its scope is closed")
        self.owner.check_running(what)

    def check_spawning(self, cls: type) -> None:
        self.check_open(f"{cls.__name__} cannot be spawned")

    def target(self, actor: object) -> Target:
        """The target of an actor, not only of one incarnation.

        Raises:
            TypeError: It is no handle and no service.
            ValueError: It belongs to another runtime.
        """
        target = cast("Target", target_of(handle_of(actor)))
        if target.caller.process is not self.owner.process:
            raise ValueError(f"{target.label} belongs to another runtime, that of {target.caller.process.runtime_name}")
        return followed(target)

    def fail(self, error: BaseException, what: str) -> None:
        self.errors.fail(error, what)

    def actor_died(self, remote: PeerId, actor: ActorId, error: OutcomeUnknown) -> None:
        """Tell the scope of an actor that it died while no call to it was under way."""
        if (remote, actor) in self._targets:
            self.errors.fail(error, "an actor died while no call was under way")
        for child in self._children:
            child.actor_died(remote, actor, error)

    def node_gone(self, name: str, error: OutcomeUnknown, idle: Callable[[PeerId], bool]) -> None:
        """Tell the scopes of actors on a node that is gone, as far as no call to them is under way."""
        for target in self:
            if not isinstance(target, FollowingTarget) and node_of(target.remote) == name and idle(target.remote):
                self.errors.fail(error, "a node was lost while no call to an actor there was under way")
        for child in list(self._children):
            child.node_gone(name, error, idle)

    async def spawn_one(
        self, what: Blueprint, reserved: Reserved | None = None, enrolment: Enrolment | None = None
    ) -> Handle:
        """Make an actor; awaiting `spawn` does this.

        Args:
            reserved: Its share, if that is reserved already, as that of a member of a group.
            enrolment: Its place in a group.
        """
        if what.constraints.is_named:
            return await self._spawn_named(what, anew=True)
        return await self._spawn(what, reserved, enrolment)

    async def get_or_spawn(self, what: Blueprint) -> Handle:
        return await self._spawn_named(what, anew=False)

    async def _spawn_named(self, what: Blueprint, *, anew: bool) -> Handle:
        cls, constraints, owner = what.cls, what.constraints, self.owner
        self.check_spawning(cls)
        if constraints.lifetime is not None and (why := self._why_not_outlives(cls, constraints)):
            raise ValueError(f'{cls.__name__} cannot have lifetime="cluster": {why}')
        name = constraints.name
        assert name is not None
        async with owner.reserved(name, cls) as held:
            if held.reserved:
                handle = await self._spawn(what)
                target = self.target(handle)
                try:
                    await owner.register(target, cls, name, held.epoch)
                    self.check_spawning(cls)
                    if constraints.lifetime is not None:
                        await owner.nodes.of(target.remote).keep(target.remote)
                except BaseException:
                    if not owner.is_closed:
                        await self.stop_handles([handle])
                    raise
                return handle
        if anew:
            raise NameTaken(f"the name {name!r} belongs to {held.label}")
        return await owner.found(held, cls, self.errors)

    def _why_not_outlives(self, cls: type, constraints: Constraints) -> str | None:
        if not node_of(self.owner.process.id):
            return 'there is no cluster, only this program; attach it to one by Runtime("tcp://...")'
        if constraints.name is None:
            return "it needs a name, by `on(name=...)` or `get_or_create`"
        if constraints.beside is not None or constraints.within is not None:
            return "it cannot share what its program has, a process or a slice of a mesh"
        found = supervision_of(constraints.restart, getattr(cls, "__aiodaft_restart__", None), self._restart)
        if found is not None and found.kind != "temporary":
            return 'no program is left to restart it; say `on(restart="temporary")` if its class or scope has a policy'
        return None

    async def _spawn(
        self, what: Blueprint, reserved: Reserved | None = None, enrolment: Enrolment | None = None
    ) -> Handle:
        """Make an actor. `_stop_all` cancels that, and waits for its end."""
        cls = what.cls
        self.check_spawning(cls)
        label = self.owner.new_label(cls) if reserved is None else reserved.wish.label
        spec = ChildSpec(cls, label, what.args, what.kwargs, what.max_queue, enrolment)
        limit, ended = asyncio.timeout(None), self.owner.process.loop.create_future()
        self._spawning[limit] = ended
        try:
            async with limit:
                return await self._make(what, spec, reserved)
        except TimeoutError:
            if limit.expired():
                self.check_spawning(cls)
            raise
        finally:
            del self._spawning[limit]
            ended.set_result(None)

    async def _make(self, what: Blueprint, spec: ChildSpec, reserved: Reserved | None) -> Handle:
        """Make an actor; if that fails, free its place.

        Cancellation: the actor is taken back.
        """
        owner, cls, constraints, label = self.owner, what.cls, what.constraints, spec.label
        watched, beside = self._supervision(cls, constraints), self.beside(constraints)
        host = None if beside is None else await owner.directory.host_of(beside)
        python = constraints.python or owner.process.options.python
        environment = WorkerEnvironment.here(constraints.env, constraints.cwd, python) if host is None else None
        patience = constraints.patience_with(cls) or (owner.patience if host is None else None)
        outlives = constraints.lifetime is not None
        conditions = Conditions(
            patience, environment, owner.process.options, owner.process.code, outlives, watched is not None
        )

        async def find_place(tenant: Tenant, host: PeerId | None, epoch: int = 0) -> Place:
            # Also later, when its node is lost: the actors that it is to be near to may have moved.
            wanted = await self.request(label, what.demand, constraints)

            async def attempt(site: Site, ranks: Sequence[int]) -> list[Place]:
                return [await self._start(Reserved(site, wish), conditions, host, epoch)]

            wish = Wish(tenant, label, wanted.demand)
            order = Order(wanted, self._sites(constraints, host), attempt, lambda site, ranks: None)
            [(_, place)] = await self._place(order, constraints.wait)
            return place

        def move(actor: ActorId, host: PeerId | None) -> Coroutine[Any, Any, Place]:
            return find_place(Tenant.of(owner.process.id, actor), host, epoch_of(actor))

        if reserved is not None:
            place = await self._start(reserved, conditions, host, 0)
        else:
            place = await find_place(owner.new_tenant(), host)
        if watched is None:
            target = owner.target(place.peer, place.actor, label, self.errors)
            await self._host(target, spec)
            if not outlives:
                self._targets[target.identity] = target
            return Handle(target, cls)
        return await self._host_supervised(place, spec, watched, beside, move)

    async def _host_supervised(
        self, place: Place, spec: ChildSpec, watched: tuple[Supervisor, Kind], beside: Target | None, move: Move
    ) -> Handle:
        owner, (supervisor, kind) = self.owner, watched
        spec.follow = supervisor.policy.follow
        location = Location(place.peer, place.actor)
        followed = owner.follow(owner.process.id, location, spec.label, self.errors)
        child = owner.directory.begin(Child(followed, spec, supervisor, beside, move))
        try:
            await self._host(followed, spec, again=True)
        except BaseException:
            owner.directory.forget(child)
            raise
        self._targets[followed.identity] = followed
        supervisor.join(child, kind)
        return Handle(followed if supervisor.policy.follow else PinnedTarget(followed, location), spec.cls)

    def _supervision(self, cls: type, constraints: Constraints) -> tuple[Supervisor, Kind] | None:
        if constraints.lifetime is not None:
            return None
        found = supervision_of(constraints.restart, getattr(cls, "__aiodaft_restart__", None), self._restart)
        if found is None:
            return None
        if not found.shared:
            return self._new_supervisor(found.policy), found.kind
        self._supervisor = self._supervisor or self._new_supervisor(found.policy)
        return self._supervisor, found.kind

    def _new_supervisor(self, policy: Restart) -> Supervisor:
        return self.owner.directory.new_supervisor(policy, self.owner.process.options.stop_grace, self.errors.fail)

    async def request(self, label: str, demand: Demand, constraints: Constraints, count: int = 1) -> Request:
        """The needs of new actors, and the places of the actors that they are to be near to or apart from.

        Raises:
            ActorDied: No actor that they are to be near to is there.
            InsufficientResources: They are to share a process, and need GPUs.
        """
        await self.owner.ready()
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
            peer = await self.owner.directory.last_process(target)
            if peer is not None:
                found.append(Anchor(target.label, self.owner.nodes.name_of(peer)))
        return tuple(found)

    def beside(self, constraints: Constraints) -> Target | None:
        return None if constraints.beside is None else self.target(constraints.beside)

    async def _start(self, reserved: Reserved, conditions: Conditions, host: PeerId | None, epoch: int) -> Place:
        """Have a node start an actor, in the process of another one (`host`) or in a new one."""
        site, wish = reserved
        placing: Ref[Place] = site.agent.place(wish, site.within, host, conditions, epoch)
        try:
            return await placing
        except asyncio.CancelledError:
            if placing.done() and placing.exception() is None:
                # The place was found while the cancellation was on its way: only this code can free it.
                place = await placing
                await self._undo(self.owner.target(place.peer, place.actor, wish.label, self.errors))
            else:
                taking = self._take_back(placing, site, wish, epoch)
                self._note_undoing(self.owner.process.tasks.create_task(taking, name=f"take back {wish.label}"))
            raise

    async def _take_back(self, placing: Ref[Place], site: Site, wish: Wish[Tenant], epoch: int) -> None:
        """Free a place that was found while the cancellation was on its way to the node, if there is one."""
        # The node answers when a process that it was starting has ended.
        await placing.ready()
        with suppress(DaftError):
            for process in await site.agent.processes():
                if process.owner == wish.holder.owner and wish.label in process.actors:
                    actor = incarnation(wish.holder.number, epoch)
                    await self.owner.nodes.vacate(process.id, actor, WHY_STOPPED)

    def _sites(self, constraints: Constraints, host: PeerId | None) -> Nodes | FixedSites:
        nodes = self.owner.nodes
        return (constraints.within or nodes) if host is None else FixedSites((nodes.site_of(host),))

    async def _place(self, order: Order[T], wait: float | None) -> list[tuple[Site, T]]:
        waiting = None if wait is None else Waiting(wait, self._over)
        try:
            return await self.owner.placing.place(order, waiting)
        except InsufficientResources:
            self.check_open(f"{order.request.label} cannot be placed")
            raise

    async def reserve(self, request: Request, ranks: Sequence[int], constraints: Constraints) -> list[Reserved]:
        """Reserve the shares of a gang: all of them or none.

        Cancellation: nothing is reserved.
        """

        # Not before there is room for them: there may be any number.
        @cache
        def wish(index: int) -> Wish[Tenant]:
            return Wish(self.owner.new_tenant(), f"{request.label}[{ranks[index]}]", request.demand)

        async def attempt(site: Site, indices: Sequence[int]) -> list[Wish[Tenant]]:
            found = [wish(index) for index in indices]
            await site.agent.reserve(found, site.within)
            return found

        beside = self.beside(constraints)
        host = None if beside is None else await self.owner.directory.host_of(beside)
        order = Order(request, self._sites(constraints, host), attempt, partial(_release, wish))
        return [Reserved(*placed) for placed in await self._place(order, constraints.wait)]

    @staticmethod
    def release(reserved: Iterable[Reserved]) -> None:
        """Give back the shares among these that no actor has. Idempotent."""
        for site, wish in reserved:
            _release([wish].__getitem__, site, [0])

    async def carve(
        self, count: int, demand: Demand, constraints: Constraints
    ) -> tuple[ScopeActors, list[tuple[Site, tuple[int, ...]]]]:
        """Reserve slices on nodes of their own; returns a scope that releases them, and them with their GPUs' numbers.

        Cancellation: nothing is reserved.
        """
        label = f"mesh of {count} x {demand.gpus:g} GPUs"
        self.check_open(f"a {label} cannot be reserved")
        request = replace(await self.request(label, demand, constraints, count), own_nodes=True)
        inner = ScopeActors(self.owner, InnerErrors(self.owner, self.errors), self)
        wishes = [Wish(self.owner.new_tenant(), label, demand) for _ in range(count)]

        async def attempt(site: Site, ranks: Sequence[int]) -> list[tuple[int, ...]]:
            return [await site.agent.carve(wishes[rank]) for rank in ranks]

        order = Order(request, self._sites(constraints, None), attempt, partial(_release, wishes.__getitem__))
        try:
            placed = await inner._place(order, constraints.wait)
        except BaseException:
            inner._leave()
            raise
        inner._slices = [Reserved(site, wish) for (site, _), wish in zip(placed, wishes, strict=True)]
        within = [site._replace(within=wish.holder) for site, wish in inner._slices]
        return inner, [(site, gpus) for site, (_, gpus) in zip(within, placed, strict=True)]

    async def _host(self, target: Target, spec: ChildSpec, *, again: bool = False) -> None:
        try:
            self.check_spawning(spec.cls)
            imported = await spec.make(self.owner.peer.caller, target.remote, target.actor, again=again)
            if imported is not None:
                self.owner.note_imports(spec.label, *imported)
            self.check_spawning(spec.cls)
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, CallCancelled | OutcomeUnknown):
                self.owner.process.note_failure("start", spec.label, error)
            await self._undo(target)
            if isinstance(error, SerializationError) and _lacks_code(error.__cause__):
                where = self.owner.nodes.name_of(target.remote)
                raise SpawnFailed(
                    f"{spec.label} cannot be made on {where}, which cannot load its class: {error.__cause__}. "
                    "Send the code with `await rt.ship(...)`, or install it there"
                ) from error
            raise

    async def _undo(self, target: Target) -> None:
        undoing = self.owner.start_task(self._vacate(target), f"take back {target.label}")
        self._note_undoing(undoing)
        with shield_from_anyio():
            await asyncio.wait([undoing])

    def _note_undoing(self, task: asyncio.Task[None]) -> None:
        self._undoing.add(task)
        task.add_done_callback(self._undoing.discard)

    async def end_block(self, handles: list[Any], graceful: bool) -> None:
        """Stop the actors of a block in this scope that ends: the last one first, or all at once.

        Cancellation: as in `stop_handles`.
        """
        if self.owner.is_closed:
            # The runtime has stopped them; or this is a forked child, to which they do not belong.
            return
        errors = InnerErrors(self.owner, self.errors)
        errors.closing = True
        for handle in handles:
            for target in (cast("Target", target_of(handle_of(handle))), self.target(handle)):
                target.sink = errors
        await self.stop_handles(handles, graceful=graceful)

    async def stop_handles(
        self, handles: list[Any], first: Callable[[], Awaitable[None]] | None = None, *, graceful: bool = True
    ) -> None:
        """Stop actors, the last one first, after `first` has returned. Idempotent.

        Cancellation: the remaining ones are killed, and all are gone when this raises.
        """
        targets = [self.target(handle) for handle in reversed(handles)]

        def kill() -> None:
            # A closed runtime has stopped all actors.
            for target in targets if not self.owner.is_closed else ():
                self.owner.process.tasks.create_task(self.kill(target), name=f"kill {target.label}")

        async def stop() -> None:
            if first is not None:
                await first()
            await self.owner.ready()
            there = [target for target in targets if await self._is_there(target)]
            for target in there:
                target.stopped = True
            await self._end(there, graceful=graceful)

        what = ", ".join(target.label for target in targets)
        await see_through(self.owner.start_task(stop(), f"stop {what}"), kill)

    async def _is_there(self, target: Target) -> bool:
        """Whether an actor can be ended; one that another process supervises is found first."""
        if isinstance(target, FollowingTarget) and target.owner != self.owner.process.id:
            try:
                target.move(await target.locate(wait=True))
            except ActorDied:
                return False
            return target.ended is None
        return True

    async def kill(self, target: Target) -> None:
        owner = self.owner
        try:
            await owner.ready()
            if not await self._is_there(target):
                return
        except RuntimeClosed:
            return
        child = owner.directory.retire(target)
        peer = target.remote if child is None else child.place.peer
        await owner.nodes.kill(peer, "killed by its owner")
        if child is not None:
            await child.settled()
        self._targets.pop(target.identity, None)

    async def close(self, *, graceful: bool) -> asyncio.CancelledError | None:
        """Close everything, even if the task is cancelled meanwhile; returns that cancellation."""
        self.errors.closing = True
        if self.owner.is_closed:
            return None

        async def kill_all() -> None:
            # `_stop_all` still has to free their places.
            nodes, why = self.owner.nodes, "its scope was cancelled"
            await asyncio.gather(*(nodes.kill(target.remote, why) for target in self))

        def kill() -> None:
            self.owner.process.tasks.create_task(kill_all(), name="kill the actors of a scope")

        closing = self.owner.start_task(self._close_all(graceful=graceful), "close a scope")
        interrupted = await wait_through(closing, kill)
        if not closing.cancelled():
            # If the runtime was closed meanwhile, it is cancelled.
            closing.result()
        self._leave()
        return interrupted

    def _leave(self) -> None:
        if self._parent is not None and self in self._parent._children:
            self._parent._children.remove(self)

    async def _close_all(self, *, graceful: bool) -> None:
        """Close the scopes inside this one, take back the actors that are being made, then stop all others."""
        self._over.set()
        for child in reversed(self._children):
            child.errors.closing = True
            await child._close_all(graceful=graceful)
        for limit in self._spawning:
            if limit.when() is None:
                limit.reschedule(self.owner.process.loop.time())
        while ending := [*self._spawning.values(), *self._undoing]:
            await asyncio.wait(ending)
        await self._end(list(self), graceful=graceful)
        self.release(self._slices)

    async def _end(self, targets: Sequence[Target], *, graceful: bool) -> None:
        """Stop actors: in this order, each within the grace time, or all at once."""
        owner = self.owner
        children = [child for target in targets if (child := owner.directory.retire(target)) is not None]
        await asyncio.gather(*(child.settled() for child in children))
        caller = owner.peer.caller
        if graceful:
            answers = await stop_in_turn(caller, targets, WHY_STOPPED, owner.process.options.stop_grace)
        else:
            answers = await asyncio.gather(*(stop_actor(caller, target, WHY_STOPPED, 0) for target in targets))
        await asyncio.gather(*map(self._vacate, targets, answers))

    async def _vacate(self, target: Target, answers: bool = True) -> None:
        self._targets.pop(target.identity, None)
        owner = self.owner
        with suppress(OutcomeUnknown, CoordinatorUnavailable, RuntimeClosed):
            # A coordinator that is gone finds out when it comes back.
            try:
                async with asyncio.timeout(owner.process.grace):
                    await owner.coordinator.release(*target.identity)
            except TimeoutError:
                owner.coordinator.release.tell(*target.identity)
        await owner.nodes.vacate(target.remote, target.actor, WHY_STOPPED, answers=answers)
        owner.placing.forget(owner.nodes.name_of(target.remote))
        owner.directory.close(target)


def _lacks_code(error: BaseException | None) -> bool:
    # An older version of a module may not have the class.
    return isinstance(error, ImportError) or (isinstance(error, AttributeError) and "module '" in str(error))


def _release(wish: Callable[[int], Wish[Tenant]], site: Site, ranks: Sequence[int]) -> None:
    # The reservations of a lost node are gone with it.
    with suppress(DaftError):
        site.agent.release.tell([wish(rank).holder for rank in ranks])
