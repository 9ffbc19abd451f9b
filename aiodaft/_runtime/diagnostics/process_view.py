"""The part of one process in `rt.overview()`, from counters that exist; and the calls that its calls wait for."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import linecache
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

from aiodaft._protocol.calls.mailbox import FETCHING
from aiodaft._protocol.diagnostics.failures import CallAt, Failure, Place, Reason, Search, Waiting, place_of
from aiodaft._protocol.ids import FIRST_USER_ACTOR, CallId, PeerId, number_of
from aiodaft._runtime.actors.host import Host
from aiodaft._runtime.actors.hosted_actor import HostedActor, InboundCall
from aiodaft._runtime.actors.steps import take_step
from aiodaft._runtime.calls.call import CallState
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.connections.route import Traffic
from aiodaft._runtime.diagnostics.await_chains import (
    Frames,
    Wait,
    frames_of,
    is_ours,
    stack_of,
    thread_stack,
    users_line,
    wait_of_task,
    wait_of_thread,
)
from aiodaft._runtime.diagnostics.watchdog import Watchdog
from aiodaft._runtime.graphs.participant import Graphs
from aiodaft._runtime.graphs.strand_call import StrandCall
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.objects.transfer import Objects
from aiodaft._runtime.platform.linux import resident_bytes
from aiodaft._runtime.platform.tasks import logger
from aiodaft.exceptions import DaftError, DeadlockDetected, WaitingCall
from aiodaft.ref import Ref
from aiodaft.stack import CallStack, Frame, ProcessStack, TaskStack, ThreadStack

_RUNNER: Final = asyncio.Runner.run.__code__
_RUN: Final = HostedActor.run.__code__
_ON_THREAD: Final = frozenset({_RUN, take_step.__code__})
_NOT_KNOWN: Final = Wait(known=False)


def on_thread(hosted: HostedActor) -> tuple[InboundCall | None, Frames]:
    frames = thread_stack(hosted.thread.ident)
    for index, frame in enumerate(frames):
        if frame.f_code in _ON_THREAD:
            call: InboundCall = frame.f_locals["call"]
            return call, frames[index + 1 :]
    return None, []


def on_loop(ident: int) -> tuple[InboundCall | None, str]:
    """The call that a loop's thread runs, and its line of user code; called in another thread.

    No line if it runs no user code. No call if it runs a task or a callback of the user.
    """
    frames = thread_stack(ident)
    codes = [frame.f_code for frame in frames]
    # The frames outside of it started the process.
    inside = frames[codes.index(_RUNNER) + 1 :] if _RUNNER in codes else []
    call = next((frame.f_locals["call"] for frame in inside if frame.f_code is _RUN), None)
    return call, users_line(inside)


def frames_on_thread(call: InboundCall) -> Frames:
    busy_with, frames = on_thread(call.hosted)
    return frames if busy_with is call else []


class WaitGraph:
    def __init__(
        self,
        host: Host,
        connections: Connections,
        graphs: Graphs,
        find_call: Callable[[PeerId, CallId], InboundCall | None],
    ) -> None:
        self.process = host.process
        self.host = host
        self._find_call = find_call
        self._connections = connections
        self._graphs = graphs
        self._stamps: WeakKeyDictionary[asyncio.Future[Any], int] = WeakKeyDictionary()
        self._numbers = itertools.count(1)
        self._finders: dict[Place, Callable[[InboundCall], Wait]] = {
            Place.TASK: _wait_of_task,
            Place.THREAD: lambda call: wait_of_thread(frames_on_thread(call)),
            Place.ARGUMENTS: _wait_of_task,
            Place.INPUTS: _wait_for_inputs,
            Place.MAILBOX: self._ahead_of,
            Place.BACKLOG: self._occupant,
        }

    def place(self, call: InboundCall) -> CallAt:
        if isinstance(call, StrandCall):
            return call.call_at
        return CallAt(self.process.id, call.caller, call.number)

    def find(self, at: CallAt) -> InboundCall | None:
        return self._find_call(at.owner, at.number) or self._graphs.find(at)

    def look(self, at: CallAt) -> Waiting | None:
        if at.member:
            return self._look_at_member(at)
        call = self.find(at)
        place = None if call is None or call.answered else _place_of(call)
        if call is None or place is None:
            return None
        wait = self._finders[place](call)
        if not (wait.known and wait.calls):
            return None
        stamp = sorted(self._stamps.setdefault(future, next(self._numbers)) for future in wait.futures)
        line = wait.line if call.begun else ""
        on = tuple(sorted(set(wait.calls)))
        reason = Reason.MEETS if any(other.member for other in on) else place.reason
        own = call.hosted.id < FIRST_USER_ACTOR
        return Waiting(call.hosted.name, call.label, line, call.begun, reason, tuple(stamp), on, own)

    def _look_at_member(self, at: CallAt) -> Waiting | None:
        hosted = next((one for one in self.host.actors.values() if number_of(one.id) == at.member), None)
        if hosted is None:
            return None
        within = (at.owner, *at.within)
        calls = [call for call in (*hosted.mailbox.waiting(), *hosted.under_way()) if call.within == within]
        on = tuple(sorted(self.place(call) for call in calls if not call.answered))
        return Waiting(hosted.name, "", "", True, Reason.MEETS, (), on, own=True) if on else None

    def wait_of(self, call: InboundCall) -> Wait:
        place = _place_of(call)
        return _NOT_KNOWN if place is None else self._finders[place](call)

    def name_of(self, at: CallAt) -> str:
        running = self.find(at) if at.host == self.process.id else None
        if running is not None:
            # The labels of the runtime's own calls that a user sees say all.
            own = running.hosted.id < FIRST_USER_ACTOR
            return running.label if own else f"{running.label} of {running.hosted.name}"
        connection = self._connections.get(at.host)
        state = (
            connection.session.calls.get(at.number) if connection is not None and at.owner == self.process.id else None
        )
        if isinstance(state, CallState):
            return f"{state.label} of {state.target.label}"
        return f"{'a call' if state is None else state.label} in {at.host}"

    def in_the_way(self, hosted: HostedActor) -> list[InboundCall]:
        found = hosted.mailbox.in_the_way(hosted.under_way) if hosted.mailbox.holds_some else []
        if hosted.thread.backlog:
            occupant, _ = on_thread(hosted)
            found += [] if occupant is None else [occupant]
        return found

    def _ahead_of(self, call: InboundCall) -> Wait:
        return Wait(calls=[self.place(other) for other in call.hosted.mailbox.ahead_of(call, call.hosted.under_way)])

    def _occupant(self, call: InboundCall) -> Wait:
        occupant, _ = on_thread(call.hosted)
        if occupant is None:
            return _NOT_KNOWN
        return Wait(calls=[self.place(occupant)], futures=[] if call.step is None else [call.step])


def _place_of(call: InboundCall) -> Place | None:
    if call.waits_at is not None:
        return Place.INPUTS
    if call.step is not None:
        return Place.THREAD if on_thread(call.hosted)[0] is call else Place.BACKLOG
    fetching = bool(call.fetching)
    return place_of(call.stage, begun=call.begun, on_thread=call.rules.on_thread, fetching=fetching)


def _wait_of_task(call: InboundCall) -> Wait:
    task = call.task or next(iter(call.fetching), None)
    return _NOT_KNOWN if task is None else wait_of_task(task)


def _wait_for_inputs(call: InboundCall) -> Wait:
    futures = [call.pause] if isinstance(call, StrandCall) and call.waits_at is not None else []
    return Wait(calls=call.waits_for(), futures=[*futures])


# Finds deadlocks, and ends each with an error in one of its calls.
# Nothing is looked at while calls go on. A call that is in the way at two looks, some time apart, is the root of a
# search. One that leads to other processes is made by the home process, which has connections to all of them: each
# deadlock is searched once.

_PATIENCE: Final = 0.25


class SearchAgent(Protocol):
    @property
    def investigate(self) -> Investigate: ...

    def waits_of(self, calls: list[CallAt]) -> Awaitable[list[Waiting | None]]: ...

    def give_up(
        self, at: CallAt, waiting: Waiting, story: str, cycle: tuple[WaitingCall, ...]
    ) -> Awaitable[object]: ...


class Investigate(Protocol):
    def tell(self, roots: list[CallAt]) -> None: ...


class Deadlocks:
    def __init__(self, waits: WaitGraph, agent_of: Callable[[PeerId], SearchAgent]) -> None:
        self.waits = waits
        self._process = waits.process
        self._agent_of = agent_of
        self._actors: set[HostedActor] = set()
        self._seen: set[InboundCall] = set()
        self._looking = False
        self._roots: set[CallAt] = set()
        self._searching = False

    def suspect(self, hosted: HostedActor) -> None:
        self._actors.add(hosted)
        if not self._looking:
            self._looking = True
            self._look_later()

    def _look_later(self) -> None:
        # In an empty context: a search has no deadline of a call.
        self._process.loop.call_later(_PATIENCE, self._look, context=Context())

    def _look(self) -> None:
        self._actors = {hosted for hosted in self._actors if hosted.stopping is None and hosted.holds_some_up}
        self._looking = bool(self._actors) and self._process.closed is None
        if not self._looking:
            self._seen.clear()
            return
        self._look_later()
        seen = {call for hosted in self._actors for call in self.waits.in_the_way(hosted)}
        lasting, self._seen = seen & self._seen, seen
        # Most calls wait only for live calls of this process, which costs no message.
        roots = [root for root in map(self.waits.place, lasting) if self._may_be_stuck(root)]
        owner = self._process.options.owner
        if roots and owner == self._process.id:
            self.investigate(roots)
        elif roots:
            self._agent_of(owner).investigate.tell(roots)

    def _may_be_stuck(self, root: CallAt) -> bool:
        search = Search([root])
        self._answer_here(search)
        return bool(search.questions or search.deadlocks)

    def _answer_here(self, search: Search) -> None:
        while here := search.questions.get(self._process.id):
            search.handle_answers({call: self.waits.look(call) for call in here})

    def investigate(self, roots: Iterable[CallAt]) -> None:
        self._roots.update(roots)
        if not self._searching:
            self._searching = True
            self._process.tasks.create_task(self._search(), name="search for deadlocks")

    async def _search(self) -> None:
        try:
            while self._roots:
                search = Search(self._roots)
                self._roots = set()
                while search.questions:
                    await self._answer(search)
                for one in search.deadlocks:
                    await self._agent_of(one.victim.host).give_up(one.victim, one.waiting[-1], str(one), one.cycle)
        except DaftError as error:
            # A process is gone; calls that still wait will be looked at again.
            logger.debug("a search for deadlocks ended: %s", error)
        finally:
            self._searching = False

    async def _answer(self, search: Search) -> None:
        questions = search.questions
        asked = [self._agent_of(host).waits_of(calls) for host, calls in questions.items()]
        for calls, answers in zip(questions.values(), await asyncio.gather(*asked), strict=True):
            search.handle_answers(dict(zip(calls, answers, strict=True)))

    def give_up(self, at: CallAt, waiting: Waiting, story: str, cycle: tuple[WaitingCall, ...]) -> None:
        call = self.waits.find(at)
        if call is None or self.waits.look(at) != waiting:
            return
        error = DeadlockDetected(f"a deadlock: {story}", executed=None if call.begun else False)
        error.cycle = cycle
        if not call.begun:
            call.hosted.give_up(call, error)
            return
        # No other future depends on the last one.
        self.waits.wait_of(call).futures[-1].set_exception(error)


_MAX_RUNNING: Final = 100
_MAX_STORED: Final = 20


@dataclass(frozen=True, slots=True)
class ActorView:
    name: str
    class_name: str
    running: tuple[str, ...]
    running_besides: int
    queued: int
    done: int
    failed: int
    abandoned: int


@dataclass(frozen=True, slots=True)
class ChildView:
    """A supervised or dead actor, as its owner sees it; `peer` is the process of the current or last incarnation."""

    peer: PeerId
    label: str
    class_name: str
    state: Literal["up", "restarting", "dead"]
    epoch: int
    restarts: int
    # Encoded: another process may not be able to rebuild it.
    last_error: bytes | None


@dataclass(frozen=True, slots=True)
class StoredInfo:
    """A large value that a process stores for others.

    Attributes:
        label: The call that made it, such as "Model.execute"; "put"; "" for a copy that is passed on to others.
        owner: The process that has its ref.
    """

    label: str
    process: str
    owner: str
    nbytes: int
    on_device: bool
    readers: int


@dataclass(frozen=True, slots=True)
class Sent:
    """The traffic of a process with another one; `calls` have ended."""

    remote: PeerId
    calls: int
    traffic: Traffic


@dataclass(frozen=True, slots=True)
class ProcessView:
    id: PeerId
    pid: int
    owner: PeerId
    clock: float
    rss: int
    cpu_seconds: float
    threads: int
    stored_bytes: int
    stored_values: int
    blocks: int
    pooled_bytes: int
    traffic: Traffic
    actors: tuple[ActorView, ...]
    children: tuple[ChildView, ...]
    sent: tuple[Sent, ...]
    stored: tuple[StoredInfo, ...]
    failures: tuple[Failure, ...]
    deaths: tuple[tuple[str, int], ...]
    late: tuple[str, ...]


class Viewer:
    def __init__(self, host: Host, connections: Connections, objects: Objects) -> None:
        self._host = host
        self._connections = connections
        self._objects = objects
        self.supervised: Callable[[], Sequence[ChildView]] = lambda: ()

    def look(self) -> ProcessView:
        process, store = self._host.process, self._objects.store
        stored = self._stored()
        pools = [pool for transport in list(store.transports.values()) for pool in transport.pools()]
        return ProcessView(
            id=process.id,
            pid=process.pid,
            owner=process.options.owner,
            clock=process.env.monotonic(),
            rss=resident_bytes(),
            cpu_seconds=time.process_time(),
            threads=threading.active_count(),
            stored_bytes=sum(one.size for _, one in stored),
            stored_values=len(stored),
            blocks=sum(pool.live_blocks() for pool in pools),
            pooled_bytes=sum(pool.idle_bytes() for pool in pools),
            traffic=self._connections.traffic(),
            actors=tuple(map(look_at_actor, filter(_is_users, self._host.actors.values()))),
            children=tuple(self.supervised()),
            sent=tuple(
                Sent(remote, connection.session.answers, connection.traffic_so_far())
                for remote, connection in self._connections.items()
                if connection.is_up
            ),
            stored=tuple(map(self._stored_info, heapq.nlargest(_MAX_STORED, stored, key=lambda one: one[1].size))),
            failures=tuple(process.failures),
            deaths=tuple(process.failures.deaths.items()),
            late=process.part(Watchdog).late(),
        )

    def _stored(self) -> list[tuple[PeerId, StoredValue]]:
        objects = self._objects
        kept = [(owner, stored) for (owner, _), stored in objects.store.entries.items()]
        return kept + [(self._host.process.id, stored) for stored in objects.refs.put_values()]

    def _stored_info(self, kept: tuple[PeerId, StoredValue]) -> StoredInfo:
        owner, stored = kept
        blobs = stored.blobs()
        return StoredInfo(
            label=stored.label,
            process=self._host.process.id,
            owner=owner,
            nbytes=stored.size,
            on_device=any(on_device for _, on_device in blobs),
            readers=sum(block.grants for block, _ in blobs),
        )


def look_at_actor(hosted: HostedActor) -> ActorView:
    calls = hosted.under_way()
    begun = [call.label for call in calls if call.begun]
    return ActorView(
        name=hosted.name,
        class_name=type(hosted.instance).__name__,
        running=tuple(begun[:_MAX_RUNNING]),
        running_besides=len(begun[_MAX_RUNNING:]),
        # Calls of `def` methods wait for the actor's thread, also after they were cancelled and answered.
        queued=hosted.mailbox.queued + sum(not (call.begun or call.answered) for call in calls),
        done=hosted.done,
        failed=hosted.failed,
        abandoned=len(hosted.abandoned),
    )


def class_in(label: str) -> str:
    return label.partition("-")[0]


def _is_users(hosted: HostedActor) -> bool:
    return hosted.id >= FIRST_USER_ACTOR


T = TypeVar("T")


def stack_here(waits: WaitGraph) -> ProcessStack:
    calls = [call for call in waits.host.calls() if call.hosted.id >= FIRST_USER_ACTOR]
    calls.sort(key=lambda call: not call.begun)
    of_calls = {task for call in calls for task in (call.task, call.wait)}
    tasks = [task for task in asyncio.all_tasks(waits.process.loop) if task not in of_calls]
    return ProcessStack(
        id=waits.process.id,
        pid=waits.process.pid,
        actors=tuple(hosted.name for hosted in waits.host.actors.values() if hosted.id >= FIRST_USER_ACTOR),
        calls=tuple(_call(waits, call) for call in calls),
        threads=tuple(_threads()),
        tasks=tuple(_task(waits, task) for task in sorted(tasks, key=asyncio.Task.get_name) if _runs_users_code(task)),
        collectives=waits.process.part(Watchdog).open(),
    )


def _call(waits: WaitGraph, call: InboundCall) -> CallStack:
    state = "running" if call.begun else "needs arguments" if call.stage is FETCHING else "queued"
    seconds = waits.process.env.monotonic() - call.since if call.begun else None
    on_thread = call.task is None or call.rules.on_thread or call.step is not None
    frames = frames_on_thread(call) if on_thread else frames_of(cast("asyncio.Task[Any]", call.task).get_coro())
    waits_for = tuple(waits.name_of(at) for at in waits.wait_of(call).calls)
    return CallStack(call.hosted.name, call.label, call.caller, state, seconds, waits_for, _frames(frames))


def _task(waits: WaitGraph, task: asyncio.Task[object]) -> TaskStack:
    waits_for = tuple(waits.name_of(at) for at in wait_of_task(task).calls)
    return TaskStack(task.get_name(), waits_for, _frames(frames_of(task.get_coro())))


def _threads() -> list[ThreadStack]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    # This thread makes the list; its tasks are listed by themselves.
    own = threading.get_ident()
    stacks = {ident: stack_of(frame) for ident, frame in sys._current_frames().items() if ident != own}
    return [
        ThreadStack(names.get(ident, str(ident)), _frames(frames))
        for ident, frames in stacks.items()
        if users_line(frames) or not any(map(is_ours, frames))
    ]


def _runs_users_code(task: asyncio.Task[object]) -> bool:
    return bool(users_line(frames_of(task.get_coro())))


def _frames(frames: Frames) -> tuple[Frame, ...]:
    shown = [frame for frame in frames if not is_ours(frame)] or frames
    found = [(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in shown]
    return tuple(Frame(file, line, name, linecache.getline(file, line).strip()) for file, line, name in found)


async def answer_to(question: Awaitable[T], patience: float) -> T:
    """The answer of another process to a question, which is a ref.

    Raises:
        DaftError: The process has ended.
        TimeoutError: There is no answer in time.

    Cancellation: the question is cancelled.
    """
    if not await is_answered(cast("Ref[T]", question), patience):
        raise TimeoutError
    async with asyncio.timeout(patience):
        return await question


async def is_answered(question: Ref[Any], patience: float) -> bool:
    """Wait for an answer; True if there is one, or an error. A question without an answer in time is cancelled.

    Cancellation: the question is cancelled, and its error counts as seen.
    """
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                # Awaiting the ref itself would wait for the cleanup after a cancellation.
                await question.ready()
        return question.done()
    finally:
        state_of(question).mark_seen()
        question.cancel()
