"""Segments: steps of a graph that one actor executes one after the other, as one call in its mailbox."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Protocol, cast

from aiodaft._protocol.deadlock import CallAt
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.mailbox import Rules
from aiodaft._protocol.messages import WANT_REPLY
from aiodaft._protocol.plan import Segment, Step, SubPlan
from aiodaft._runtime.actors.hosted_actor import HostedActor, InboundCall, Responder
from aiodaft._runtime.connections.route import Route
from aiodaft._runtime.graphs.captured_call import Arguments
from aiodaft._runtime.graphs.context import GraphContext
from aiodaft._runtime.graphs.graph_value import Flowing, GraphValue, NeedsFetch
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
        self.rules = Rules(rules.name, rules.on_thread, rules.ordered, rules.concurrency, row=len(steps) > 1)
        execute = SegmentCall.run_on_thread if rules.on_thread else SegmentCall.run_on_loop
        self.spec = MethodSpec(steps[0].label, rules.name, execute, Options(self.rules))

    def _method(self, step: Step[Arguments]) -> MethodSpec:
        if self.is_gone:
            return MethodSpec(step.label, step.data.method, _missing, Options(step.rules))
        spec = self.hosted.find_spec(step.data.method)
        if spec is None:
            raise AttributeError(f"{self.hosted.name} has no remote method {step.data.method!r:.80} ({step.line})")
        return spec


class SegmentCaller(Responder, Protocol):
    """What a segment needs of its run."""

    @property
    def owner(self) -> PeerId:
        """The owner of the graph."""
        ...

    @property
    def values(self) -> dict[int, Flowing]:
        """The values of the run in this process, by number."""
        ...

    def give(self, step: BoundStep, value: Flowing) -> None:
        """Take the result of a step."""
        ...

    def call_at(self, value: int) -> CallAt:
        """What the deadlock search calls the segment that makes a value."""
        ...

    def makers_of(self, values: Sequence[int]) -> list[CallAt]:
        """The segments that make those of the values that have not come; nothing if inputs are among them."""
        ...


class SegmentCall(InboundCall):
    """A segment in one run, from the beginning of the run to the last step."""

    # The owner has no number for a segment: its results go to where the plan says.
    number = CallId(0)
    mode = WANT_REPLY
    # Number of steps that gave their results.
    _given = 0
    # Results that the thread made and the loop has not given yet.
    _batch: deque[Flowing] | None = None

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
    async def run_on_loop(instance: Any, call: SegmentCall) -> None:
        """Execute the steps on the loop, as a method of the actor; an error of a step is its value."""
        # It would keep itself alive.
        call.args = ()
        segment, hosted = call.segment, call.hosted
        value: Flowing
        for step in segment.steps:
            if call._given and call.given_up:
                # The step before ignored its cancellation.
                raise asyncio.CancelledError
            if step is segment.last:
                hosted.last_begun(call)
            executed = False
            try:
                try:
                    args, kwargs = call._arguments(step, patient=False)
                except NeedsFetch:
                    await call._fetch_own(step)
                    args, kwargs = call._arguments(step, patient=False)
                executed = True
                result = await step.fn(instance, *args, **kwargs)
                if call.late:
                    return
                if is_plain(result):
                    value = result
                else:
                    stored = await hosted.capture(result, step.label, "result", step.transport)
                    await segment.context.objects.store.pack(stored)
                    value = GraphValue.of_stored(stored)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                if hosted.is_late(call, error) or (call.given_up and isinstance(error, asyncio.CancelledError)):
                    # The actor knows the reason, which holds for all remaining steps.
                    raise
                value = call._failure(step, error, executed)
            call.run.values[step.index] = value
            call._give(value)

    @staticmethod
    def run_on_thread(instance: Any, call: SegmentCall) -> None:
        """Execute the steps on the actor's thread, as a method of the actor; an error of a step is its value."""
        # It would keep itself alive.
        call.args = ()
        segment, batch = call.segment, call._batch
        context = segment.context
        assert batch is not None
        value: Flowing
        for step in segment.steps:
            if call.given_up:
                # The remaining steps have failed already.
                return
            if step is segment.last:
                call.hosted.last_begun(call)
            executed = False
            try:
                try:
                    args, kwargs = call._arguments(step, patient=True)
                except NeedsFetch:
                    asyncio.run_coroutine_threadsafe(call._fetch_own(step), context.process.loop).result()
                    args, kwargs = call._arguments(step, patient=True)
                executed = True
                result = step.fn(instance, *args, **kwargs)
                if is_plain(result):
                    value = result
                else:
                    stored = context.objects.store.keep_patiently(result, step.label, step.transport)
                    context.objects.store.pack_here(stored)
                    value = GraphValue.of_stored(stored)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - an error of the method belongs to its caller
                value = call._failure(step, error, executed)
            call.run.values[step.index] = value
            batch.append(value)
            if step is not segment.steps[-1] and step.leaves_segment:
                call.hosted.thread.to_loop(call.flush)

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
        while self._batch:
            self._give(self._batch.popleft())

    def _give(self, value: Flowing) -> None:
        if self.over:
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
        self.over = True
        self.args = ()


def _missing(*args: Any) -> None:
    raise AssertionError("the actor of this step is gone")
