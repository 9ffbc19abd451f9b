"""The actors of this process, their background tasks, and the lease of those that have names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar

from aiodaft._protocol.ids import ActorId
from aiodaft._protocol.numbers import Latest
from aiodaft._runtime.actors.hosted_actor import HostedActor, InboundCall, Shared
from aiodaft._runtime.connections.ring_poller import RingPoller
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.platform.error_log import log_error, text_of
from aiodaft._runtime.process import Process
from aiodaft.exceptions import LeaseLost
from aiodaft.methods import MethodSpec

# The number of stopped actors that a process remembers by name.
_REMEMBERED: Final = 1024


class Host(Shared):
    """The hosted actors of one process, and the objects that they share."""

    def __init__(self, process: Process, store: Store, ring_poller: RingPoller) -> None:
        super().__init__(process, store, ring_poller)
        self.actors: dict[ActorId, HostedActor] = {}
        # The names of the actors that were stopped last, and whether they have moved to other processes.
        self.stopped = Latest[ActorId, tuple[str, bool]](_REMEMBERED)

    def calls(self) -> list[InboundCall]:
        actors = list(self.actors.values())
        return [call for hosted in actors for call in (*hosted.under_way(), *hosted.mailbox.waiting())]

    def add(self, hosted: HostedActor) -> None:
        self.actors[hosted.id] = hosted

    def remove(self, hosted: HostedActor) -> None:
        self.actors.pop(hosted.id, None)
        self.stopped[hosted.id] = hosted.name, hosted.moves

    async def aclose(self, reason: str) -> None:
        for hosted in list(self.actors.values()):
            await hosted.stop(reason, 0)
        self.starter.close()


# Keeps actors with names from serving when the lease of their node may be over, and others may have the names.
#
# The node tells its workers until when it has the lease; the clock of the machine, which they share, does the rest,
# also where the node itself was stopped. Calls of actors without names cost nothing more, those of the others one look
# at the clock.


class Fence:
    """The lease, as one worker knows it.

    Args:
        catch_up: Reads the messages that the node has sent so far: a process that was busy may have news that it has
            not read.
    """

    def __init__(self, process: Process, catch_up: Callable[[], object]) -> None:
        self._now = process.env.monotonic
        self._catch_up = catch_up
        self._until = 0.0
        self._guarded: set[ActorId] = set()

    def prolong(self, until: float) -> None:
        self._until = max(self._until, until)

    def guard(self, hosted: HostedActor) -> None:
        """Have an actor, which has a name, refuse calls that come without a lease. Idempotent."""
        if hosted.id in self._guarded:
            return
        self._guarded.add(hosted.id)
        find = hosted.find_spec

        def find_in_time(method: str) -> MethodSpec | None:
            if self._now() >= self._until:
                self._catch_up()
                if self._now() >= self._until:
                    hosted.refusal = LeaseLost(
                        f"{hosted.where} has a name and serves only while its node has a lease: the node has not heard "
                        "from the coordinator for so long that another actor may have the name"
                    )
                    return None
            hosted.refusal = None
            return find(method)

        hosted.find_spec = find_in_time


T = TypeVar("T")


def start_background(hosted: HostedActor, coro: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    task = hosted._process.tasks.start(coro, name=name)
    hosted.background.add(task)
    task.add_done_callback(partial(_background_over, hosted, name))
    return task


def _background_over(hosted: HostedActor, name: str, task: asyncio.Task[Any]) -> None:
    hosted.background.discard(task)
    error: BaseException | None
    if not task.cancelled():
        error = task.exception()
    else:
        # Cancelled by itself: the task that it awaited was.
        error = None if task.cancelling() else asyncio.CancelledError("what it awaited was cancelled")
    # asyncio lets those end the process.
    if error is None or isinstance(error, SystemExit | KeyboardInterrupt):
        return
    what = f"the background task {name!r} of {hosted.where} failed"
    if hosted.stopping is None and hosted._process.closed is None:
        hosted._shared.on_exit(SystemExit(f"{text_of(error).rstrip()}\n{what}: {error!r}"))
    else:
        log_error(what, error)


async def end_background(hosted: HostedActor) -> None:
    """Cancel the tasks of an actor that has been left; one that goes on is cancelled again when the process ends."""
    tasks = list(hosted.background)
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=hosted._process.grace)
