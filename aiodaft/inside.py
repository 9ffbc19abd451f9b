"""The runtime of the code that asks for it: that of the program, or that of an actor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NoReturn, TypeVar

from aiodaft._protocol.calls.following import Location
from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft._runtime.actors import background
from aiodaft._runtime.actors.enlisted import Enlisted
from aiodaft._runtime.actors.hosted_actor import HostedActor
from aiodaft._runtime.agent import acting
from aiodaft._runtime.calls.call import Caller, Target
from aiodaft._runtime.calls.following import Followers, PinnedTarget
from aiodaft._runtime.owning import Owner, WorkerOwner
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.process import Process, current_process
from aiodaft._runtime.scope_errors import ScopeErrors
from aiodaft.actor import Actor, Handle
from aiodaft.exceptions import OutcomeUnknown
from aiodaft.member import CurrentGroup
from aiodaft.owned import Owned
from aiodaft.runtime import Runtime
from aiodaft.scope import Scope
from aiodaft.service import Service

__all__ = ["create_task", "current_actor", "current_group", "current_runtime"]

R = TypeVar("R")


def current_runtime() -> Runtime:
    """The runtime of the code that calls this.

    In a program, it is the one that the program has opened. In an `async def` method of an actor, it is the runtime of
    the actor: what it spawns there ends with it, and with its process. Errors there that no code sees go to the scope
    that owns the actor. It is open as long as the actor lives: use it without `async with`.

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


def current_actor() -> Any:
    """The handle of the actor whose code calls this, to give to others: `me: Parent = aiodaft.current_actor()`.

    It is as the handle that spawning the actor gave: calls go through its mailbox, also its own; it follows restarts if
    that one does; it does not keep the actor. In an instance of a hosted class it is the `Service`. For methods of any
    kind, in `def` methods, too.

    Raises:
        RuntimeError: No code of an actor runs here, or the actor is being made and takes no calls yet.
    """
    hosted = acting()
    if hosted is None or hosted.birth is None:
        raise RuntimeError("current_actor() is for the code of actors: none runs here")
    process, (cls, owner, follow) = hosted._process, hosted.birth
    caller = process.part(Caller)
    if hosted.id not in caller.actors:
        raise RuntimeError(f"{hosted.name} is being made, and takes no calls yet: ask for its handle in a method")
    target: Target
    if follow is None:
        target = Target(caller, process.id, hosted.id, hosted.name, None)
    else:
        place = Location(process.id, hosted.id)
        followed = process.part(Followers).get(owner, place, hosted.name)
        target = followed if follow else PinnedTarget(followed, place)
    handle = Handle(target, cls)
    return handle if issubclass(cls, Actor) else Service(handle, cls)


def create_task(coro: Coroutine[Any, Any, R], *, name: str | None = None) -> asyncio.Task[R]:
    """Start a background task of the actor whose code calls this, for instance in `__aenter__`.

    Its error is the actor's: if it raises, the process of the actor ends, with the traceback in its output. Calls fail
    with `ActorDied`, and a supervised actor is restarted. (The error of a task of `asyncio.create_task` is seen by
    no code.) The runtime holds the task, and cancels it when the actor has been stopped and `__aexit__` has run.

    Args:
        coro: The coroutine to run.
        name: The name of the task. Default: that of the coroutine.

    Raises:
        RuntimeError: This is a thread, or no code of an actor runs here.

    Cancellation: `task.cancel()` ends the task, which is no error of the actor.
    """
    hosted = acting()
    if hosted is None or not hosted._process.is_here:
        coro.close()
        where = "no code of an actor runs here" if hosted is None else "this is a thread: use it in `async def` methods"
        raise RuntimeError(f"aiodaft.create_task() starts a background task of an actor: {where}")
    return background.start(hosted, coro, name or str(getattr(coro, "__qualname__", "task")))


def current_group() -> CurrentGroup[Any]:
    """The group that the actor whose code calls this is a member of: its rank, its axes and the other members.

    For methods of any kind, the constructor, `__aenter__`, `__aexit__` and `on_restart`, in `def` methods, too. A
    restarted member has the rank that it had.

    Raises:
        RuntimeError: No code of an actor runs here, or the actor is no member of a group.
    """
    hosted = acting()
    if hosted is None:
        raise RuntimeError("current_group() is for methods of the members of a group: no code of an actor runs here")
    standing = hosted._process.part(Enlisted).find(hosted.id)
    if standing is None:
        raise RuntimeError(f"{hosted.name} is no member of a group: make it by `rt.group(n, Class, ...)`")
    return CurrentGroup(standing)


class ActorRuntime(Runtime):
    """The runtime of an actor."""

    def __init__(self, owner: Owner) -> None:
        Scope.__init__(self, Owned(owner, _ActorErrors(owner)))

    async def __aenter__(self) -> NoReturn:
        raise RuntimeError("the runtime of an actor is open as long as the actor lives: use it without `async with`")

    async def aclose(self) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError("the runtime of an actor ends with the actor")


class _ActorErrors(ScopeErrors):
    """Errors of the actors that an actor has spawned are told to the owner of that actor."""

    def fail(self, error: BaseException, what: str) -> None:
        if not self.comes_of_closing(error):
            self._controller.objects.on_unheld(error, what)


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
            hosted.stop_spawned = partial(_leave, runtime._owned)
        return runtime

    # What the owner tells.

    def fail(self, error: BaseException, what: str) -> None:
        """An error that no code will see."""
        self._owner.objects.on_unheld(error, what)

    def actor_died(self, remote: PeerId, actor: ActorId, error: OutcomeUnknown) -> None:
        """An actor died while no call to it was under way."""
        for runtime in self._runtimes.values():
            runtime._owned.actor_died(remote, actor, error)

    def node_gone(self, name: str, error: OutcomeUnknown, idle: Callable[[PeerId], bool]) -> None:
        """A node is gone; see `Owned.node_gone`."""
        for runtime in self._runtimes.values():
            runtime._owned.node_gone(name, error, idle)


async def _leave(owned: Owned) -> None:
    """Stop what an actor has spawned."""
    interrupted = await owned.close(graceful=True)
    for what, one in owned.errors.unseen():
        owned.controller.objects.on_unheld(one, what)
    if interrupted is not None:
        raise interrupted
