"""Scopes own actors and errors: leaving one closes its actors, and raises what nobody looked at."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

from aiodaft._protocol.ids import AGENT, ActorId, PeerId
from aiodaft._runtime.agent import Agent, host_spec
from aiodaft._runtime.calls import Target
from aiodaft._runtime.tasks import logger, shield_from_anyio
from aiodaft.actor import Handle, class_of, target_of
from aiodaft.exceptions import CallCancelled, DaftError, OutcomeUnknown, RuntimeClosed, SerializationError, SpawnFailed
from aiodaft.group import Group
from aiodaft.info import ActorInfo, look_at
from aiodaft.placement import Constraints, Spawner
from aiodaft.ref import Ref
from aiodaft.service import Service

if TYPE_CHECKING:
    from aiodaft._runtime.node import Place
    from aiodaft._runtime.refs import RefState
    from aiodaft.runtime import Runtime

__all__ = ["ActorInfo", "Scope"]


class Scope(Spawner):
    """An `async with` block that owns actors.

    Leaving it stops them, the last one first. Leaving it by an error, or because a ref that nobody holds has failed,
    cancels what runs. Errors of refs that nobody looked at are raised as an ExceptionGroup when it ends.
    """

    def __init__(self, runtime: Runtime, parent: Scope | None = None) -> None:
        self._runtime = runtime
        self._parent = parent
        self._owned: dict[tuple[PeerId, ActorId], Target] = {}
        # Actors that are being made, by the call that makes them.
        self._making: dict[Ref[Any], Target] = {}
        self._children: list[Scope] = []
        self._errors: list[BaseException] = []
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
        cancelled = await self._uncancel(error)
        interrupted = await self._close(graceful=error is None and not self._errors)
        errors = self._collect()
        if error is not None and not isinstance(error, asyncio.CancelledError):
            # The body's own error goes on as it is, unless others have to be told as well.
            errors = [other for other in errors if other is not error]
            if errors:
                raise BaseExceptionGroup("errors in a scope", [error, *errors]) from None
            return
        if errors:
            raise BaseExceptionGroup("errors in a scope", errors) from None
        if interrupted is not None and not cancelled:
            raise interrupted

    async def _uncancel(self, error: BaseException | None) -> bool:
        """Take back the cancellation with which `fail` ended the body; True if that was all there was."""
        if not self._cancelled_task:
            return False
        if not isinstance(error, asyncio.CancelledError):
            # The body ended before the cancellation reached it: it arrives here, and is ours.
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                logger.debug("the scope's own cancellation arrived after its body")
        task = self._task
        return task is None or task.uncancel() == 0

    async def _close(self, *, graceful: bool) -> asyncio.CancelledError | None:
        """Close everything, whatever happens to the task meanwhile; returns a cancellation that came in between."""
        self._closing = True
        closing = self._runtime.start_task(self._close_all(graceful=graceful), "close a scope")
        interrupted: asyncio.CancelledError | None = None
        with shield_from_anyio():
            while not closing.done():
                try:
                    await asyncio.wait([closing])
                except asyncio.CancelledError as cancelled:
                    if interrupted is None:
                        self._runtime.peer.tasks.create_task(self._kill_all(), name="kill the actors of a scope")
                    interrupted = cancelled
        closing.result()
        if self._parent is not None:
            self._parent._children.remove(self)
        return interrupted

    async def _close_all(self, *, graceful: bool) -> None:
        for child in reversed(self._children):
            child._closing = True
            await child._close_all(graceful=graceful)
        await self._stop_making()
        targets = list(reversed(self._owned.values()))
        if graceful:
            for target in targets:
                await self._stop_actor(target, self._runtime.stop_grace)
        else:
            await asyncio.gather(*(self._stop_actor(target, 0) for target in targets))
        await asyncio.gather(*(self._vacate(target) for target in targets))

    async def _stop_making(self) -> None:
        making = dict(self._making)
        for ref in making:
            ref.cancel()
        await asyncio.gather(*(ref.ready() for ref in making))
        await asyncio.gather(*(self._vacate(target) for target in making.values()))

    async def _kill_all(self) -> None:
        """The closing itself was cancelled: no more grace."""
        node = self._runtime.node
        await asyncio.gather(
            *(node.kill(target.remote, "its scope was cancelled").ready() for target in self._owned.values())
        )

    def _collect(self) -> list[BaseException]:
        errors = self._errors
        for state in self._held:
            if state.error is not None and not state.seen:
                state.seen = True
                errors.append(state.error)
        self._errors, self._held = [], {}
        return errors

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} stays in the process that opened it: pass handles of actors")

    # Where errors of its actors' refs go.

    def fail(self, error: BaseException) -> None:
        """An error that nobody holds: end the body, and raise it from there."""
        if self._closing and isinstance(error, OutcomeUnknown | RuntimeClosed | CallCancelled):
            # What the closing itself does to calls under way is no news.
            return
        if any(error is other for other in self._errors):
            return
        self._errors.append(error)
        if self._task is None:
            logger.error("a ref that nobody holds failed", exc_info=error)
        elif not self._closing and not self._cancelled_task:
            self._cancelled_task = True
            self._task.cancel()

    def hold(self, state: RefState) -> None:
        """An error that waits in a ref."""
        if not (self._closing and isinstance(state.error, OutcomeUnknown | RuntimeClosed | CallCancelled)):
            self._held[state] = None

    def settle(self, state: RefState) -> None:
        """Somebody looked at it."""
        self._held.pop(state, None)

    # Spawning.

    def scope(self) -> Scope:
        """A scope inside this one: `async with rt.scope() as s`."""
        self.check_open("a scope cannot be opened")
        child = Scope(self._runtime, self)
        self._children.append(child)
        return child

    def detach(self) -> None:
        """Belong to no task: an error that nobody holds is logged, and raised when the scope is closed."""
        self._task = None

    def _owner_of(self, remote: PeerId, actor: ActorId) -> Scope | None:
        if (remote, actor) in self._owned:
            return self
        found = (child._owner_of(remote, actor) for child in self._children)
        return next((scope for scope in found if scope is not None), None)

    def check_open(self, what: str) -> None:
        """Raise RuntimeClosed unless the scope is open."""
        if self._closing:
            raise RuntimeClosed(f"{what}: its scope is closed")
        self._runtime.check_running(what)

    def _spawning(self) -> tuple[Scope, Constraints]:
        return self, Constraints()

    async def spawn_one(
        self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], constraints: Constraints, label: str = ""
    ) -> Handle:
        """Make an actor (what `spawn` does when awaited)."""
        what = f"{cls.__name__} cannot be spawned"
        self.check_open(what)
        label = label or self._runtime.new_label(cls)
        target = await self._place(cls, constraints, label)
        agent = Target(target.peer, target.remote, AGENT, f"agent of {target.remote}", None)
        try:
            self.check_open(what)
            making = agent.call(host_spec(cls), (target.actor, label, cls, *args), kwargs)
            self._making[making] = target
            try:
                await making
            finally:
                del self._making[making]
            self.check_open(what)
        except BaseException as error:
            with shield_from_anyio():
                await self._undo(target)
            if isinstance(error, CallCancelled):
                self.check_open(what)
            if isinstance(error, SerializationError) and isinstance(error.__cause__, ImportError):
                raise SpawnFailed(f"{label} cannot be made: its process cannot load what it needs: {error}") from error
            raise
        self._owned[target.remote, target.actor] = target
        return Handle(target, cls)

    async def _place(self, cls: type, constraints: Constraints, label: str) -> Target:
        """Find room for an actor, and a process."""
        runtime = self._runtime
        if constraints.node not in (None, runtime.node_name):
            raise ValueError(
                f"{cls.__name__} cannot be spawned: there is no node {constraints.node!r}; "
                f"this runtime has {runtime.node_name!r}"
            )
        beside = None if constraints.beside is None else self._process_of(constraints.beside)
        placing: Ref[Place] = runtime.node.place(label, constraints.demand(cls), beside, constraints.patience_with(cls))
        try:
            place = await placing
        except asyncio.CancelledError:
            if placing.done() and placing.exception() is None:
                # The place was found in the very moment of the cancellation: nobody else knows of it.
                place = await placing
                with shield_from_anyio():
                    await self._undo(Target(runtime.peer, place.peer, place.actor, label, self))
            raise
        return Target(runtime.peer, place.peer, place.actor, label, self)

    async def _undo(self, target: Target) -> None:
        undoing = self._runtime.start_task(self._vacate(target), f"take back {target.label}")
        await asyncio.wait([undoing])

    async def spawn_group(
        self, n: int, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], constraints: Constraints
    ) -> Group[Any]:
        """Make a group (what `group` does when awaited)."""

        async def grow(first: int, count: int) -> list[Any]:
            base = self._runtime.new_label(cls)
            labels = [f"{base}[{rank}]" for rank in range(first, first + count)]
            makers = [self.spawn_one(cls, args, kwargs, constraints, label) for label in labels]
            made = await asyncio.gather(*makers, return_exceptions=True)
            errors = [error for error in made if isinstance(error, BaseException)]
            if errors:
                await self._stop_handles([handle for handle in made if isinstance(handle, Handle)])
                raise errors[0]
            return made

        return Group(await grow(0, n), cls, grow, self._stop_handles)

    # Stopping.

    async def stop(self, actor: object) -> None:
        """Stop an actor: it takes no more calls, ends those it has within the grace time, and is left. Idempotent.

        Cancellation: the actor is killed.
        """
        target = self._target(actor)
        stopping = self._runtime.start_task(self._stop_and_vacate(target), f"stop {target.label}")
        with shield_from_anyio():
            try:
                await asyncio.wait([stopping])
            except asyncio.CancelledError:
                await self.kill(actor)
                raise
        stopping.result()

    async def kill(self, actor: object) -> None:
        """End an actor's process at once, with every actor in it. Calls under way fail with ActorDied. Idempotent."""
        target = self._target(actor)
        await self._runtime.node.kill(target.remote, "killed by its owner")
        self._owned.pop((target.remote, target.actor), None)

    async def stop_group(self, group: Group[Any]) -> None:
        """Stop every member of a group, the last rank first."""
        await self._stop_handles(list(group))

    async def _stop_handles(self, handles: list[Any]) -> None:
        for handle in reversed(handles):
            await self.stop(handle)

    async def _stop_and_vacate(self, target: Target) -> None:
        await self._stop_actor(target, self._runtime.stop_grace)
        await self._vacate(target)

    async def _stop_actor(self, target: Target, grace: float) -> None:
        # A process that does not answer (it is frozen, or C code holds its interpreter) is ended all the same.
        patience = grace + 2 * self._runtime.cancel_grace + 1.0
        try:
            async with asyncio.timeout(patience):
                await self._agent(target.remote).stop(target.actor, "stopped by its owner", grace)
        except (DaftError, TimeoutError) as error:
            logger.debug("%s was gone before it was stopped: %s", target.label, error)

    async def _vacate(self, target: Target) -> None:
        self._owned.pop((target.remote, target.actor), None)
        runtime = self._runtime
        await runtime.coordinator.release(target.remote, target.actor)
        await runtime.node.vacate(target.remote, target.actor, "stopped by its owner")

    # Looking.

    async def info(self, actor: object) -> ActorInfo:
        """How an actor is doing; also of one that does not answer, from what its node knows."""
        target, runtime = self._target(actor), self._runtime
        names = await runtime.coordinator.names_of(target.remote, target.actor)
        return await look_at(target, class_of(handle_of(actor)), names, runtime.node_name)

    def _agent(self, remote: PeerId) -> Agent:
        return self._runtime.peer.agent_of(remote)

    def _target(self, actor: object) -> Target:
        target = cast("Target", target_of(handle_of(actor)))
        if target.peer is not self._runtime.peer:
            raise ValueError(f"{target.label} belongs to another runtime")
        return target

    def _process_of(self, actor: object) -> PeerId:
        return self._target(actor).remote


def handle_of(actor: object) -> object:
    """The handle of an actor or a service."""
    return actor.handle if isinstance(actor, Service) else actor
