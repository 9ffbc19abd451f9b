"""A process's part in one graph: takes in what comes for each run, starts the steps, and tells what became of them.

The steps of a run are calls in their actors' mailboxes like any others, in the lane of the graph's owner. Each process
says of each of its results exactly once what became of it, to every process that needs it: whatever fails, is skipped
or dies, nobody waits for ever, and a run is forgotten when the last value has come and the last step is over.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.messages import FLOW, REPORT
from aiodaft._protocol.plan import SubPlan
from aiodaft._runtime.actors.hosted_actor import InboundCall
from aiodaft._runtime.graphs.captured_call import Arguments
from aiodaft._runtime.graphs.graph_value import Flowing, GraphValue, Item, fetch, is_failure, item_of, value_of
from aiodaft._runtime.graphs.segment_call import Job, SegmentCall, SegmentRun
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.platform.context import deadline_of
from aiodaft._runtime.serialization.errors import copy_error
from aiodaft.exceptions import DaftError

if TYPE_CHECKING:
    from aiodaft._runtime.connections.connection import Connection
    from aiodaft._runtime.connections.route import Route
    from aiodaft._runtime.peer import Peer

Plan: TypeAlias = SubPlan[Arguments]


class Participant:
    """What this process does of one graph."""

    def __init__(self, peer: Peer, owner: PeerId, number: int, plan: Plan) -> None:
        self.peer = peer
        self.owner = owner
        self.number = number
        self.plan = plan
        self.runs: dict[int, ParticipantRun] = {}
        # Which segments wait for a value.
        self.waiting: dict[int, list[int]] = {}
        for index, segment in enumerate(plan.segments):
            for value in segment.needs:
                self.waiting.setdefault(value, []).append(index)
        self.missing = [len(segment.needs) for segment in plan.segments]
        # The same, once all inputs are there.
        self.missing_then = [len(set(segment.needs).difference(plan.inputs)) for segment in plan.segments]
        self.foreign = len(plan.inputs) + sum(map(len, plan.receives.values()))
        others = {owner, *plan.receives, *itertools.chain.from_iterable(plan.sends.values())}
        self.routes = {remote: peer.connections.route_to(remote) for remote in others}
        self.route = self.routes[owner]
        self.rows = [SegmentRun(self, segment) for segment in plan.segments]
        # The next run is made when one is over: that way nobody waits for it.
        self._next: ParticipantRun | None = ParticipantRun(self)
        # Called when the last run is over, once no more begin.
        self._over: Callable[[], object] | None = None
        # Refs inside results, by run: they are held until their receivers must have registered them.
        self.pins: dict[int, list[Any]] = {}
        # Values of refs from outside the graph, by step and place.
        self.outside: dict[tuple[int, int], GraphValue] = {}

    def unpin(self, oldest: int) -> None:
        """All runs before that one are over."""
        for number in [number for number in self.pins if number < oldest]:
            del self.pins[number]

    def run(self, number: int) -> ParticipantRun:
        """A run; its values may come before its beginning does."""
        run = self.runs.get(number)
        if run is None:
            run, self._next = self._next or ParticipantRun(self), None
            run.number = number
            self.runs[number] = run
            for remote in self.plan.receives:
                route = self.routes[remote]
                if route.lost is not None:
                    self.peer.process.tasks.create_task(
                        self._explain_loss(run, cast("Connection", route)), name="explain a lost actor"
                    )
        return run

    async def _explain_loss(self, run: ParticipantRun, connection: Connection) -> None:
        run.lost(connection.remote, await self.peer.connections.explanation(connection))

    def forget(self, run: ParticipantRun) -> None:
        """A run is over."""
        if self.runs.pop(run.number, None) is None:
            return
        if self._over is not None:
            self._end()
        elif self._next is None:
            self._next = ParticipantRun(self)

    def finish(self, over: Callable[[], object]) -> None:
        """No more runs begin: call that once those under way are over."""
        self._over = over
        self._end()

    def _end(self) -> None:
        over = self._over
        if over is not None and not self.runs:
            self.close()
            over()

    def close(self) -> None:
        """There will be no more runs."""
        self._over = None
        if self._next is not None:
            self._next.drop()
            self._next = None
        for run in self.runs.values():
            run.drop()
        self.runs.clear()


class ParticipantRun:
    """One run of a graph, in one process."""

    # Defaults live in the class, for what the beginning brings, or only some need.
    calls: Sequence[SegmentCall] = ()
    number = 0
    # The owner's numbers of the results.
    numbers: tuple[int, ...] = ()
    # What steps of this process may still look into.
    _held: list[StoredValue] | None = None

    def __init__(self, part: Participant) -> None:
        self.part = part
        # What it will call.
        self._rows: Sequence[SegmentCall] = [SegmentCall(self, row) for row in part.rows]
        self.values: dict[int, Flowing] = {}
        # Of each segment, how many values it waits for.
        self.missing = part.missing.copy()
        # Segments that are not over, and results that are not given; values that have not come.
        self._open = len(part.rows)
        self._to_come = part.foreign

    def drop(self) -> None:
        """It will not begin, if it has not."""
        # They know it.
        self._rows = ()

    def begin(self, left: int | None, numbers: tuple[int, ...], items: tuple[Item, ...], neighbour: Route) -> None:
        """The owner starts it."""
        part = self.part
        self.numbers = numbers
        if not self.values and _all_plain(items):
            # The usual case: nothing came before, and all inputs come as they are.
            self.values.update(items)
            self.missing = part.missing_then.copy()
            self._to_come -= len(items)
        else:
            self.came(items, neighbour)
        calls, self._rows = self._rows, ()
        if left is not None:
            deadline = deadline_of(left, part.peer.process.loop.time)
            for call in calls:
                call.deadline = deadline
        # All are known before the first may end.
        self.calls = calls
        if any(self.missing):
            for call, missing in zip(calls, self.missing, strict=True):
                call.ready = not missing
        for call in calls:
            call.deliver()

    def came(self, items: tuple[Item, ...], neighbour: Route) -> None:
        """Values came from another process."""
        for item in items:
            if len(item) == 2:
                self._put_foreign(*item)
                continue
            value = value_of(item)
            if value is None:
                self.part.peer.process.tasks.create_task(self._fetch(item, neighbour), name="fetch a value of a graph")
            else:
                self._put_foreign(item[0], value)

    async def _fetch(self, item: Item, neighbour: Route) -> None:
        self._put_foreign(item[0], await fetch(self.part.peer, neighbour, item))

    def _put_foreign(self, index: int, value: Flowing, *, at_once: bool = True) -> None:
        if index not in self.values:
            self._to_come -= 1
            if type(value) is GraphValue:
                value.for_uses(self.part.plan.uses[index])
            self.put(index, value, at_once=at_once)
            if not self._open:
                self._forget_if_over()

    def put(self, index: int, value: Flowing, *, at_once: bool = True) -> None:
        """A value is there: what waited for it may start (see `HostedActor.look_again`)."""
        self.values[index] = value
        for segment in self.part.waiting.get(index, ()):
            self.missing[segment] -= 1
            if not self.missing[segment] and self.calls:
                call = self.calls[segment]
                call.ready = True
                if not call.over:
                    call.hosted.look_again(at_once=at_once)

    def give(self, job: Job, value: Flowing) -> None:
        """A step of this process is over: tell everybody who needs to know, once they can have its result."""
        if type(value) is not GraphValue or value.kept is None:
            self._tell(job, value, None)
        elif value.kept.ready and not self._outlives(job, value.kept):
            self._tell(job, value, value.kept)
        else:
            self._open += 1
            self.part.peer.process.tasks.create_task(
                self._give_later(job, value, value.kept), name="give a value of a graph"
            )

    def _outlives(self, job: Job, kept: StoredValue) -> bool:
        """Whether steps here may still look into it when its owner, who gets it, has freed it."""
        return job.place is not None and job.used and not kept.is_inline

    async def _give_later(self, job: Job, value: GraphValue, kept: StoredValue | None) -> None:
        peer = self.part.peer
        assert kept is not None
        try:
            if self._outlives(job, kept):
                await value.fetch_own(peer)
            else:
                await peer.store.make_ready(kept)
        except Exception as error:  # noqa: BLE001 - whatever it is, the steps that need the value fail of it
            kept.release()
            value, kept = GraphValue.of_error(error, executed=True), None
        self._tell(job, value, kept)
        self._one_over()

    def _tell(self, job: Job, value: Flowing, kept: StoredValue | None) -> None:
        part, index = self.part, job.index
        if kept is not None and kept.refs:
            part.pins.setdefault(self.number, []).extend(kept.refs)
        if job.waited:
            self.put(index, value)
        for route in job.flows:
            item = item_of(value, index, part.peer, route, executed=True)
            route.send((FLOW, part.owner, part.number, self.number, (item,)))
        if job.reported and part.route.lost is None:
            if kept is not None and job.place is not None and not (kept.ready and kept.is_inline):
                part.peer.store.entries[part.owner, CallId(self.numbers[job.place])] = kept
                kept, item = None, (index,)
            elif job.place is not None or is_failure(value):
                item = item_of(value, index, part.peer, part.route, executed=True)
            else:
                # The owner only has to know that the step is over.
                item = (index,)
            part.route.send((REPORT, part.number, self.number, (item,)))
        if kept is not None:
            self._let_go(job, kept)

    def _let_go(self, job: Job, kept: StoredValue) -> None:
        # The grants keep the block until the others are done with it.
        if job.used:
            self._held = [*(self._held or ()), kept]
        else:
            kept.release()

    def lost(self, remote: PeerId, error: DaftError) -> None:
        """A process is gone: what it has not given will not come."""
        for index in self.part.plan.receives.get(remote, ()):
            value = GraphValue.of_error(copy_error(error), executed=error.executed)
            self._put_foreign(index, value, at_once=False)

    def skip(self) -> None:
        """Nobody wants its results: what has not begun will not, what runs is cancelled."""
        for call in self.calls:
            if not call.over:
                call.hosted.cancel(call)

    def _forget_if_over(self) -> None:
        if not (self._open or self._to_come):
            self.calls = ()
            self.part.forget(self)
            for kept in self._held or ():
                kept.release()

    # As the caller of its rows.

    is_local = False

    def answer(self, call: InboundCall, result: Any) -> None:
        """A row is over."""
        assert isinstance(call, SegmentCall)
        if call.rules.on_thread:
            call.flush()
        if not call.over:
            call.over = True
            self._one_over()

    def fail(self, call: InboundCall, error: BaseException, *, executed: bool | None) -> None:
        """A row will not go on."""
        assert isinstance(call, SegmentCall)
        if not call.over:
            call.flush()
            call.give_up(error, executed=executed)
            self._one_over()

    def _one_over(self) -> None:
        self._open -= 1
        self._forget_if_over()

    def answer_stored(self, call: InboundCall, stored: StoredValue) -> None:
        raise AssertionError("rows give their results themselves")

    async def item(self, call: InboundCall, value: Any) -> None:
        raise AssertionError("rows are no streams")


def _all_plain(items: tuple[Item, ...]) -> bool:
    for item in items:  # noqa: SIM110 - on the path of every run
        if len(item) != 2:
            return False
    return True
