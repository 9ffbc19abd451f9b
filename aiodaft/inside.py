"""The runtime of the code that asks for it: that of the program, or that of an actor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import NoReturn

from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft._runtime.actors.hosted_actor import HostedActor
from aiodaft._runtime.agent import acting
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.owning import Owner, ScopeErrors, WorkerOwner
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.process import Process, current_process
from aiodaft._runtime.scope_actors import ScopeActors
from aiodaft.exceptions import OutcomeUnknown
from aiodaft.runtime import Runtime
from aiodaft.scope import Scope

__all__ = ["current_runtime"]


def current_runtime() -> Runtime:
    """The runtime of the code that calls this.

    In a program, it is the one that the program has opened. In an `async def` method of an actor, it is the runtime of
    the actor: actors that are spawned there end with it, and with its process. Errors there that no code sees go to the
    scope that owns the actor. It is open as long as the actor lives: use it without `async with`.

    Raises:
        RuntimeClosed: No runtime is open, or several are and none surrounds the caller.
        RuntimeError: This is a thread, or no method of an actor runs here.
    """
    process = current_process()
    if not process.is_here:
        raise RuntimeError(
            "current_runtime() is for the event loop, and this is a thread, as in a `def` method or a constructor: use "
            "it in an `async def` method, or in `async def __aenter__(self)`, which runs before the first call"
        )
    program = process.find(Runtime)
    if program is not None:
        return program
    hosted = acting()
    if hosted is None:
        raise RuntimeError("current_runtime() is for methods of actors: none runs here")
    runtimes = process.find(ActorRuntimes)
    if runtimes is None:
        runtimes = ActorRuntimes(process, hosted.id)
        process.provide(ActorRuntimes, runtimes)
    return runtimes.of(hosted)


class ActorRuntime(Runtime):
    """The runtime of an actor."""

    def __init__(self, owner: Owner) -> None:
        Scope.__init__(self, ScopeActors(owner, _ActorErrors(owner)))

    async def __aenter__(self) -> NoReturn:
        raise RuntimeError("the runtime of an actor is open as long as the actor lives: use it without `async with`")

    async def aclose(self) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError("the runtime of an actor ends with the actor")


class _ActorErrors(ScopeErrors):
    """Errors of the actors that an actor has spawned are told to the owner of that actor."""

    def fail(self, error: BaseException, what: str) -> None:
        if not self.comes_of_closing(error):
            self._owner.objects.on_unheld(error, what)


class ActorRuntimes:
    """The runtimes of the actors of one process."""

    def __init__(self, process: Process, actor: ActorId) -> None:
        self._owner = WorkerOwner(process.part(Peer), self, actor)
        self._runtimes: dict[HostedActor, ActorRuntime] = {}

    def of(self, hosted: HostedActor) -> ActorRuntime:
        """The runtime of an actor, open or not."""
        runtime = self._runtimes.get(hosted)
        if runtime is None:
            runtime = self._runtimes[hosted] = ActorRuntime(self._owner)
            hosted.stop_spawned = partial(_leave, runtime._actors)
        return runtime

    def all_actors(self) -> Iterator[Target]:
        """The actors that the actors of this process have spawned."""
        return chain.from_iterable(runtime._actors.all_actors() for runtime in self._runtimes.values())

    def fail(self, error: BaseException, what: str) -> None:
        """An error that no code will see."""
        self._owner.objects.on_unheld(error, what)

    def actor_died(self, remote: PeerId, actor: ActorId, error: OutcomeUnknown) -> None:
        """An actor died while no call to it was under way."""
        for runtime in self._runtimes.values():
            runtime._actors.actor_died(remote, actor, error)

    def node_gone(self, name: str, error: OutcomeUnknown, idle: Callable[[PeerId], bool]) -> None:
        """A node is gone; see `ScopeActors.node_gone`."""
        for runtime in self._runtimes.values():
            runtime._actors.node_gone(name, error, idle)


async def _leave(actors: ScopeActors) -> None:
    interrupted = await actors.close(graceful=True)
    for what, one in actors.errors.unseen():
        actors.owner.objects.on_unheld(one, what)
    if interrupted is not None:
        raise interrupted
