"""The actors of one scope: makes, stops and kills them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, TypeVar

from aiodaft._protocol.calls.outgoing import Location
from aiodaft._protocol.diagnostics.failures import Unhandled
from aiodaft._protocol.ids import ActorId, PeerId, epoch_of, incarnation, node_of
from aiodaft._protocol.node.resources import Wish
from aiodaft._protocol.placement import Request
from aiodaft._protocol.supervision import Kind, Restart, supervision_of
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.calls.following import FollowingTarget, PinnedTarget
from aiodaft._runtime.node.environment import WorkerEnvironment
from aiodaft._runtime.node.node_agent import NodeAgent
from aiodaft._runtime.node.worker import Conditions, Place, Tenant
from aiodaft._runtime.objects.ref_state import RefState, UnhandledErrors
from aiodaft._runtime.owning import Constraints, Owner, Reserved
from aiodaft._runtime.placing import FixedSites, Order, Site, Sites, Waiting
from aiodaft._runtime.platform.tasks import log_error, logger, shield_from_anyio
from aiodaft._runtime.supervision.child_spec import WHY_STOPPED, ChildSpec, stop_actor, stop_in_turn
from aiodaft._runtime.supervision.supervisor import Child, Supervisor
from aiodaft.actor import Handle
from aiodaft.exceptions import (
    ActorDied,
    CallCancelled,
    CoordinatorUnavailable,
    DaftError,
    InsufficientResources,
    OutcomeUnknown,
    RuntimeClosed,
    SerializationError,
    SpawnFailed,
)
from aiodaft.ref import Ref


class ScopeErrors:
    """The errors that refs and supervisors of actors report to their scope."""

    def __init__(self, controller: Owner) -> None:
        self._controller = controller
        # Set when the scope begins to close.
        self.closing = False
        self.kept = Unhandled()
        # Refs with errors that no code has seen.
        self.held: dict[RefState, None] = {}
        self._task: asyncio.Task[Any] | None = None
        self._cancelled_task = False

    def fail(self, error: BaseException, what: str) -> None:
        """Cancel the body because of an error that no code will see; the block raises the error."""
        if not self.comes_of_closing(error):
            self.kept.add(error)
            self._stop_body(error, what)

    def _stop_body(self, error: BaseException, what: str) -> None:
        if self._task is None:
            # Opened without a block.
            log_error(what, error)
        elif not self.closing and not self._cancelled_task:
            self._cancelled_task = True
            self._task.cancel()

    def hold(self, state: RefState) -> None:
        if not self.comes_of_closing(state.error):
            self.held[state] = None

    def settle(self, state: RefState) -> None:
        """Forget a ref: code has seen its error."""
        self.held.pop(state, None)

    def comes_of_closing(self, error: BaseException | None) -> bool:
        return self.closing and isinstance(error, OutcomeUnknown | RuntimeClosed | CallCancelled)

    # The block.

    def begin(self) -> None:
        self._task = asyncio.current_task()

    @property
    def has_cancelled(self) -> bool:
        return self._cancelled_task

    async def uncancel(self, error: BaseException | None) -> bool:
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

    def after(self, error: BaseException | None) -> BaseExceptionGroup[BaseException] | None:
        """The group to raise instead of the error of the body; None: raise that error as it is."""
        for _, one in self.unseen():
            self.kept.add(one)
        return self.kept.group(None if isinstance(error, asyncio.CancelledError) else error)

    def unseen(self) -> list[tuple[str, BaseException]]:
        """The errors of refs that no code has seen, each with the name of the failed part; called once, at the end."""
        if self.held and not self._controller.is_closed:
            # A raised error refers to frames, and these to refs: only the garbage collector frees such a cycle.
            gc.collect()
            self._controller.objects.drop_now()
        # Other threads may mark errors as seen meanwhile.
        unseen = [state for state in list(self.held) if not state.seen]
        self.held = {}
        for state in unseen:
            state.seen = True
        what = "{} failed, and no code saw the error"
        return [(what.format(state.label), state.error) for state in unseen if state.error is not None]


T = TypeVar("T")


class Start(NamedTuple):
    """The order to a node to start an actor.

    Attributes:
        host: The process to share; None for a new one.
        keep: Whether the actor may be restarted.
    """

    host: PeerId | None
    conditions: Conditions
    keep: bool
    epoch: int = 0


class OwningScope(Protocol):
    """The view that actors have of their scope."""

    @property
    def errors(self) -> UnhandledErrors: ...
    def check_open(self, what: str) -> None: ...


class ScopeActors:
    """The actors that one scope owns."""

    def __init__(self, controller: Owner, scope: OwningScope, restart: Restart | None) -> None:
        self._controller = controller
        self._scope = scope
        self._restart = restart
        # Supervises actors by the scope's own policy; made for the first of them.
        self._supervisor: Supervisor | None = None
        self._owned: dict[tuple[PeerId, ActorId], Target] = {}
        # For each actor that is being spawned: the timeout that ends that, and the future of its end.
        self._spawning: dict[asyncio.Timeout, asyncio.Future[None]] = {}
        # The tasks that take back actors whose spawn has failed or was cancelled.
        self._undoing: set[asyncio.Task[None]] = set()
        # The slices of a mesh, if this is the scope of one.
        self._slices: list[Reserved] = []
        # Set when nothing waits for resources any more.
        self._over = asyncio.Event()

    def __len__(self) -> int:
        return len(self._owned)

    def __iter__(self) -> Iterator[Target]:
        """The last one first."""
        return reversed(list(self._owned.values()))

    def __contains__(self, identity: tuple[PeerId, ActorId]) -> bool:
        return identity in self._owned

    # Making.

    def check_named(self, cls: type, constraints: Constraints) -> str:
        """The name of an actor that is to have one. Raises ValueError if its lifetime is not possible."""
        if constraints.lifetime is not None:
            why = self._why_not_outlives(cls, constraints)
            if why is not None:
                raise ValueError(f'{cls.__name__} cannot have lifetime="cluster": {why}')
        assert constraints.name is not None
        return constraints.name

    def _why_not_outlives(self, cls: type, constraints: Constraints) -> str | None:
        if not node_of(self._controller.process.id):
            return 'there is no cluster, only this program; attach it to one by Runtime("tcp://...")'
        if constraints.name is None:
            return "it needs a name, by `on(name=...)` or `get_or_create`"
        if constraints.beside is not None or constraints.within is not None:
            return "it cannot share what its program has, a process or a slice of a mesh"
        found = supervision_of(constraints.restart, getattr(cls, "__aiodaft_restart__", None), self._restart)
        if found is not None and found.kind != "temporary":
            return 'no program is left to restart it; say `on(restart="temporary")` if its class or scope has a policy'
        return None

    @asynccontextmanager
    async def spawning(self, check: Callable[[], None]) -> AsyncGenerator[None]:
        """In the block, an actor is made. `stop_all` cancels it, and waits for its end."""
        limit, ended = asyncio.timeout(None), self._controller.process.loop.create_future()
        self._spawning[limit] = ended
        try:
            async with limit:
                yield
        except TimeoutError:
            if limit.expired():
                check()
            raise
        finally:
            del self._spawning[limit]
            ended.set_result(None)

    async def make(
        self,
        spec: ChildSpec,
        constraints: Constraints,
        beside: Target | None,
        reserved: Reserved | None,
        request: Callable[[], Awaitable[Request]],
    ) -> Handle:
        """Make an actor; if that fails, free its place.

        Args:
            constraints: The arguments of `on`.
            request: Gives its demand; also later, when its node is lost.

        Cancellation: the actor is taken back.
        """
        controller, cls, label = self._controller, spec.cls, spec.label
        watched = self._supervision(cls, constraints)
        host = None if beside is None else await controller.directory.host_of(beside)
        environment = WorkerEnvironment.here() if host is None else None
        patience = constraints.patience_with(cls) or (controller.patience if host is None else None)
        outlives = constraints.lifetime is not None
        conditions = Conditions(patience, environment, controller.process.options, controller.process.code, outlives)
        start = Start(host, conditions, watched is not None)
        if reserved is not None:
            place = await self._start(reserved, start)
        else:
            wanted = await request()
            place = await self._find_place(
                Wish(controller.new_tenant(), label, wanted.demand), wanted, constraints, start
            )
        if watched is None:
            target = controller.target(place.peer, place.actor, label, self._scope.errors)
            await self._host(target, spec)
            if not outlives:
                self._owned[target.identity] = target
            return Handle(target, cls)
        supervisor, kind = watched
        spec.follow = supervisor.policy.follow
        location = Location(place.peer, place.actor)
        followed = controller.follow(controller.process.id, location, label, self._scope.errors)

        async def move(actor: ActorId, host: PeerId | None) -> Place:
            wanted = await request()
            wish = Wish(Tenant.of(controller.process.id, actor), label, wanted.demand)
            again = start._replace(host=host, epoch=epoch_of(actor))
            return await self._find_place(wish, wanted, constraints, again)

        child = controller.directory.begin(Child(followed, spec, supervisor, beside, move))
        try:
            await self._host(followed, spec, again=True)
        except BaseException:
            controller.directory.forget(child)
            raise
        self._owned[followed.identity] = followed
        supervisor.join(child, kind)
        return Handle(followed if supervisor.policy.follow else PinnedTarget(followed, location), cls)

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
        controller = self._controller
        return controller.directory.new_supervisor(
            policy, controller.process.options.stop_grace, self._scope.errors.fail
        )

    async def _find_place(self, wish: Wish[Tenant], request: Request, constraints: Constraints, start: Start) -> Place:
        async def attempt(site: Site[NodeAgent], ranks: Sequence[int]) -> list[Place]:
            return [await self._start(Reserved(site, wish), start)]

        order = Order(request, self._sites(constraints, start.host), attempt, lambda site, ranks: None)
        [(_, place)] = await self._place(order, constraints.wait)
        return place

    async def _start(self, reserved: Reserved, start: Start) -> Place:
        site, wish = reserved
        placing: Ref[Place] = site.agent.place(wish, site.within, start.host, start.conditions, start.keep, start.epoch)
        try:
            return await placing
        except asyncio.CancelledError:
            if placing.done() and placing.exception() is None:
                # The place was found while the cancellation was on its way: only this code can free it.
                place = await placing
                await self._undo(self._controller.target(place.peer, place.actor, wish.label, self._scope.errors))
            else:
                taking = self._take_back(placing, site, wish, start.epoch)
                self._note_undoing(self._controller.process.tasks.create_task(taking, name=f"take back {wish.label}"))
            raise

    async def _take_back(self, placing: Ref[Place], site: Site[NodeAgent], wish: Wish[Tenant], epoch: int) -> None:
        """Free a place that was found while the cancellation was on its way to the node, if there is one."""
        # The node answers when a process that it was starting has ended.
        await placing.ready()
        with suppress(DaftError):
            for process in await site.agent.processes():
                if process.owner == wish.holder.owner and wish.label in process.actors:
                    actor = incarnation(wish.holder.number, epoch)
                    await self._controller.nodes.vacate(process.id, actor, WHY_STOPPED)

    def _sites(self, constraints: Constraints, host: PeerId | None) -> Sites[NodeAgent]:
        nodes = self._controller.nodes
        return (constraints.within or nodes) if host is None else FixedSites((nodes.site_of(host),))

    async def _place(self, order: Order[NodeAgent, T], wait: float | None) -> list[tuple[Site[NodeAgent], T]]:
        waiting = None if wait is None else Waiting(wait, self._over)
        try:
            return await self._controller.placing.place(order, waiting)
        except InsufficientResources:
            self._scope.check_open(f"{order.request.label} cannot be placed")
            raise

    async def reserve(
        self, request: Request, ranks: Sequence[int], constraints: Constraints, beside: Target | None
    ) -> list[Reserved]:
        """Reserve the shares of a gang: all of them or none.

        Args:
            constraints: The arguments of `on`.
            beside: The actor of which they share the process.

        Cancellation: nothing is reserved.
        """

        # Not before there is room for them: there may be any number.
        @cache
        def wish(index: int) -> Wish[Tenant]:
            return Wish(self._controller.new_tenant(), f"{request.label}[{ranks[index]}]", request.demand)

        async def attempt(site: Site[NodeAgent], indices: Sequence[int]) -> list[Wish[Tenant]]:
            found = [wish(index) for index in indices]
            await site.agent.reserve(found, site.within)
            return found

        host = None if beside is None else await self._controller.directory.host_of(beside)
        order = Order(request, self._sites(constraints, host), attempt, partial(_release, wish))
        return [Reserved(*placed) for placed in await self._place(order, constraints.wait)]

    def release(self, reserved: Iterable[Reserved]) -> None:
        """Give back the shares among these that no actor has. Idempotent."""
        for site, wish in reserved:
            _release([wish].__getitem__, site, [0])

    async def carve(self, request: Request, constraints: Constraints) -> list[tuple[Site[NodeAgent], tuple[int, ...]]]:
        """Reserve slices, which `stop_all` releases; returns them with the numbers of their GPUs.

        Cancellation: nothing is reserved.
        """
        wishes = [Wish(self._controller.new_tenant(), request.label, request.demand) for _ in range(request.count)]

        async def attempt(site: Site[NodeAgent], ranks: Sequence[int]) -> list[tuple[int, ...]]:
            return [await site.agent.carve(wishes[rank]) for rank in ranks]

        order = Order(request, self._sites(constraints, None), attempt, partial(_release, wishes.__getitem__))
        placed = await self._place(order, constraints.wait)
        self._slices = [Reserved(site, wish) for (site, _), wish in zip(placed, wishes, strict=True)]
        return [(site._replace(within=wish.holder), gpus) for (site, gpus), wish in zip(placed, wishes, strict=True)]

    async def _host(self, target: Target, spec: ChildSpec, *, again: bool = False) -> None:
        what = f"{spec.cls.__name__} cannot be spawned"
        try:
            self._scope.check_open(what)
            await spec.make(self._controller.peer.caller, target.remote, target.actor, again=again)
            self._scope.check_open(what)
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, CallCancelled | OutcomeUnknown):
                self._controller.process.note_failure("start", spec.label, error)
            await self._undo(target)
            if isinstance(error, SerializationError) and _lacks_code(error.__cause__):
                where = self._controller.nodes.name_of(target.remote)
                raise SpawnFailed(
                    f"{spec.label} cannot be made on {where}, which cannot load its class: {error.__cause__}. "
                    "Send the code with `await rt.ship(...)`, or install it there"
                ) from error
            raise

    async def _undo(self, target: Target) -> None:
        undoing = self._controller.start_task(self._vacate(target), f"take back {target.label}")
        self._note_undoing(undoing)
        with shield_from_anyio():
            await asyncio.wait([undoing])

    def _note_undoing(self, task: asyncio.Task[None]) -> None:
        self._undoing.add(task)
        task.add_done_callback(self._undoing.discard)

    # Ending.

    async def stop(self, targets: Sequence[Target], *, graceful: bool) -> None:
        """Stop actors: in this order, each within the grace time, or all at once. Idempotent."""
        await self._controller.ready()
        there = [target for target in targets if await self._is_there(target)]
        for target in there:
            target.stopped = True
        await self._end(there, graceful=graceful)

    async def _is_there(self, target: Target) -> bool:
        """Whether an actor can be ended; one that another process supervises is found first."""
        if isinstance(target, FollowingTarget) and target.owner != self._controller.process.id:
            try:
                target.move(await target.locate(wait=True))
            except ActorDied:
                # Its owner is gone.
                return False
            return target.ended is None
        return True

    async def kill(self, target: Target) -> None:
        controller = self._controller
        try:
            await controller.ready()
            if not await self._is_there(target):
                return
        except RuntimeClosed:
            # The end of the runtime is that of its actors.
            return
        child = controller.directory.retire(target)
        peer = target.remote if child is None else child.place.peer
        await controller.nodes.kill(peer, "killed by its owner")
        if child is not None:
            await child.settled()
        self._owned.pop(target.identity, None)

    async def kill_all(self) -> None:
        """End the processes of all actors; `stop_all` still has to free their places."""
        nodes, why = self._controller.nodes, "its scope was cancelled"
        await asyncio.gather(*(nodes.kill(target.remote, why) for target in self))

    def stop_waiting(self) -> None:
        self._over.set()

    async def stop_all(self, *, graceful: bool) -> None:
        """Take back the actors that are being made, then stop all others: the last one first, or all at once."""
        for limit in self._spawning:
            if limit.when() is None:
                limit.reschedule(self._controller.process.loop.time())
        while ending := [*self._spawning.values(), *self._undoing]:
            await asyncio.wait(ending)
        await self._end(list(self), graceful=graceful)
        self.release(self._slices)

    async def _end(self, targets: Sequence[Target], *, graceful: bool) -> None:
        controller = self._controller
        children = [child for target in targets if (child := controller.directory.retire(target)) is not None]
        await asyncio.gather(*(child.settled() for child in children))
        caller = controller.peer.caller
        if graceful:
            answers = await stop_in_turn(caller, targets, WHY_STOPPED, controller.process.options.stop_grace)
        else:
            answers = await asyncio.gather(*(stop_actor(caller, target, WHY_STOPPED, 0) for target in targets))
        await asyncio.gather(*map(self._vacate, targets, answers))

    async def _vacate(self, target: Target, answers: bool = True) -> None:
        self._owned.pop(target.identity, None)
        controller = self._controller
        with suppress(OutcomeUnknown, CoordinatorUnavailable, RuntimeClosed):
            # A coordinator that is gone finds out when it comes back.
            try:
                async with asyncio.timeout(controller.process.grace):
                    await controller.coordinator.release(*target.identity)
            except TimeoutError:
                controller.coordinator.release.tell(*target.identity)
        await controller.nodes.vacate(target.remote, target.actor, WHY_STOPPED, answers=answers)
        controller.placing.forget(controller.nodes.name_of(target.remote))
        controller.directory.close(target)


def _lacks_code(error: BaseException | None) -> bool:
    # An older version of a module may not have the class.
    return isinstance(error, ImportError) or (isinstance(error, AttributeError) and "module '" in str(error))


def _release(wish: Callable[[int], Wish[Tenant]], site: Site[NodeAgent], ranks: Sequence[int]) -> None:
    # The reservations of a lost node are gone with it.
    with suppress(DaftError):
        site.agent.release.tell([wish(rank).holder for rank in ranks])
