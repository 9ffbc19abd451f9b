"""The part of a graph in one process: receives the values of each run, executes the steps, and sends the results.

    owner ---- RUN: inputs ------------------------> ParticipantRun.begin --> segments, into the actors' mailboxes
    other participants ---- FLOW: results ---------> ParticipantRun.values_came --> segments that waited start
    SegmentCall: a step is over ---> ParticipantRun.give --+--> segments of this process that wait for the result
                                                           +--> FLOW to the participants that need it
                                                           +--> REPORT to the owner

A segment is a call by the graph's owner. Each process sends each of its results, or its error, exactly once to every
process that needs it. So no process waits for ever if a step fails or is skipped or an actor dies. A run is forgotten
when the last value has come and the last step is over (see `_protocol.run.Share`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

from aiodaft._protocol import messages as m
from aiodaft._protocol.call import ANSWER, FETCHED, FETCHING, NEXT
from aiodaft._protocol.deadlock import CallAt
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.plan import SubPlan
from aiodaft._protocol.run import Needs, Share
from aiodaft._runtime.actors.hosted_actor import InboundCall
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.route import Route
from aiodaft._runtime.graphs.captured_call import Arguments
from aiodaft._runtime.graphs.context import GraphContext
from aiodaft._runtime.graphs.graph_value import Flowing, GraphValue, fetch, is_failure, item_of, value_of
from aiodaft._runtime.graphs.segment_call import BoundSegment, BoundStep, SegmentCall
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.platform.context import deadline_of
from aiodaft._runtime.serialization.errors import copy_error
from aiodaft.exceptions import DaftError

# The deadlock search identifies a segment by a negative number made of the graph, the run and one of its values.
_VALUE_BITS = 32
_RUN_BITS = 64


class Participant:
    """The part of one graph in this process."""

    def __init__(self, context: GraphContext, owner: PeerId, number: int, plan: SubPlan[Arguments]) -> None:
        """Bind the steps to their methods.

        Raises:
            AttributeError: An actor has no such method.
        """
        self.context = context
        self.owner = owner
        self.number = number
        self.plan = plan
        self.needs = Needs(plan)
        self.runs: dict[int, ParticipantRun] = {}
        others = {owner, *plan.receives, *itertools.chain.from_iterable(plan.sends.values())}
        self.routes = {remote: context.connections.route_to(remote) for remote in others}
        self.route = self.routes[owner]
        awaited = self.needs.segments.keys()
        self.segments = [BoundSegment(context, plan, segment, self.routes, awaited) for segment in plan.segments]
        # The next run, made in advance, so that no message waits for it.
        self._next: ParticipantRun | None = ParticipantRun(self)
        # Called after the last run, once the owner has uninstalled the graph.
        self._finished: Callable[[], object] | None = None
        # Refs inside results, by run: kept until the receivers have registered them.
        self.pins: dict[int, list[Any]] = {}

    def unpin(self, oldest: int) -> None:
        """Release the refs of all runs before `oldest`, which are over."""
        for number in [number for number in self.pins if number < oldest]:
            del self.pins[number]

    def run(self, number: int) -> ParticipantRun:
        """Return a run, or make it: its values can come before RUN does."""
        run = self.runs.get(number)
        if run is None:
            run, self._next = self._next or ParticipantRun(self), None
            run.number = number
            self.runs[number] = run
            for remote in self.plan.receives:
                route = self.routes[remote]
                if route.lost is not None:
                    explaining = self._explain_loss(run, cast("Connection", route))
                    self.context.process.tasks.create_task(explaining, name="explain a lost actor")
        return run

    async def _explain_loss(self, run: ParticipantRun, connection: Connection) -> None:
        run.lost(connection.remote, await self.context.connections.explanation(connection))

    def forget(self, run: ParticipantRun) -> None:
        """Forget a run that is over."""
        if self.runs.pop(run.number, None) is None:
            return
        if self._finished is not None:
            self._end()
        elif self._next is None:
            self._next = ParticipantRun(self)

    def finish(self, finished: Callable[[], object]) -> None:
        """Call `finished` when the runs under way are over. No more runs begin."""
        self._finished = finished
        self._end()

    def _end(self) -> None:
        finished = self._finished
        if finished is not None and not self.runs:
            self.close()
            finished()

    def close(self) -> None:
        """Drop all runs."""
        self._finished = None
        if self._next is not None:
            self._next.drop()
            self._next = None
        for run in self.runs.values():
            run.drop()
        self.runs.clear()

    def number_of(self, run: int, value: int) -> CallId:
        """The number of the segment that makes a value, in the deadlock search."""
        return CallId(-1 - ((self.number << _RUN_BITS | run) << _VALUE_BITS | value))

    def find(self, number: CallId) -> SegmentCall | None:
        """Find a segment by its number in the deadlock search, or by the number of a result that it makes."""
        for run in self.runs.values():
            if number in run.numbers:
                value = self.plan.outputs[run.numbers.index(number)]
            else:
                # The value is in the last bits.
                value = -1 - number & (1 << _VALUE_BITS) - 1
                if number >= 0 or self.number_of(run.number, value) != number:
                    continue
            for call in run.calls:
                if call.makes(value):
                    return call
        return None


class ParticipantRun:
    """One run of a graph in one process; the caller of its segments."""

    # Defaults: RUN sets them, or only some runs do.
    calls: Sequence[SegmentCall] = ()
    number = 0
    # The owner's numbers of the results of this process.
    numbers: tuple[CallId, ...] = ()
    # Results that steps of this process may still read.
    _read_here: list[StoredValue] | None = None

    def __init__(self, participant: Participant) -> None:
        self.participant = participant
        # The caller of the segments.
        self.owner = participant.owner
        self.share = Share(participant.needs)
        self.values: dict[int, Flowing] = {}
        # The calls, until RUN comes.
        self._prepared: Sequence[SegmentCall] = [SegmentCall(self, segment) for segment in participant.segments]

    def drop(self) -> None:
        """Drop the prepared calls. They refer to the run: otherwise only garbage collection frees them."""
        self.share.drop()
        self._prepared = ()

    def begin(
        self, left: int | None, numbers: tuple[CallId, ...], items: tuple[m.GraphItem, ...], route: Route
    ) -> None:
        """Start the segments: RUN came."""
        share = self.share
        self.numbers = numbers
        uncounted = 0 if self.values else len(items)
        for item in items:
            if len(item) != m.PLAIN_VALUE:
                uncounted = 0
        if uncounted:
            # The usual case.
            self.values.update(items)
        else:
            self.values_came(items, route)
        calls, self._prepared = self._prepared, ()
        if left is not None:
            deadline = deadline_of(left, self.participant.context.process.loop.time)
            for call in calls:
                call.deadline = deadline
        # Set before the first call can end.
        self.calls = calls
        share.run_came(uncounted)
        if any(share.missing):
            for call, missing in zip(calls, share.missing, strict=True):
                if missing:
                    call.stage = FETCHING
        for call in calls:
            call.deliver()

    def values_came(self, items: tuple[m.GraphItem, ...], route: Route) -> None:
        """Take values that another process sent."""
        for item in items:
            if len(item) == m.PLAIN_VALUE:
                self._put_foreign(*item)
                continue
            value = value_of(item)
            if value is None:
                self.participant.context.process.tasks.create_task(
                    self._fetch(item, route), name="fetch a value of a graph"
                )
            else:
                self._put_foreign(item[0], value)

    async def _fetch(self, item: m.GraphItem, route: Route) -> None:
        self._put_foreign(item[0], await fetch(self.participant.context.objects, route, item))

    def _put_foreign(self, index: int, value: Flowing, *, at_once: bool = True) -> None:
        if index not in self.values:
            self.share.to_come -= 1
            if type(value) is GraphValue:
                value.expect_uses(self.participant.plan.uses[index])
            self._put(index, value, at_once=at_once)
            self._forget_if_done()

    def _put(self, index: int, value: Flowing, *, at_once: bool = True) -> None:
        """Keep a value, and start the segments that waited for it (for `at_once` see `HostedActor.look_again`)."""
        self.values[index] = value
        for segment in self.share.value_came(index):
            if self.calls:
                call = self.calls[segment]
                if call.handle(FETCHED):
                    call.hosted.look_again(at_once=at_once)

    # Results of the steps of this process.

    def give(self, step: BoundStep, value: Flowing) -> None:
        """Send the result of a step to its receivers, as soon as it is ready."""
        stored = value.stored if type(value) is GraphValue else None
        if stored is None:
            self._tell(step, value, None)
        elif stored.ready and not self._outlives(step, stored):
            self._tell(step, value, stored)
        else:
            self.share.unfinished += 1
            giving = self._give_later(step, cast("GraphValue", value), stored)
            self.participant.context.process.tasks.create_task(giving, name="give a value of a graph")

    def _outlives(self, step: BoundStep, stored: StoredValue) -> bool:
        """Whether steps of this process may read a result after its owner has freed it."""
        return step.place is not None and step.is_used and not stored.is_inline

    async def _give_later(self, step: BoundStep, value: GraphValue, stored: StoredValue) -> None:
        context = self.participant.context
        try:
            if self._outlives(step, stored):
                await value.fetch_own(context.objects)
            else:
                await context.objects.store.make_ready(stored)
        except Exception as error:  # noqa: BLE001 - the steps that need the value fail with the error
            stored.release()
            self._tell(step, GraphValue.of_error(error, executed=True), None)
        else:
            self._tell(step, value, stored)
        self._one_finished()

    def _tell(self, step: BoundStep, value: Flowing, stored: StoredValue | None) -> None:
        participant, index = self.participant, step.index
        refs = participant.context.objects.refs
        if stored is not None and stored.refs:
            participant.pins.setdefault(self.number, []).extend(stored.refs)
        if step.is_awaited:
            self._put(index, value)
        for route in step.routes:
            item = item_of(value, index, refs, route, executed=True)
            route.send((m.FLOW, self.owner, participant.number, self.number, (item,)))
        if step.is_reported and participant.route.lost is None:
            if stored is not None and step.place is not None and not (stored.ready and stored.is_inline):
                participant.context.objects.store.entries[participant.owner, self.numbers[step.place]] = stored
                stored, item = None, (index,)
            elif step.place is not None or is_failure(value):
                item = item_of(value, index, refs, participant.route, executed=True)
            else:
                # The owner does not need the value: it only counts the step.
                item = (index,)
            participant.route.send((m.REPORT, participant.number, self.number, (item,)))
        if stored is not None:
            # After the release, grants keep the block until the other processes have read it.
            if step.is_used:
                self._read_here = [*(self._read_here or ()), stored]
            else:
                stored.release()

    # Ends.

    def lost(self, remote: PeerId, error: DaftError) -> None:
        """Fail the values that a lost process has not sent."""
        for index in self.participant.plan.receives.get(remote, ()):
            value = GraphValue.of_error(copy_error(error), executed=error.executed)
            self._put_foreign(index, value, at_once=False)

    def skip(self) -> None:
        """Cancel the segments: the owner needs no result any more."""
        for call in self.calls:
            if not call.answered:
                call.hosted.cancel(call)

    def _one_finished(self) -> None:
        self.share.unfinished -= 1
        self._forget_if_done()

    def _forget_if_done(self) -> None:
        if self.share.end():
            self.calls = ()
            self.participant.forget(self)
            for stored in self._read_here or ():
                stored.release()

    # As the caller of its segments.

    # The results of its steps are told already; it has none of its own.
    is_local = True

    def answer(self, call: InboundCall, result: Any) -> None:
        """Note that a segment is over."""
        assert isinstance(call, SegmentCall)
        if call.rules.on_thread:
            call.flush()
        after = NEXT.get((call.stage, ANSWER))
        if after is not None:
            call.stage = after
            self.share.unfinished -= 1
            self._forget_if_done()

    def fail(self, call: InboundCall, error: BaseException, *, executed: bool | None) -> None:
        """Fail the remaining steps of a segment that ends early."""
        assert isinstance(call, SegmentCall)
        if not call.answered:
            call.flush()
            call.give_up(error, executed=executed)
            self._one_finished()

    def answer_stored(self, call: InboundCall, stored: StoredValue) -> None:
        raise AssertionError("segments give their results themselves")

    async def item(self, call: InboundCall, value: Any) -> None:
        raise AssertionError("segments are no streams")

    # For the deadlock search.

    def call_at(self, value: int) -> CallAt:
        """The segment that makes a value, as the search identifies it."""
        plan, owner = self.participant.plan, self.participant.owner
        maker = next((process for process, values in plan.receives.items() if value in values), plan.process)
        return CallAt(maker, owner, self.participant.number_of(self.number, value))

    def makers_of(self, values: Sequence[int]) -> list[CallAt]:
        """The segments that make the missing ones of these values; none if an input is missing."""
        missing = [value for value in values if value not in self.values]
        return [] if any(value in self.participant.plan.inputs for value in missing) else [*map(self.call_at, missing)]
