"""Rows: steps of a graph that one actor does one after the other, as one call in its mailbox."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final, cast

from aiodaft._protocol.ids import CallId
from aiodaft._protocol.mailbox import Rules
from aiodaft._protocol.messages import WANT_REPLY
from aiodaft._protocol.plan import Segment, Step
from aiodaft._runtime.actors.hosted_actor import InboundCall
from aiodaft._runtime.graphs.graph_value import Flowing, GraphValue, NotAtHand
from aiodaft._runtime.serialization.encoder import is_plain
from aiodaft._runtime.serialization.errors import add_note, as_call_error
from aiodaft.exceptions import ActorDied
from aiodaft.methods import MethodSpec, Options

if TYPE_CHECKING:
    from aiodaft._runtime.actors.hosted_actor import HostedActor
    from aiodaft._runtime.graphs.captured_call import Arguments
    from aiodaft._runtime.graphs.participant import Participant, ParticipantRun
    from aiodaft._runtime.objects.store import Store

_NO_KWARGS: Final[dict[str, Any]] = {}


class InputFailed(Exception):
    """A step cannot run: one of its arguments is an error."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class Job:
    """What all runs know of a step."""

    def __init__(self, part: Participant, position: int, method: MethodSpec) -> None:
        plan = part.plan
        step = plan.steps[position]
        self.position = position
        self.index = index = plan.values[position]
        self.label = step.label
        self.line = step.line
        self.data = step.data
        self.slots = step.data.slots
        # Its arguments are the values of the slots, as they are.
        self.bare = step.data.flat is not None and all(is_slot for is_slot, _ in step.data.flat)
        self.fn = method.fn
        self.transport = method.transport
        # Who gets its result: rows of this process; others; the owner, who has given it a number if it is an output.
        self.waited = index in part.waiting
        self.flows = tuple([part.routes[remote] for remote in plan.sends[index]])
        self.reported = index in plan.reports
        self.place = plan.outputs.index(index) if index in plan.outputs else None
        # Steps of this process use it.
        self.used = index in plan.uses
        # Somebody outside the row waits for it.
        self.leaves = self.waited or self.reported or bool(self.flows)


class SegmentRun:
    """What all runs know of a row."""

    def __init__(self, part: Participant, segment: Segment) -> None:
        steps = [part.plan.steps[position] for position in segment.steps]
        _, actor = steps[0].actor
        rules = steps[0].rules
        hosted = part.peer.actors.get(actor)
        # Without it, no run of this row gets as far as to need it.
        self.is_gone = hosted is None
        self.hosted = cast("HostedActor", hosted)
        self.jobs = [
            Job(part, position, self._method(step)) for position, step in zip(segment.steps, steps, strict=True)
        ]
        # Where it matters that the last one begins.
        self.last = self.jobs[-1] if len(steps) > 1 else None
        self.rules = Rules(rules.name, rules.on_thread, rules.ordered, rules.concurrency, row=len(steps) > 1)
        self.spec = MethodSpec(
            steps[0].label,
            rules.name,
            SegmentCall.run_on_thread if rules.on_thread else SegmentCall.run_on_loop,
            Options(self.rules),
        )

    def _method(self, step: Step[Arguments]) -> MethodSpec:
        if self.is_gone:
            # Every run will say so.
            return MethodSpec(step.label, step.data.method, _missing, Options(step.rules))
        spec = self.hosted.find_spec(step.data.method)
        if spec is None:
            raise AttributeError(f"{self.hosted.name} has no remote method {step.data.method!r:.80} ({step.line})")
        return spec


class SegmentCall(InboundCall):
    """A row in one run, from its run's beginning to its end."""

    # Nobody asks for these: its results go where the plan says.
    number = CallId(0)
    mode = WANT_REPLY
    # Steps whose results were given; results that the thread made.
    _given = 0
    _batch: deque[Flowing] | None = None

    def __init__(self, run: ParticipantRun, row: SegmentRun) -> None:
        self.run = self.responder = run
        self.row = row
        self.caller = run.part.owner
        self.hosted = row.hosted
        self.spec = row.spec
        self.rules = row.rules
        if row.rules.on_thread:
            self._token = [None]
            self._batch = deque()

    @property
    def label(self) -> str:
        """The step that runs, or is the next to."""
        return self.row.jobs[min(self._given, len(self.row.jobs) - 1)].label

    def deliver(self) -> None:
        """Put it into its actor's mailbox."""
        if self.row.is_gone:
            error = ActorDied("the actor was stopped", executed=False)
            self.run.fail(self, error, executed=False)
            return
        # Only now: it knows itself.
        self.args = (self,)
        self.hosted.deliver(self)

    # Running.

    @staticmethod
    async def run_on_loop(instance: Any, call: SegmentCall) -> None:
        """Do the steps on the loop, as a method of the actor; an error of a step is its value."""
        # It would keep itself alive.
        call.args = ()
        hosted, row = call.hosted, call.row
        value: Flowing
        for job in row.jobs:
            if job is not row.jobs[0] and call.given_up:
                # The step before this one ignored its cancellation.
                raise asyncio.CancelledError
            if job is row.last:
                hosted.last_begun(call)
            executed = False
            try:
                try:
                    args, kwargs = call._arguments(job, patient=False)
                except NotAtHand:
                    await call._fetch_own(job)
                    args, kwargs = call._arguments(job, patient=False)
                executed = True
                result = await job.fn(instance, *args, **kwargs)
                if call.late:
                    return
                if is_plain(result):
                    value = result
                else:
                    stored = await hosted.capture(result, job.label, "result", job.transport)
                    await call.run.part.peer.store.pack(stored)
                    value = GraphValue.of_kept(stored)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                if hosted.is_late(call, error) or (call.given_up and isinstance(error, asyncio.CancelledError)):
                    # Its actor knows why, and that goes for all that is left.
                    raise
                value = call._failure(job, error, executed)
            call.run.values[job.index] = value
            call._give(value)

    @staticmethod
    def run_on_thread(instance: Any, call: SegmentCall) -> None:
        """Do the steps on the actor's thread, as a method of the actor; no error of theirs leaves this."""
        # It would keep itself alive.
        call.args = ()
        store, batch = call.run.part.peer.store, call._batch
        assert batch is not None
        row = call.row
        value: Flowing
        for job in row.jobs:
            if call.given_up:
                # The steps that are left have failed already.
                return
            if job is row.last:
                call.hosted.last_begun(call)
            executed = False
            try:
                try:
                    args, kwargs = call._arguments(job, patient=True)
                except NotAtHand:
                    peer = call.run.part.peer
                    asyncio.run_coroutine_threadsafe(call._fetch_own(job), peer.process.loop).result()
                    args, kwargs = call._arguments(job, patient=True)
                executed = True
                result = job.fn(instance, *args, **kwargs)
                if is_plain(result):
                    value = result
                else:
                    kept = store.keep_patiently(result, job.label, job.transport)
                    store.pack_here(kept)
                    value = GraphValue.of_kept(kept)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - whatever a method raises is its caller's
                value = call._failure(job, error, executed)
            call.run.values[job.index] = value
            batch.append(value)
            if job.leaves and job is not row.jobs[-1]:
                call.hosted.thread.to_loop(call.flush)

    async def _fetch_own(self, job: Job) -> None:
        """Fetch what a step needs and was made in this process."""
        for slot in job.slots:
            value = self.run.values.get(slot)
            if type(value) is GraphValue and value.kept is not None:
                await value.fetch_own(self.run.part.peer)

    def _arguments(self, job: Job, *, patient: bool) -> tuple[Any, Any]:
        store, values = self.run.part.peer.store, self.run.values
        taken: list[Any]
        if job.data.outside:
            outside = self.run.part.outside
            taken = [outside[job.position, -slot - 1] if slot < 0 else values[slot] for slot in job.slots]
        else:
            taken = [*map(values.__getitem__, job.slots)]
        if GraphValue in map(type, taken):
            taken = self._decode(job, taken, store, patient=patient)
        return (taken, _NO_KWARGS) if job.bare else job.data.make(store, taken, patient=patient)

    def _decode(self, job: Job, values: list[Flowing], store: Store, *, patient: bool) -> list[Any]:
        encoded: list[GraphValue] = []
        for slot, value in zip(job.slots, values, strict=True):
            if type(value) is GraphValue:
                if value.failure is not None:
                    source = self.run.part.plan.labels.get(slot, "a ref from outside the graph")
                    raise InputFailed(value.error_for(self._named(job), source))
                encoded.append(value)
        taken = [value.take(store, patient=patient) if type(value) is GraphValue else value for value in values]
        for value in encoded:
            value.used()
        return taken

    def _named(self, job: Job) -> str:
        return f"{job.label} of {self.hosted.name}"

    def _failure(self, job: Job, error: BaseException, executed: bool) -> GraphValue:
        if isinstance(error, InputFailed):
            return GraphValue.of_error(error.error, executed=False)
        caught = as_call_error(error, f"raised by {job.label} in {self.hosted.where}")
        add_note(caught, f"a step of a graph, captured at {job.line}")
        return GraphValue.of_error(caught, executed=executed)

    # Its results, on the loop.

    def flush(self) -> None:
        """Give what the thread has made."""
        while self._batch:
            self._give(self._batch.popleft())

    def _give(self, value: Flowing) -> None:
        if self.over:
            # It was given up, and everybody has been told.
            if type(value) is GraphValue and value.kept is not None:
                value.kept.release()
            return
        job = self.row.jobs[self._given]
        self._given += 1
        self.run.give(job, value)

    def give_up(self, error: BaseException, *, executed: bool | None) -> None:
        """There will be no more results."""
        value = GraphValue.of_error(error, executed=executed)
        for number in range(self._given, len(self.row.jobs)):
            job = self.row.jobs[number]
            if number > self._given:
                before = self.row.jobs[number - 1]
                value = GraphValue.of_error(value.error_for(self._named(job), self._named(before)), executed=False)
            self.run.give(job, value)
        self.over = True
        self.args = ()


def _missing(*args: Any) -> None:
    raise AssertionError("the actor of this step is gone")
