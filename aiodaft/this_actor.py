"""The actor whose code runs: its handle, and its background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiodaft._protocol.calls.outgoing import Location
from aiodaft._runtime.actors.host import start_background
from aiodaft._runtime.agent import acting
from aiodaft._runtime.calls.call import Caller, Target
from aiodaft._runtime.calls.following import Followers, PinnedTarget
from aiodaft.actor import Actor, Handle
from aiodaft.service import Service

__all__ = ["create_task", "current_actor"]

R = TypeVar("R")


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
    return start_background(hosted, coro, name or str(getattr(coro, "__qualname__", "task")))
