"""Scopes own actors and errors: leaving one closes its actors, and raises the errors that no code has seen."""

from __future__ import annotations

import asyncio
import gc
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, cast

from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft._protocol.unhandled import Unhandled
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.calls.following import FollowingTarget, PinnedTarget
from aiodaft._runtime.controller import Controller
from aiodaft._runtime.objects.ref_state import RefState
from aiodaft._runtime.platform.error_log import log_error
from aiodaft._runtime.platform.tasks import logger, see_through, shield_from_anyio
from aiodaft._runtime.scope_actors import Constraints, ScopeActors
from aiodaft._runtime.supervision.child_spec import ChildSpec
from aiodaft.actor import Actor, Handle, class_of, target_of
from aiodaft.exceptions import CallCancelled, OutcomeUnknown, RuntimeClosed
from aiodaft.group import Group
from aiodaft.info import ActorInfo, look_at
from aiodaft.placement import Spawner
from aiodaft.service import Service, ServiceGroup
from aiodaft.supervision import Restart

__all__ = ["Scope"]

T = TypeVar("T")


class Scope(Spawner):
    """An `async with` block that owns actors: `async with rt.scope() as s`.

    Leaving it stops its actors, the last one first; leaving it by an error cancels the calls under way. A scope is a
    nursery: an error that no code will see (of a call whose ref was dropped, or the death of an actor that no call
    was made to) cancels the body, as a failing task does in an `asyncio.TaskGroup`. When the block ends, such errors
    are raised in an ExceptionGroup, together with those that still wait in refs. A `Runtime` does not cancel its body.
    """

    def __init__(self, controller: Controller, parent: Scope | None = None, restart: Restart | None = None) -> None:
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
            # A forked child leaves the block as well: what it owns is the parent's.
            return
        cancelled = await self._uncancel(error)
        interrupted = await self._close(graceful=error is None and not self._cancelled_task)
        if (group := self._errors_after(error)) is not None:
            raise group from None
        if error is None and interrupted is not None and not cancelled:
            raise interrupted

    def _errors_after(self, error: BaseException | None) -> BaseExceptionGroup[BaseException] | None:
        """What the block raises in place of the error of its body; None if that goes on as it is."""
        for state in self._unseen():
            assert state.error is not None
            self._unhandled.add(state.error)
        return self._unhandled.group(None if isinstance(error, asyncio.CancelledError) else error)

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
        if self._controller.is_closed:
            # It was closed with everything in it.
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
            # Unless the runtime was closed meanwhile, which ends all its tasks.
            closing.result()
        if self._parent is not None:
            self._parent._children.remove(self)
        return interrupted

    async def _close_all(self, *, graceful: bool) -> None:
        for child in reversed(self._children):
            child._closing = True
            await child._close_all(graceful=graceful)
        await self._scope_actors.stop_all(graceful=graceful)

    def _unseen(self) -> list[RefState]:
        """The refs that still hold an error which no code has seen; asked once, at the end."""
        if self._held and not self._controller.is_closed:
            # An error that was raised knows frames, and these know refs. Only the collector drops such a circle.
            gc.collect()
            self._controller.objects.drop_now()
        # Other threads may look at errors too.
        unseen = [state for state in list(self._held) if not state.seen]
        self._held = {}
        for state in unseen:
            state.seen = True
        return unseen

    def __dir__(self) -> list[str]:
        return [
            "group", "host", "host_group", "info", "kill", "on", "rebind", "scope", "spawn", "stop", "stop_group",
        ]  # fmt: skip

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} stays in the process that opened it: pass handles of actors")

    # Where errors of its actors' refs go.

    def fail(self, error: BaseException, what: str) -> None:
        """An error that no code will see: end the body, and raise it from there."""
        if not self._comes_of_closing(error):
            self._unhandled.add(error)
            self._stop_body(error, what)

    def _stop_body(self, error: BaseException, what: str) -> None:
        if self._task is None:
            # It was opened without a block.
            log_error(what, error)
        elif not self._closing and not self._cancelled_task:
            self._cancelled_task = True
            self._task.cancel()

    def hold(self, state: RefState) -> None:
        """An error that waits in a ref."""
        if not self._comes_of_closing(state.error):
            self._held[state] = None

    def settle(self, state: RefState) -> None:
        """Code has seen it."""
        self._held.pop(state, None)

    def _comes_of_closing(self, error: BaseException | None) -> bool:
        """Whether an error is what closing a scope does to the calls under way, and no news."""
        return self._closing and isinstance(error, OutcomeUnknown | RuntimeClosed | CallCancelled)

    # Spawning.

    def scope(self, *, restart: Restart | None = None) -> Scope:
        """A scope inside this one: `async with rt.scope() as s`.

        Args:
            restart: What happens when an actor dies that was spawned in this scope itself (not in one inside it):
                all those are siblings. It goes before the policy of the class line, and after that of `on`.

        Raises:
            TypeError: That is no policy.
        """
        if restart is not None and not isinstance(restart, Restart):
            raise TypeError(f"restart={restart!r:.80} is no aiodaft.Restart")
        self.check_open("a scope cannot be opened")
        child = Scope(self._controller, self, restart)
        self._children.append(child)
        return child

    def _owner_of(self, remote: PeerId, actor: ActorId) -> Scope | None:
        if (remote, actor) in self._scope_actors:
            return self
        found = (child._owner_of(remote, actor) for child in self._children)
        return next((scope for scope in found if scope is not None), None)

    def check_open(self, what: str) -> None:
        """Raise RuntimeClosed unless the scope is open."""
        if self._closing:
            raise RuntimeClosed(f"{what}: its scope is closed")
        self._controller.check_running(what)

    def _spawning(self) -> tuple[Scope, Constraints]:
        return self, Constraints()

    async def spawn_one(
        self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], constraints: Constraints, label: str = ""
    ) -> Handle:
        """Make an actor (what `spawn` does when awaited)."""
        what = f"{cls.__name__} cannot be spawned"
        self.check_open(what)
        node = self._controller.options.node_name
        if constraints.node not in (None, node):
            raise ValueError(f"{what}: there is no node {constraints.node!r}; this runtime has {node!r}")
        beside = None if constraints.beside is None else self._target(constraints.beside)
        label = label or self._controller.new_label(cls)
        spec = ChildSpec(cls, label, args, kwargs, constraints.max_queue_with(cls))
        return await self._scope_actors.make(spec, constraints, beside)

    async def spawn_group(
        self, n: int, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], constraints: Constraints
    ) -> Group[Any]:
        """Make a group of actors, or of services (what `group` and `host_group` do when awaited)."""

        async def grow(first: int, count: int) -> list[Any]:
            base = self._controller.new_label(cls)
            made: dict[int, Handle] = {}

            async def make(rank: int) -> None:
                made[rank] = await self.spawn_one(cls, args, kwargs, constraints, f"{base}[{rank}]")

            ranks = range(first, first + count)
            try:
                # Waits for all, also if one fails or all are cancelled: each takes back what it has begun.
                results = await asyncio.gather(*map(make, ranks), return_exceptions=True)
                for error in filter(None, results):
                    raise error
            except BaseException:
                await self._stop_handles([made[rank] for rank in ranks if rank in made])
                raise
            return [made[rank] for rank in ranks]

        kind = Group if issubclass(cls, Actor) else ServiceGroup
        return kind(await grow(0, n), cls, grow, self._stop_handles)

    # Stopping.

    async def stop(self, actor: object) -> None:
        """Stop an actor: it takes no more calls, ends those it has within the grace time, and is left. Idempotent.

        Cancellation: the actor is killed; it is gone when this raises.
        """
        await self._stop_handles([actor])

    async def kill(self, actor: object) -> None:
        """End an actor's process at once, with every actor in it. Calls under way fail with ActorDied. Idempotent.

        Cancellation: raised when the process has ended.
        """
        target = self._target(actor)
        await see_through(self._controller.start_task(self._scope_actors.kill(target), f"kill {target.label}"))

    async def stop_group(self, group: Group[Any]) -> None:
        """Stop every member of a group, the last rank first.

        Cancellation: the members that are left are killed; all are gone when this raises.
        """
        await self._stop_handles(list(group))

    async def _stop_handles(self, handles: list[Any]) -> None:
        """Stop actors, the last one first. Cancellation: see `stop_group`."""
        targets = [self._target(handle) for handle in reversed(handles)]

        def kill() -> None:
            # A runtime that was closed meanwhile has ended them all.
            for target in targets if not self._controller.is_closed else ():
                self._controller.process.tasks.create_task(self._scope_actors.kill(target), name=f"kill {target.label}")

        what = ", ".join(target.label for target in targets)
        await see_through(self._controller.start_task(self._scope_actors.stop(targets), f"stop {what}"), kill)

    # Looking.

    async def info(self, actor: object) -> ActorInfo:
        """How an actor is doing; also of one that does not answer, from what its node knows."""
        return await look_at(self._controller, self._target(actor), class_of(handle_of(actor)))

    async def rebind(self, actor: T) -> T:
        """A handle of the actor's incarnation that is there now, or comes next; the same one if it follows by itself.

        Raises:
            ActorDied: The actor is gone for good.
        """
        handle, target = handle_of(actor), self._target(actor)
        if not isinstance(target, FollowingTarget):
            return actor
        address = await self._controller.directory.address(target.number)
        if address is target_of(handle):
            return actor
        new = Handle(address, class_of(handle))
        return cast("T", Service(new, class_of(handle)) if isinstance(actor, Service) else new)

    def _target(self, actor: object) -> Target:
        """Where an actor is, whatever incarnation of it the handle leads to."""
        target = cast("Target", target_of(handle_of(actor)))
        if target.caller.process is not self._controller.process:
            raise ValueError(f"{target.label} belongs to another runtime, that of {target.caller.process.runtime_name}")
        return target.followed if isinstance(target, PinnedTarget) else target


def handle_of(actor: object) -> object:
    """The handle of an actor or a service."""
    return actor.handle if isinstance(actor, Service) else actor
