"""The part of a graph in one process: receives the values of each run, executes the steps, and sends the results.

    owner ---- RUN: inputs ------------------------> ParticipantRun.begin --> strands, into the actors' mailboxes
    other participants ---- FLOW: results ---------> ParticipantRun.values_came --> segments that waited start
    StrandCall: a step is over ---> ParticipantRun.tell --+--> segments of this process that wait for the result
                                                          +--> FLOW to the participants that need it
                                                          +--> REPORT to the owner

A strand is a call by the graph's owner, which starts with its first segment and waits for the values of each later one.
Each process sends each of its results, or its error, exactly once to every process that needs it. So no process waits
for ever if a step fails or is skipped or an actor dies. What a run waits for, what a value starts and when the run is
over: `_protocol.run.Share`. Where a result goes: `_protocol.plan.Result`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Final, cast

from aiodaft._protocol.calls.call import ANSWER, ANSWERED, CANCEL, FETCHED, FETCHING, GIVEN_UP, LATE, NEXT, Event
from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.messages import WANT_REPLY
from aiodaft._protocol.diagnostics.deadlock import CallAt
from aiodaft._protocol.graphs.plan import Report, SubPlan
from aiodaft._protocol.graphs.run import Needs, Share
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._runtime.actors.hosted_actor import InboundCall
from aiodaft._runtime.connections.route import Route
from aiodaft._runtime.graphs.captured_call import Arguments
from aiodaft._runtime.graphs.context import GraphContext
from aiodaft._runtime.graphs.graph_value import Flowing, GraphValue, NeedsFetch, fetch, item_of, value_of
from aiodaft._runtime.graphs.strands import BoundStep, BoundStrand
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.platform.context import received_terms
from aiodaft._runtime.platform.wakeup import Wakeup
from aiodaft._runtime.serialization.encoder import is_plain
from aiodaft._runtime.serialization.errors import add_note, as_call_error, copy_error, failed_beside
from aiodaft._runtime.serialization.small import Small
from aiodaft.exceptions import ActorDied, DaftError

_NO_KWARGS: Final[dict[str, Any]] = {}


class InputFailed(Exception):
    """A step cannot run: one of its arguments is an error."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


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
        self.needs = Needs(plan, owner, number)
        self.runs: dict[int, ParticipantRun] = {}
        others = {owner, *plan.receives, *itertools.chain.from_iterable(result.sends for result in plan.results)}
        self.routes = {remote: context.connections.route_to(remote) for remote in others}
        self.route = self.routes[owner]
        self.strands = [BoundStrand(context, plan, strand, self.routes, StrandCall.execute) for strand in plan.strands]
        # The next run, made in advance, so that no message waits for it.
        self._next: ParticipantRun | None = ParticipantRun(self)
        # Called after the last run, once the owner has uninstalled the graph.
        self._finished: Callable[[], object] | None = None
        # Refs inside results, by run: kept until the receivers have registered them.
        self.pins: dict[int, list[Any]] = {}

    def run(self, number: int) -> ParticipantRun:
        """Return a run, or make it: its values can come before RUN does."""
        run = self.runs.get(number)
        if run is None:
            run, self._next = self._next or ParticipantRun(self), None
            run.number = number
            self.runs[number] = run
            for remote in self.plan.receives:
                if self.routes[remote].lost is not None:
                    self.context.when_explained(self.routes[remote], partial(run.lost, remote))
        return run

    def forget(self, run: ParticipantRun) -> None:
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
        self._finished = None
        for run in filter(None, (self._next, *self.runs.values())):
            run.drop()
        self._next = None
        self.runs.clear()

    def find(self, number: CallId) -> StrandCall | None:
        """Find a strand by its number in the deadlock search, or by the number of a result that it makes."""
        for run in self.runs.values():
            strand = self.needs.strand_with(number, run.number, run.numbers)
            if strand is not None and run.calls:
                return run.calls[strand]
        return None


class ParticipantRun(Share[Flowing]):
    """One run of a graph in one process; the caller of its strands."""

    # Defaults: RUN sets them, or only some runs do.
    calls: Sequence[StrandCall] = ()
    number = 0
    # The owner's numbers of the results of this process.
    numbers: tuple[CallId, ...] = ()
    # Results that steps of this process may still read.
    _read_here: list[StoredValue] | None = None

    def __init__(self, participant: Participant) -> None:
        super().__init__(participant.needs)
        self.participant = participant
        # The caller of the strands.
        self.owner = participant.owner
        # The calls, until RUN comes.
        self._prepared: Sequence[StrandCall] = [StrandCall(self, strand) for strand in participant.strands]

    def drop(self) -> None:
        """Drop the prepared calls. They refer to the run: otherwise only garbage collection frees them."""
        super().drop()
        self._prepared = ()

    def begin(
        self, sent: m.SentTerms, numbers: tuple[CallId, ...], items: tuple[m.GraphItem, ...], route: Route
    ) -> None:
        """Start the strands: RUN came."""
        self.numbers = numbers
        items = self.run_came(items)
        if items:
            self.values_came(items, route)
        calls, self._prepared = self._prepared, ()
        if sent is not None:
            terms = received_terms(sent, self.participant.context.process.loop.time)
            for call in calls:
                call.terms, call.deadline = terms, terms.deadline
        # Set before the first call can end.
        self.calls = calls
        if any(self.missing):
            for call in calls:
                if self.missing[call.strand.first]:
                    call.stage = FETCHING
        for call in calls:
            call.deliver()

    def values_came(self, items: tuple[m.GraphItem, ...], route: Route) -> None:
        """Take values that another process sent."""
        for item in items:
            if len(item) == m.PLAIN_VALUE:
                self._take(item[0], item[1])
            elif (value := value_of(item)) is not None:
                self._take(item[0], value)
            else:
                fetching = self._fetch(item, route)
                self.participant.context.process.tasks.create_task(fetching, name="fetch a value of a graph")

    async def _fetch(self, item: m.GraphItem, route: Route) -> None:
        self._take(item[0], await fetch(self.participant.context.objects, route, item))

    def _take(self, index: int, value: Flowing, *, at_once: bool = True) -> None:
        if type(value) is GraphValue:
            value.uses = self.participant.plan.uses[index]
        ready = self.take(index, value)
        if ready:
            self._start(ready, at_once=at_once)
        if not self.to_come:
            self._forget_if_done()

    def _start(self, segments: Sequence[int], *, at_once: bool = True) -> None:
        """Start segments that waited for a value (for `at_once` see `HostedActor.look_again`)."""
        if self.calls:
            for segment in segments:
                call = self.calls[self.needs.strands[segment]]
                if segment == call.waits_at:
                    call.pause.wake()
                elif segment == call.strand.first and call.handle(FETCHED):
                    call.hosted.look_again(at_once=at_once)

    # Results of the steps of this process.

    def give(self, step: BoundStep, value: GraphValue, stored: StoredValue) -> None:
        """Send an encoded result to its receivers, as soon as it is ready."""
        if stored.ready and not step.result.outlives(is_inline=stored.is_inline):
            self.tell(step, value, stored)
        else:
            self.unfinished += 1
            giving = self._give_later(step, value, stored)
            self.participant.context.process.tasks.create_task(giving, name="give a value of a graph")

    async def _give_later(self, step: BoundStep, value: GraphValue, stored: StoredValue) -> None:
        objects = self.participant.context.objects
        try:
            if step.result.outlives(is_inline=stored.is_inline):
                await value.fetch_own(objects)
            else:
                await objects.store.make_ready(stored)
        except Exception as error:  # noqa: BLE001 - the steps that need the value fail with the error
            stored.release()
            self.tell(step, GraphValue.of_error(error, executed=True))
        else:
            self.tell(step, value, stored)
        self._one_finished()

    def tell(self, step: BoundStep, value: Flowing, stored: StoredValue | None = None) -> None:
        """Send a result to its receivers: plain, an error, or stored and ready."""
        participant, index, result = self.participant, step.index, step.result
        is_plain = type(value) is not GraphValue
        item: m.GraphItem = (index, value)
        if stored is not None and stored.refs:
            participant.pins.setdefault(self.number, []).extend(stored.refs)
        if result.awaited:
            self._start(self.put(index, value))
        for route in step.routes:
            if not is_plain:
                item = item_of(value, index, participant.context.objects.refs, route, executed=True)
            route.send((m.FLOW, self.owner, participant.number, self.number, (item,)))
        if result.reported and participant.route.lost is None:
            if not (is_plain and step.is_output):
                item, stored = self._report(step, value, stored)
            participant.route.send((m.REPORT, participant.number, self.number, (item,)))
        if stored is not None:
            # After the release, grants keep the block until the other processes have read it.
            if result.used:
                self._read_here = [*(self._read_here or ()), stored]
            else:
                stored.release()

    def _report(
        self, step: BoundStep, value: Flowing, stored: StoredValue | None
    ) -> tuple[m.GraphItem, StoredValue | None]:
        """What the owner is told of a result, and what is to be released: not what stays here for the owner."""
        participant, result = self.participant, step.result
        objects = participant.context.objects
        stays = stored is not None and not (stored.ready and stored.is_inline)
        report = result.report(failed=stored is None and type(value) is GraphValue, stays=stays)
        if report is Report.VALUE:
            return item_of(value, step.index, objects.refs, participant.route, executed=True), stored
        if report is Report.STORED and stored is not None and result.output is not None:
            objects.store.entries[participant.owner, self.numbers[result.output]] = stored
            stored = None
        return (step.index,), stored

    # Ends.

    def lost(self, remote: PeerId, error: DaftError) -> None:
        """Fail the values that a lost process has not sent."""
        expected = self.expected_from(remote)
        for index in expected:
            self._take(index, GraphValue.of_error(copy_error(error), executed=error.executed), at_once=False)
        if expected:
            self.tell_owner(error)

    def tell_owner(self, why: DaftError) -> None:
        """Tell the owner that a step has failed, so that the other strands do not wait for it in collectives."""
        participant = self.participant
        participant.context.agent_of(self.owner).step_failed.tell(participant.number, self.number, why)

    def note_failure(self, why: DaftError) -> None:
        """Another step of the run has failed, in some process."""
        for call in self.calls:
            if not call.answered:
                call.hosted.undone(call, why)

    def skip(self) -> None:
        """Cancel the strands: the owner needs no result any more."""
        for call in self.calls:
            if not call.answered:
                call.hosted.cancel(call)

    def _one_finished(self) -> None:
        self.unfinished -= 1
        self._forget_if_done()

    def _forget_if_done(self) -> None:
        if self.end():
            self.calls = ()
            self.participant.forget(self)
            for stored in self._read_here or ():
                stored.release()

    # As the caller of its strands.

    # The results of its steps are told already; it has none of its own.
    is_local = True

    def answer(self, call: InboundCall, result: Any) -> None:
        """Note that a strand is over."""
        assert isinstance(call, StrandCall)
        if call.rules.on_thread:
            call.flush()
        after = NEXT[ANSWER].get(call.stage)
        if after is not None:
            call.stage = after
            self.unfinished -= 1
            self._forget_if_done()

    def fail(self, call: InboundCall, error: BaseException, *, executed: bool | None) -> None:
        """Fail the remaining steps of a strand that ends early."""
        assert isinstance(call, StrandCall)
        if not call.answered:
            call.flush()
            call.fail_rest(error, executed=executed if call.waits_at is None else False)
            self._one_finished()

    def turn_away(self, call: InboundCall) -> None:
        """Fail a strand of an actor that moves to another process: a run has one plan."""
        self.fail(call, ActorDied(f"{call.hosted.name} was stopped: {call.hosted.stopping}"), executed=False)

    def answer_stored(self, call: InboundCall, stored: StoredValue | Small) -> None:
        raise AssertionError("strands give their results themselves")

    async def item(self, call: InboundCall, value: Any) -> None:
        raise AssertionError("strands are no streams")


class StrandCall(InboundCall):
    """A strand in one run, from the beginning of the run to the last step."""

    # The owner has no number for a strand: its results go to where the plan says.
    number = CallId(0)
    mode = WANT_REPLY
    # Number of steps that gave their results.
    _given = 0
    # The future of its wait between two steps (see `waits_at`).
    pause: Wakeup
    # On the thread: results that the loop has not given yet.
    _batch: deque[Flowing]

    def __init__(self, run: ParticipantRun, strand: BoundStrand) -> None:
        self.run = self.responder = run
        self.strand = strand
        self.caller = run.owner
        self.hosted = strand.hosted
        self.spec = strand.spec
        self.rules = strand.rules
        if strand.rules.on_thread:
            self._token = [None]
            self._batch = deque()

    @property
    def label(self) -> str:
        """The step that runs or is the next to run."""
        steps = self.strand.steps
        return steps[min(self._given, len(steps) - 1)].label

    @property
    def within(self) -> Hashable:
        """The run."""
        return self.run.owner, self.run.participant.number, self.run.number

    # For the deadlock search.

    @property
    def call_at(self) -> CallAt:
        return self.run.needs.maker_of(self.run.number, self.strand.steps[0].index)

    def waits_for(self) -> list[CallAt]:
        """The strands that make the missing arguments; nothing if an input of the graph is missing."""
        needs = self.run.needs
        segment = needs.plan.segments[self.strand.first if self.waits_at is None else self.waits_at]
        return [needs.maker_of(self.run.number, value) for value in self.run.awaits(segment.needs)]

    def handle(self, event: Event) -> bool:
        """Move on. A strand that was given up holds up no later call, also if its step does not end."""
        moves = super().handle(event)
        if moves and event is CANCEL and self.begun:
            self.hosted.last_begun(self)
        return moves

    # Execution.

    def deliver(self) -> None:
        """Put the strand into the mailbox of its actor."""
        if self.strand.is_gone:
            self.run.fail(self, ActorDied("the actor was stopped", executed=False), executed=False)
            return
        # Not before: it is a reference to itself.
        self.args = (self,)
        self.hosted.deliver(self)

    @staticmethod
    async def execute(instance: Any, call: StrandCall) -> None:
        """Execute the steps, as a method of the actor; an error of a step is its value.

        On the actor's thread, nothing in here waits on the loop: it runs through at once.
        """
        # It would keep itself alive.
        call.args = ()
        values, missing, on_thread = call.run.values, call.run.missing, call.rules.on_thread
        argument: Any
        args: Any
        kwargs: Any
        result: Any
        value: Any
        for step in call.strand.steps:
            if call.stage in GIVEN_UP:
                # The step before ignored its cancellation, or ran on the thread.
                raise asyncio.CancelledError
            executed = False
            try:
                if step.segment is not None and missing[step.segment]:
                    # Of the step before: they must not live as long as this wait.
                    argument = args = kwargs = result = value = None
                    await call._pause(step.segment)
                    # Not if this wait is cancelled: the step has not begun.
                    call.waits_at = None
                if step is call.strand.last:
                    # Calls behind a strand of several steps may start.
                    call.hosted.last_begun(call)
                if step.only is None or type(argument := values[step.only]) is GraphValue:
                    args, kwargs = await call._arguments(step)
                    executed = True
                    result = step.fn(instance, *args, **kwargs)
                else:
                    executed = True
                    result = step.fn(instance, argument)
                if not on_thread:
                    result = await result
                if call.stage is LATE:
                    return
                value = result if is_plain(result) else GraphValue(stored=await call._store(step, result))
            except BaseException as error:  # noqa: BLE001 - raised again there if it ends the strand
                value, call.waits_at = call._caught(step, error, executed), None
            values[step.index] = value
            if on_thread:
                call._collect(step, value)
            elif type(value) is GraphValue:
                call._give(value)
            else:
                # `_give` for the usual case.
                call._given += 1
                if step.leaves_segment and call.stage not in ANSWERED:
                    call.run.tell(step, value)

    def _pause(self, segment: int) -> Wakeup:
        """What wakes the strand when a segment has its values."""
        self.waits_at = segment
        self.pause = wakeup = Wakeup(self.strand.context.objects.wakeups)
        return wakeup

    def _collect(self, step: BoundStep, value: Flowing) -> None:
        """On the thread: leave a result to the loop."""
        self._batch.append(value)
        if step is not self.strand.steps[-1] and step.leaves_segment:
            self.hosted.thread.to_loop(self.flush)

    def _is_ended_by(self, error: BaseException) -> bool:
        """Whether the process ends, or the actor has ended the strand: it knows why, and that holds for all steps."""
        if isinstance(error, SystemExit | KeyboardInterrupt):
            return True
        if self.rules.on_thread:
            return False
        return (self.given_up and isinstance(error, asyncio.CancelledError)) or self.hosted.is_late(self, error)

    async def _store(self, step: BoundStep, result: Any) -> StoredValue:
        """Encode a result and copy its buffers before the actor can change it."""
        store = self.strand.context.objects.store
        if self.rules.on_thread:
            stored = store.keep_patiently(result, step.label, step.transport)
            store.pack_here(stored)
        else:
            stored = await self.hosted.capture(result, step.label, "result", step.transport)
            await store.pack(stored)
        if step.timing is not None:
            step.timing.stored(stored)
        return stored

    async def _fetch_own(self, step: BoundStep) -> None:
        """Fetch the arguments of a step that this process made."""
        for slot in step.slots:
            value = self.run.values.get(slot)
            if type(value) is GraphValue and value.stored is not None:
                await value.fetch_own(self.strand.context.objects)

    async def _arguments(self, step: BoundStep) -> tuple[Any, Any]:
        """Make the arguments of a step. Waits only on the loop."""
        on_thread = self.rules.on_thread
        try:
            return self._decode(step, patient=on_thread)
        except NeedsFetch:
            fetching = self._fetch_own(step)
            if on_thread:
                asyncio.run_coroutine_threadsafe(fetching, self.strand.context.process.loop).result()
            else:
                await fetching
            return self._decode(step, patient=on_thread)

    def _decode(self, step: BoundStep, *, patient: bool) -> tuple[Any, Any]:
        store, values = self.strand.context.objects.store, self.run.values
        taken: list[Any]
        if step.outside:
            taken = [step.outside[-slot - 1] if slot < 0 else values[slot] for slot in step.slots]
        else:
            taken = [*map(values.__getitem__, step.slots)]
        if GraphValue in map(type, taken):
            encoded = [
                (slot, value) for slot, value in zip(step.slots, taken, strict=True) if type(value) is GraphValue
            ]
            for slot, value in encoded:
                if value.failure is not None:
                    source = step.sources.get(slot, "a ref from outside the graph")
                    raise InputFailed(value.error_for(self._named(step), source))
            taken = [value.take(store, patient=patient) if type(value) is GraphValue else value for value in taken]
            for _, value in encoded:
                value.used()
        return (taken, _NO_KWARGS) if step.is_bare else step.data.make(store, taken, patient=patient)

    def _named(self, step: BoundStep) -> str:
        return f"{step.label} of {self.hosted.name}"

    def _caught(self, step: BoundStep, error: BaseException, executed: bool) -> GraphValue:
        """The error of a step as its value; raised again if it ends the strand."""
        if self._is_ended_by(error):
            raise
        if isinstance(error, InputFailed):
            return GraphValue.of_error(error.error, executed=False)
        self._tell_others(failed_beside(self._named(step), error))
        caught = as_call_error(error, f"{step.label} in {self.hosted.where}")
        self.run.participant.context.process.call_soon(partial(self.hosted.note_failure, step.label, caught))
        add_note(caught, f"a step of a graph, captured at {step.line}")
        return GraphValue.of_error(caught, executed=executed)

    def _tell_others(self, why: DaftError) -> None:
        """This strand takes part in no collective any more, and the others do not wait for it."""
        self.run.participant.context.process.call_soon(partial(self.hosted.undone, self, None))
        self.run.tell_owner(why)

    # Results, on the loop.

    def flush(self) -> None:
        """Give the results that the thread has made."""
        while self.rules.on_thread and self._batch:
            self._give(self._batch.popleft())

    def _give(self, value: Flowing) -> None:
        stored = value.stored if type(value) is GraphValue else None
        if self.stage in ANSWERED:
            # The strand was given up, and its receivers know.
            if stored is not None:
                stored.release()
            return
        step = self.strand.steps[self._given]
        self._given += 1
        if stored is None:
            self.run.tell(step, value)
        else:
            self.run.give(step, cast("GraphValue", value), stored)

    def fail_rest(self, error: BaseException, *, executed: bool | None) -> None:
        """Fail the remaining steps: the first of a segment with the error, others because of the step before them."""
        value = GraphValue.of_error(error, executed=executed)
        before: BoundStep | None = None
        for step in self.strand.steps[self._given :]:
            if before is not None and step.segment is not None:
                value = GraphValue.of_error(error, executed=False)
            elif before is not None:
                value = GraphValue.of_error(value.error_for(self._named(step), self._named(before)), executed=False)
            self.run.tell(step, value)
            before = step
        self.handle(ANSWER)
        self.args = ()
