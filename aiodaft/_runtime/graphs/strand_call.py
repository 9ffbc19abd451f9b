"""A strand of a graph in one run: a call of its actor, which executes the steps one after the other."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Protocol, cast

from aiodaft._protocol.calls.mailbox import ANSWER, ANSWERED, CANCEL, GIVEN_UP, LATE, Event, Rules
from aiodaft._protocol.connections.messages import WANT_REPLY
from aiodaft._protocol.diagnostics.failures import CallAt
from aiodaft._protocol.graphs.listing import ValueNote
from aiodaft._protocol.graphs.plan import Step, SubPlan
from aiodaft._protocol.graphs.run import Needs
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._runtime.actors.hosted_actor import HostedActor, InboundCall, Responder
from aiodaft._runtime.connections.route import Route
from aiodaft._runtime.graphs.graph_value import Arguments, Flowing, GraphContext, GraphValue, NeedsFetch
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.platform.tasks import Wakeup, run_through
from aiodaft._runtime.serialization.encoded import kind_of
from aiodaft._runtime.serialization.encoder import is_plain
from aiodaft._runtime.serialization.errors import add_note, as_call_error, failed_beside
from aiodaft.exceptions import ActorDied, DaftError
from aiodaft.methods import MethodSpec, Options


class StepTiming:
    """The time and result of the last call of a step. The method may run on the actor's thread."""

    def __init__(self) -> None:
        self._kind = ""
        self._size: int | None = None
        self._seconds: float | None = None

    @property
    def note(self) -> ValueNote:
        return ValueNote(self._kind, self._size, self._seconds)

    def around(self, fn: Callable[..., Any], *, on_thread: bool) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._clock():
                result = fn(*args, **kwargs)
                self._kind = kind_of(result)
            return result

        async def timed_on_loop(*args: Any, **kwargs: Any) -> Any:
            with self._clock():
                result = await fn(*args, **kwargs)
                self._kind = kind_of(result)
            return result

        return timed if on_thread else timed_on_loop

    @contextmanager
    def _clock(self) -> Generator[None]:
        began = time.perf_counter()
        self._kind, self._size = "", None
        try:
            yield
        finally:
            self._seconds = time.perf_counter() - began

    def stored(self, stored: StoredValue) -> None:
        self._size = size_of(stored)


def size_of(stored: StoredValue) -> int:
    return len(stored.payload) + stored.size


class BoundStep:
    def __init__(
        self,
        plan: SubPlan[Arguments],
        position: int,
        segment: int | None,
        method: MethodSpec,
        routes: Mapping[PeerId, Route],
    ) -> None:
        step = plan.steps[position]
        # The segment that it begins, if another one was before: the strand waits for the values of this one.
        self.segment = segment
        self.result = plan.results[position]
        self.index = self.result.value
        self.label = step.label
        self.line = step.line
        self.data = step.data
        self.slots = step.data.slots
        # The arguments are values of the graph or of refs from outside, as they are.
        self.is_bare = step.data.is_bare
        self.only = self.slots[0] if self.is_bare and len(self.slots) == 1 and self.slots[0] >= 0 else None
        self.is_output = self.result.output is not None
        self.leaves_segment = self.result.leaves_segment
        self.timing = StepTiming() if plan.timed else None
        fn = method.fn
        self.fn = fn if self.timing is None else self.timing.around(fn, on_thread=step.rules.on_thread)
        self.transport = method.transport
        self.outside: list[GraphValue] = []
        self.sources = plan.labels
        self.routes = [routes[remote] for remote in self.result.sends]


class BoundStrand:
    def __init__(
        self,
        context: GraphContext,
        plan: SubPlan[Arguments],
        strand: Sequence[int],
        routes: Mapping[PeerId, Route],
        execute: Callable[..., Coroutine[Any, Any, None]],
    ) -> None:
        """`execute` runs the steps, as a method of the actor.

        Raises:
            AttributeError: The actor has no such method.
        """
        self.context = context
        positions = [position for segment in strand for position in plan.segments[segment].steps]
        begins = {plan.segments[segment].steps[0]: segment for segment in strand[1:]}
        steps = [plan.steps[position] for position in positions]
        _, actor = steps[0].actor
        hosted = context.actors.get(actor)
        # Without the actor, each run fails before it needs it.
        self.is_gone = hosted is None
        self.hosted = cast("HostedActor", hosted)
        self.first = strand[0]
        self.steps = [
            BoundStep(plan, position, begins.get(position), self._method(step), routes)
            for position, step in zip(positions, steps, strict=True)
        ]
        self.last = self.steps[-1] if len(steps) > 1 else None
        rules = steps[0].rules
        self.rules = Rules(rules.name, rules.on_thread, rules.ordered, rules.concurrency, segment=len(steps) > 1)

        def execute_on_thread(*args: Any) -> None:
            run_through(execute(*args))

        fn = execute_on_thread if rules.on_thread else execute
        self.spec = MethodSpec(steps[0].label, rules.name, fn, Options(self.rules))

    def _method(self, step: Step[Arguments]) -> MethodSpec:
        if self.is_gone:
            return MethodSpec(step.label, step.data.method, _missing, Options(step.rules))
        spec = self.hosted.find_spec(step.data.method)
        if spec is None:
            why = self.hosted.refusal
            raise why or AttributeError(
                f"{self.hosted.name} has no remote method {step.data.method!r:.80} ({step.line})"
            )
        return spec


def _missing(*args: Any) -> None:
    raise AssertionError("the actor of this step is gone")


_NO_KWARGS: Final[dict[str, Any]] = {}


class RunOfStrand(Responder, Protocol):
    needs: Needs
    values: dict[int, Flowing]
    missing: list[int]
    owner: PeerId
    number: int

    @property
    def key(self) -> tuple[PeerId, int, int]: ...

    def awaits(self, values: Sequence[int]) -> list[int]: ...

    def tell(self, step: BoundStep, value: Flowing, stored: StoredValue | None = None) -> None: ...

    def give(self, step: BoundStep, value: GraphValue, stored: StoredValue) -> None: ...

    def tell_owner(self, why: DaftError) -> None: ...


class InputFailed(Exception):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class StrandCall(InboundCall):
    # The owner has no number for a strand: its results go to where the plan says.
    number = CallId(0)
    mode = WANT_REPLY
    _given = 0
    pause: Wakeup
    # On the thread: results that the loop has not given yet.
    _batch: deque[Flowing]

    def __init__(self, run: RunOfStrand, strand: BoundStrand) -> None:
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
        steps = self.strand.steps
        return steps[min(self._given, len(steps) - 1)].label

    @property
    def within(self) -> Hashable:
        return self.run.key

    @property
    def call_at(self) -> CallAt:
        return self.run.needs.maker_of(self.run.number, self.strand.steps[0].index)

    def waits_for(self) -> list[CallAt]:
        """The strands that make the missing arguments; nothing if an input of the graph is missing."""
        needs = self.run.needs
        segment = needs.plan.segments[self.strand.first if self.waits_at is None else self.waits_at]
        return [needs.maker_of(self.run.number, value) for value in self.run.awaits(segment.needs)]

    def handle(self, event: Event) -> bool:
        moves = super().handle(event)
        if moves and event is CANCEL and self.begun:
            self.hosted.last_begun(self)
        return moves

    def deliver(self) -> None:
        if self.strand.is_gone:
            self.run.fail(self, ActorDied("the actor was stopped", executed=False), executed=False)
            return
        # Not before: it is a reference to itself.
        self.args = (self,)
        self.hosted.deliver(self)

    @staticmethod
    async def execute(instance: Any, call: StrandCall) -> None:
        """An error of a step is its value. On the actor's thread nothing in here waits on the loop: it runs through at
        once.
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
                call._given += 1
                if step.leaves_segment and call.stage not in ANSWERED:
                    call.run.tell(step, value)

    def _pause(self, segment: int) -> Wakeup:
        self.waits_at = segment
        self.pause = wakeup = Wakeup(self.strand.context.objects.wakeups)
        return wakeup

    def _collect(self, step: BoundStep, value: Flowing) -> None:
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
        store = self.strand.context.objects.store
        if self.rules.on_thread:
            stored = store.capture_from_thread(result, step.label, "result", step.transport)
            store.pack_here(stored)
        else:
            stored = store.capture(result, step.label, "result", step.transport)
            await store.pack(stored)
        if step.timing is not None:
            step.timing.stored(stored)
        return stored

    async def _fetch_own(self, step: BoundStep) -> None:
        for slot in step.slots:
            value = self.run.values.get(slot)
            if type(value) is GraphValue and value.stored is not None:
                await value.fetch_own(self.strand.context.objects)

    async def _arguments(self, step: BoundStep) -> tuple[Any, Any]:
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
        if self._is_ended_by(error):
            raise
        if isinstance(error, InputFailed):
            return GraphValue.of_error(error.error, executed=False)
        self._tell_others(failed_beside(self._named(step), error))
        caught = as_call_error(error, f"{step.label} in {self.hosted.where}")
        self.strand.context.process.call_soon(partial(self.hosted.note_failure, step.label, caught))
        add_note(caught, f"a step of a graph, captured at {step.line}")
        return GraphValue.of_error(caught, executed=executed)

    def _tell_others(self, why: DaftError) -> None:
        """This strand takes part in no collective any more, and the others do not wait for it."""
        self.strand.context.process.call_soon(partial(self.hosted.undone, self, None))
        self.run.tell_owner(why)

    def flush(self) -> None:
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
        """The first step of a segment fails with the error, others because of the step before them."""
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
