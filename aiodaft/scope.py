"""Scopes own actors and errors: the end of a scope stops its actors, and raises the errors that no code has seen."""

from __future__ import annotations

from types import TracebackType
from typing import Any, NoReturn, Self

from aiodaft._protocol.numbers import count
from aiodaft._protocol.supervision import Restart
from aiodaft._runtime.owning import ScopeErrors
from aiodaft._runtime.placing import Constraints
from aiodaft._runtime.platform.tasks import see_through
from aiodaft._runtime.scope_actors import ScopeActors
from aiodaft.actor import Actor, ActorFacts, class_of, handle_of
from aiodaft.group import Group
from aiodaft.html import page, table
from aiodaft.overview import ActorInfo, look_at
from aiodaft.placement import Mesh, Spawner
from aiodaft.service import Service

__all__ = ["Scope"]


class Scope(Spawner):
    """An `async with` block that owns actors: `async with rt.scope() as s`.

    The end of the block stops its actors, the last one first; if it ends by an error, calls under way are cancelled. As
    in an `asyncio.TaskGroup`, an error that no code will see (of a call with a dropped ref, or of an actor that died
    while no call was under way) cancels the body. When the block ends, it raises such errors and the unseen errors of
    refs in an ExceptionGroup. A `Runtime` does not cancel its body.
    """

    def __init__(self, actors: ScopeActors) -> None:
        self._actors = actors
        self._controller = actors.owner

    async def __aenter__(self) -> Self:
        self._actors.errors.begin()
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._controller.is_left_behind:
            # A forked child leaves the block too, but the parent owns the actors.
            return
        errors = self._actors.errors
        cancelled = await errors.uncancel(error)
        interrupted = await self._actors.close(graceful=error is None and not errors.has_cancelled)
        if (group := errors.after(error)) is not None:
            raise group from None
        if error is None and interrupted is not None and not cancelled:
            raise interrupted

    def __repr__(self) -> str:
        return f"<Scope with {count(len(self._actors), 'actor')}>"

    def _repr_html_(self) -> str:
        actors = [target.facts() for target in self._actors.all_actors()]
        rows = [(*actor, self._controller.nodes.name_of(actor.process) if actor.process else "") for actor in actors]
        return page(repr(self).strip("<>"), table([*ActorFacts._fields, "node"], rows))

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} stays in the process that opened it: pass handles of actors")

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
        self._actors.check_open("a scope cannot be opened")
        return Scope(ScopeActors(self._controller, ScopeErrors(self._controller), self._actors, restart))

    def _spawning(self) -> tuple[ScopeActors, Constraints]:
        return self._actors, Constraints()

    async def stop(self, what: Actor | Service[Any] | Group[Any] | Mesh) -> None:
        """Stop an actor, the members of a group, or the actors on a mesh, whose slices are free then. Idempotent.

        An actor that is stopped refuses new calls, gives the others `stop_grace`, then its process ends. Of a group or
        a mesh, the last actor is stopped first.

        Raises:
            TypeError: It is none of these.
            ValueError: It belongs to another runtime.

        Cancellation: the actors that are left are killed, and are gone when this raises.
        """
        if isinstance(what, Mesh):
            await what._stop(self._controller)
        else:
            await self._actors.stop_handles(list(what) if isinstance(what, Group) else [what])

    async def kill(self, actor: Actor | Service[Any]) -> None:
        """Kill an actor's process, with every actor in it. Calls under way fail with ActorDied. Idempotent.

        Cancellation: raised when the process has ended.
        """
        target = self._actors.target(actor)
        await see_through(self._controller.start_task(self._actors.kill(target), f"kill {target.label}"))

    async def info(self, actor: Actor | Service[Any]) -> ActorInfo:
        """The state of an actor. If its process does not answer, the result has its node's record of it."""
        return await look_at(self._controller, self._actors.target(actor), class_of(handle_of(actor)))
