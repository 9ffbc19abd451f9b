"""The wait graph of one process: which calls each of its calls waits for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable
from contextvars import Context
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

from aiodaft._protocol.diagnostics.failures import CallAt, Place, Reason, Search, Waiting, place_of
from aiodaft._protocol.ids import FIRST_USER_ACTOR, CallId, PeerId, number_of
from aiodaft._runtime.actors.host import Host
from aiodaft._runtime.actors.hosted_actor import HostedActor, InboundCall
from aiodaft._runtime.actors.steps import take_step
from aiodaft._runtime.calls.call import CallState
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.diagnostics.await_chains import (
    Frames,
    Wait,
    thread_stack,
    users_line,
    wait_of_task,
    wait_of_thread,
)
from aiodaft._runtime.graphs.participant import Graphs
from aiodaft._runtime.graphs.strand_call import StrandCall
from aiodaft._runtime.platform.tasks import logger
from aiodaft.exceptions import DaftError, DeadlockDetected, WaitingCall

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
