"""Segments: steps of a graph that one actor executes one after the other, as one call in its mailbox."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Protocol, cast

from aiodaft._protocol.call import ANSWER, ANSWERED, GIVEN_UP, LATE
from aiodaft._protocol.deadlock import CallAt
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.mailbox import Rules
from aiodaft._protocol.messages import WANT_REPLY
from aiodaft._protocol.plan import Segment, Step, SubPlan
from aiodaft._runtime.actors.hosted_actor import HostedActor, InboundCall, Responder, run_through
from aiodaft._runtime.connections.route import Route
from aiodaft._runtime.graphs.captured_call import Arguments
from aiodaft._runtime.graphs.context import GraphContext
from aiodaft._runtime.graphs.graph_value import Flowing, GraphValue, NeedsFetch
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.serialization.encoder import is_plain
from aiodaft._runtime.serialization.errors import add_note, as_call_error
from aiodaft.exceptions import ActorDied
from aiodaft.methods import MethodSpec, Options

_NO_KWARGS: Final[dict[str, Any]] = {}


class InputFailed(Exception):
    """A step cannot run: one of its arguments is an error."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class BoundStep:
    """A step of a plan in the process that executes it, the same for all runs."""

    def __init__(
        self,
        plan: SubPlan[Arguments],
        position: int,
        method: MethodSpec,
        routes: Mapping[PeerId, Route],
        awaited: Collection[int],
    ) -> None:
        step = plan.steps[position]
        self.index = index = plan.values[position]
        self.label = step.label
        self.line = step.line
        self.data = step.data
        self.slots = step.data.slots
        self.is_bare = step.data.is_bare
        self.fn = method.fn
        self.transport = method.transport
        # The values of refs from outside the graph.
        self.outside: list[GraphValue] = []
        self.sources = plan.labels
        # The receivers of the result: steps of this process, segments of it, other participants, the owner.
        self.is_used = index in plan.uses
        self.is_awaited = index in awaited
        self.routes = [routes[remote] for remote in plan.sends[index]]
        self.is_reported = index in plan.reports
        # Its place among the outputs of this process, which the owner has given numbers.
        self.place = plan.outputs.index(index) if index in plan.outputs else None

    @property
    def leaves_segment(self) -> bool:
        """Whether the result is needed before the segment is over."""
        return self.is_awaited or self.is_reported or bool(self.routes)


class BoundSegment:
    """A segment of a plan in the process that executes it, the same for all runs."""

    def __init__(
        self,
        context: GraphContext,
        plan: SubPlan[Arguments],
        segment: Segment,
        routes: Mapping[PeerId, Route],
        awaited: Collection[int],
    ) -> None:
        """Find the actor and its methods. `awaited` are the values that segments of this process wait for.

        Raises:
            AttributeError: The actor has no such method.
        """
        self.context = context
        steps = [plan.steps[position] for position in segment.steps]
        _, actor = steps[0].actor
        hosted = context.actors.get(actor)
        # Without the actor, each run fails before it needs it.
        self.is_gone = hosted is None
        self.hosted = cast("HostedActor", hosted)
        self.needs = segment.needs
        self.steps = [
            BoundStep(plan, position, self._method(step), routes, awaited)
            for position, step in zip(segment.steps, steps, strict=True)
        ]
        # The calls behind a segment of several steps may start when the last step has begun.
        self.last = self.steps[-1] if len(steps) > 1 else None
        rules = steps[0].rules
        self.rules = Rules(rules.name, rules.on_thread, rules.ordered, rules.concurrency, segment=len(steps) > 1)
        execute = _execute_on_thread if rules.on_thread else SegmentCall.execute
        self.spec = MethodSpec(steps[0].label, rules.name, execute, Options(self.rules))

    def _method(self, step: Step[Arguments]) -> MethodSpec:
        if self.is_gone:
            return MethodSpec(step.label, step.data.method, _missing, Options(step.rules))
        spec = self.hosted.find_spec(step.data.method)
        if spec is None:
            raise AttributeError(f"{self.hosted.name} has no remote method {step.data.method!r:.80} ({step.line})")
        return spec


class SegmentCaller(Responder, Protocol):
    """What a segment needs of its run; see `ParticipantRun`."""

    @property
    def owner(self) -> PeerId: ...

    @property
    def values(self) -> dict[int, Flowing]: ...

    def give(self, step: BoundStep, value: Flowing) -> None: ...

    def call_at(self, value: int) -> CallAt: ...

    def makers_of(self, values: Sequence[int]) -> list[CallAt]: ...


class SegmentCall(InboundCall):
    """A segment in one run, from the beginning of the run to the last step."""

    # The owner has no number for a segment: its results go to where the plan says.
    number = CallId(0)
    mode = WANT_REPLY
    # Number of steps that gave their results.
    _given = 0
    # On the thread: results that the loop has not given yet.
    _batch: deque[Flowing]

    def __init__(self, run: SegmentCaller, segment: BoundSegment) -> None:
        self.run = self.responder = run
        self.segment = segment
        self.caller = run.owner
        self.hosted = segment.hosted
        self.spec = segment.spec
        self.rules = segment.rules
        if segment.rules.on_thread:
            self._token = [None]
            self._batch = deque()

    @property
    def label(self) -> str:
        """The step that runs or is the next to run."""
        steps = self.segment.steps
        return steps[min(self._given, len(steps) - 1)].label

    @property
    def call_at(self) -> CallAt:
        """What the deadlock search calls the segment."""
        return self.run.call_at(self.segment.steps[0].index)

    def waits_for(self) -> list[CallAt]:
        """The segments that make the missing arguments; nothing if an input of the graph is missing."""
        return self.run.makers_of(self.segment.needs)

    def makes(self, value: int) -> bool:
        """Whether a value is the result of one of the steps."""
        return any(step.index == value for step in self.segment.steps)

    def deliver(self) -> None:
        """Put the segment into the mailbox of its actor."""
        if self.segment.is_gone:
            error = ActorDied("the actor was stopped", executed=False)
            self.run.fail(self, error, executed=False)
            return
        # Not before: it is a reference to itself.
        self.args = (self,)
        self.hosted.deliver(self)

    # Execution.

    @staticmethod
    async def execute(instance: Any, call: SegmentCall) -> None:
        """Execute the steps, as a method of the actor; an error of a step is its value.

        On the actor's thread, nothing in here waits on the loop: it runs through at once.
        """
        # It would keep itself alive.
        call.args = ()
        segment, hosted, on_thread = call.segment, call.hosted, call.rules.on_thread
        store = segment.context.objects.store
        value: Flowing
        for step in segment.steps:
            if call.stage in GIVEN_UP:
                # The step before ignored its cancellation, or ran on the thread.
                raise asyncio.CancelledError
            if step is segment.last:
                hosted.last_begun(call)
            executed = False
            try:
                try:
                    args, kwargs = call._arguments(step, patient=on_thread)
                except NeedsFetch:
                    fetching = call._fetch_own(step)
                    if on_thread:
                        asyncio.run_coroutine_threadsafe(fetching, segment.context.process.loop).result()
                    else:
                        await fetching
                    args, kwargs = call._arguments(step, patient=on_thread)
                executed = True
                result: Any = step.fn(instance, *args, **kwargs)
                if not on_thread:
                    result = await result
                if call.stage is LATE:
                    return
                value = result if is_plain(result) else GraphValue.of_stored(await call._store(step, result, store))
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                if call._is_ended_by(error):
                    raise
                value = call._failure(step, error, executed)
            call.run.values[step.index] = value
            if on_thread:
                call._collect(step, value)
            else:
                call._give(value)

    def _collect(self, step: BoundStep, value: Flowing) -> None:
        """On the thread: leave a result to the loop."""
        self._batch.append(value)
        if step is not self.segment.steps[-1] and step.leaves_segment:
            self.hosted.thread.to_loop(self.flush)

    def _is_ended_by(self, error: BaseException) -> bool:
        """Whether the actor has ended the segment. It knows the reason, which holds for all remaining steps."""
        if self.rules.on_thread:
            return False
        return (self.given_up and isinstance(error, asyncio.CancelledError)) or self.hosted.is_late(self, error)

    async def _store(self, step: BoundStep, result: Any, store: Store) -> StoredValue:
        """Encode a result and copy its buffers before the actor can change it."""
        if self.rules.on_thread:
            stored = store.keep_patiently(result, step.label, step.transport)
            store.pack_here(stored)
        else:
            stored = await self.hosted.capture(result, step.label, "result", step.transport)
            await store.pack(stored)
        return stored

    async def _fetch_own(self, step: BoundStep) -> None:
        """Fetch the arguments of a step that this process made."""
        context = self.segment.context
        for slot in step.slots:
            value = self.run.values.get(slot)
            if type(value) is GraphValue and value.stored is not None:
                await value.fetch_own(context.objects)

    def _arguments(self, step: BoundStep, *, patient: bool) -> tuple[Any, Any]:
        store, values = self.segment.context.objects.store, self.run.values
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

    def _failure(self, step: BoundStep, error: BaseException, executed: bool) -> GraphValue:
        if isinstance(error, InputFailed):
            return GraphValue.of_error(error.error, executed=False)
        caught = as_call_error(error, f"raised by {step.label} in {self.hosted.where}")
        add_note(caught, f"a step of a graph, captured at {step.line}")
        return GraphValue.of_error(caught, executed=executed)

    # Results, on the loop.

    def flush(self) -> None:
        """Give the results that the thread has made."""
        while self.rules.on_thread and self._batch:
            self._give(self._batch.popleft())

    def _give(self, value: Flowing) -> None:
        if self.stage in ANSWERED:
            # The segment was given up, and its receivers know.
            if type(value) is GraphValue and value.stored is not None:
                value.stored.release()
            return
        step = self.segment.steps[self._given]
        self._given += 1
        self.run.give(step, value)

    def give_up(self, error: BaseException, *, executed: bool | None) -> None:
        """Fail the remaining steps: the first with the error, each other one because of the step before it."""
        value = GraphValue.of_error(error, executed=executed)
        before: BoundStep | None = None
        for step in self.segment.steps[self._given :]:
            if before is not None:
                value = GraphValue.of_error(value.error_for(self._named(step), self._named(before)), executed=False)
            self.run.give(step, value)
            before = step
        self.handle(ANSWER)
        self.args = ()


def _execute_on_thread(instance: Any, call: SegmentCall) -> None:
    run_through(SegmentCall.execute(instance, call))


def _missing(*args: Any) -> None:
    raise AssertionError("the actor of this step is gone")
