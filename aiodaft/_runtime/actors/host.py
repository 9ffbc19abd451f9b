"""The actors of this process: their groups, their background tasks, their lease, and threads that wait for the loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import Any, Final, Generic, TypeAlias, TypeVar

from aiodaft._protocol.groups.roster import Roster
from aiodaft._protocol.ids import ActorId, number_of
from aiodaft._protocol.numbers import Latest
from aiodaft._runtime.actors.hosted_actor import HostedActor, InboundCall, Shared, current_call
from aiodaft._runtime.connections.ring_poller import RingPoller
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.platform.tasks import current_terms, deadline_of, exceeded, log_error, logger, text_of
from aiodaft._runtime.process import Process
from aiodaft.exceptions import DaftError, DeadlineExceeded, GroupChanged, LeaseLost
from aiodaft.methods import MethodSpec
from aiodaft.ref import Ref

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


class Standing:
    """The place of an actor in its group at one epoch. The members become known when all are made."""

    def __init__(self, roster: Roster[Any], rank: int) -> None:
        self.roster = roster
        self.rank = rank
        # Set when the group has changed since, or the actor has left it.
        self.over = asyncio.Event()

    @property
    def is_current(self) -> bool:
        return not self.over.is_set()


class Enlisted:
    def __init__(self) -> None:
        self._standings: dict[ActorId, Standing] = {}
        # Told of each actor whose group has changed, or whose members have become known.
        self.on_told: list[Callable[[ActorId], object]] = []
        self.on_forgotten: list[Callable[[ActorId], object]] = []

    def find(self, actor: ActorId) -> Standing | None:
        return self._standings.get(actor)

    def has(self, actor: ActorId) -> bool:
        return any(number_of(other) == number_of(actor) for other in self._standings)

    def has_several_of(self, group: str) -> bool:
        return sum(standing.roster.id == group for standing in self._standings.values()) > 1

    def enlist(self, actor: ActorId, roster: Roster[Any], rank: int) -> None:
        """Note the roster and rank that the owner of a group has sent to a member, also before the member is made."""
        known = self._standings.get(actor)
        if known is not None and known.roster.epoch == roster.epoch:
            known.roster = roster
        else:
            if known is not None:
                known.over.set()
            self._standings[actor] = Standing(roster, rank)
        for told in self.on_told:
            told(actor)

    def renew(self, actor: ActorId, epoch: int, since: int) -> bool:
        """Note a new epoch of a group with the members that it has `since` another; whether the actor knows these."""
        known = self._standings.get(actor)
        if known is None or not known.roster.is_complete or known.roster.since != since:
            return False
        self.enlist(actor, replace(known.roster, epoch=epoch), known.rank)
        return True

    def discharge(self, actor: ActorId) -> None:
        known = self._standings.get(actor)
        if known is not None:
            known.over.set()

    def forget(self, actor: ActorId) -> None:
        known = self._standings.pop(actor, None)
        if known is not None:
            known.over.set()
            for told in self.on_forgotten:
                told(actor)


def changed(group: str, epoch: int, newest: int | None = None, what: str = "this") -> GroupChanged:
    now = "" if newest is None else f", it has epoch {newest} now"
    error = GroupChanged(f"{group} has changed: {what} is of epoch {epoch}{now}; use what current_group() gives now")
    error.group = group
    return error


# Groups that came from another process: their rosters follow the changes that the owner of the group makes.
#
# A `RosterCell` has the roster as this process knows it; all copies of a group in a process share one. As long as one
# lives, this process asks the owner for the next change, which is answered when there is one.

# Asks the owner of a group for its roster, once that has another epoch than this one: without the members if they are
# the same. None if the group is gone.
AskOwner: TypeAlias = Callable[[Roster[Any]], Ref[Roster[Any] | None]]


class RosterCell:
    def __init__(self, roster: Roster[Any]) -> None:
        self.roster = roster
        # Whether changes come here.
        self.follows = True
        self._changed = asyncio.Event()

    def change(self, roster: Roster[Any]) -> None:
        self.roster = roster
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def after(self, epoch: int) -> Roster[Any]:
        while self.roster.epoch <= epoch:
            await self._changed.wait()
        return self.roster


class Rosters:
    def __init__(self, process: Process, ask: AskOwner) -> None:
        self._process = process
        self._ask = ask
        self._known: weakref.WeakValueDictionary[str, RosterCell] = weakref.WeakValueDictionary()

    def own(self, cell: RosterCell) -> None:
        self._known[cell.roster.id] = cell

    def find(self, group: str) -> RosterCell | None:
        return self._known.get(group)

    def copy(self, roster: Roster[Any]) -> RosterCell:
        cell = self._known.get(roster.id)
        if cell is None:
            cell = self._known[roster.id] = RosterCell(roster)
            self._process.call_soon(partial(self._begin, weakref.ref(cell)))
        elif cell.roster.epoch < roster.epoch:
            self._process.call_soon(partial(cell.change, roster))
            if not cell.follows:
                cell.follows = True
                self._process.call_soon(partial(self._begin, weakref.ref(cell)))
        return cell

    def _begin(self, cell: weakref.ref[RosterCell]) -> None:
        known = cell()
        if known is None or self._process.closed is not None:
            return
        # In a context of its own: the call that brought the group may have ended long before.
        follow = partial(self._process.tasks.create_task, self._follow(cell), name=f"follow {known.roster.id}")
        task = Context().run(follow)
        weakref.finalize(known, self._process.call_soon, task.cancel).atexit = False

    async def _follow(self, cell: weakref.ref[RosterCell]) -> None:
        while (known := cell()) is not None:
            roster = known.roster
            # Not kept while this waits: without copies, the task is cancelled.
            del known
            found: Roster[Any] | None = None
            try:
                found = await self._ask(roster)
            except DaftError as error:
                logger.debug("%s is not followed any more: %s", roster.id, error)
            known = cell()
            if known is None:
                return
            if found is None:
                known.follows = False
                return
            if found.since == roster.since:
                found = replace(found, members=roster.members)
            if found.epoch > known.roster.epoch:
                known.change(found)


def block_on(process: Process, awaited: Awaitable[T], what: str, timeout: float | None = None) -> T:
    """Block this thread until the value of a ref, or the result of a coroutine, is here.

    Args:
        timeout: Seconds to wait for a ref. The call of the ref goes on after it.

    Raises:
        RuntimeError: The thread runs an event loop.
        TimeoutError: The time is over.
        asyncio.CancelledError: The call that the thread runs was cancelled, or its actor is stopped.
        BaseException: The error of `awaited`.
    """
    try:
        if process.is_here or asyncio._get_running_loop() is not None:
            raise RuntimeError(f"{what} would block the event loop of this thread: use `await`")
        process.check_open(f"{what} cannot wait")
    except Exception:
        _leave(awaited)
        raise
    call = current_call.get()
    if call is not None and (call.hosted.thread.ident != threading.get_ident() or call.closes):
        # A thread that an async method has started, or the cleanup of a generator: neither is cancelled with the call.
        call = None
    wait = _Wait(awaited, call)
    # A search for deadlocks reads here for which ref the thread waits.
    waiting = asyncio.run_coroutine_threadsafe(wait.run(), process.loop)
    try:
        return waiting.result(timeout)
    except concurrent.futures.CancelledError:
        if call is not None and call.step is not None:
            call.closes = True
        raise asyncio.CancelledError(f"{what} was cancelled") from None
    except TimeoutError:
        if timeout is None:
            raise
    if waiting.done():
        # The awaited call has raised this itself, or its result came at the last moment.
        return waiting.result()
    process.call_soon(wait.leave)
    raise TimeoutError(f"{what} gave nothing within {timeout:g} s; the call goes on, and `ref.cancel()` ends it")


class _Wait(Generic[T]):
    def __init__(self, awaited: Awaitable[T], call: InboundCall | None) -> None:
        self._awaited = awaited
        self._ref: Ref[Any] | None = awaited if isinstance(awaited, Ref) else None
        self._call = call
        self._task: asyncio.Task[Any] | None = None
        self._left = False

    async def run(self) -> T:
        call = self._call
        if self._left or (call is not None and call.given_up):
            _leave(self._awaited)
            raise asyncio.CancelledError
        self._task = asyncio.current_task()
        if call is not None:
            # Ending the call cancels this task.
            call.wait = self._task
        try:
            return await self._in_time()
        finally:
            if call is not None and call.wait is self._task:
                call.wait = None
            self._task = None
            if self._ref is not None:
                self._ref.remove_done_callback(self._keep_on)

    async def _in_time(self) -> T:
        """Await it no longer than a block of the thread has time. The deadline of its call cancels the task."""
        when = deadline_of(current_terms.get())
        whole = None if self._call is None else self._call.deadline
        if when is None or (whole is not None and when >= whole) or self._ref is None:
            return await self._awaited
        scope = asyncio.timeout_at(when)
        try:
            async with scope:
                return await self._awaited
        except TimeoutError as error:
            if not scope.expired() or isinstance(error, DeadlineExceeded):
                raise
            raise exceeded("the deadline has passed", error) from error

    def leave(self) -> None:
        self._left = True
        if self._task is not None and self._ref is not None:
            # Without this, the call would be cancelled with its only awaiter.
            self._ref.add_done_callback(self._keep_on)
            self._task.cancel()

    def _keep_on(self, _: object) -> None: ...


def _leave(awaited: Awaitable[object]) -> None:
    """Nothing awaits this: Python warns of a coroutine that has not begun."""
    if asyncio.iscoroutine(awaited):
        awaited.close()
