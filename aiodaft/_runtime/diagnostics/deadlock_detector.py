"""Finds deadlocks, and ends each with an error in one of its calls.

Nothing is looked at while calls go on. A call that has to wait makes its process look at the actor some time later. A
call that is in the way at two looks is the root of a search. A search that leads to other processes is made by the home
process, which has connections to all of them: so each deadlock is searched once, and needs no new connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextvars import Context
from typing import Final, Protocol

from aiodaft._protocol.diagnostics.deadlock import CallAt, Search, Waiting
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.actors.hosted_actor import HostedActor, InboundCall
from aiodaft._runtime.diagnostics.wait_graph import WaitGraph
from aiodaft._runtime.platform.tasks import logger
from aiodaft.exceptions import DaftError, DeadlockDetected, WaitingCall

# Seconds between two looks at actors with waiting calls.
_PATIENCE: Final = 0.25


class SearchAgent(Protocol):
    @property
    def investigate(self) -> Investigate: ...

    def waits_of(self, calls: list[CallAt]) -> Awaitable[list[Waiting | None]]: ...

    def give_up(self, at: CallAt, waiting: Waiting, story: str, cycle: tuple[WaitingCall, ...]) -> Awaitable[object]:
        """End a deadlock by an error in a call, if the call waits as it did."""
        ...


class Investigate(Protocol):
    def tell(self, roots: list[CallAt]) -> None: ...


class Deadlocks:
    def __init__(self, waits: WaitGraph, agent_of: Callable[[PeerId], SearchAgent]) -> None:
        self.waits = waits
        self._process = waits.process
        self._agent_of = agent_of
        self._actors: set[HostedActor] = set()
        # The calls that were in the way at the last look.
        self._seen: set[InboundCall] = set()
        self._looking = False
        # In the owner: the roots of the next search.
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

    # In the owner.

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

    # In the process of the call to give up.

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
