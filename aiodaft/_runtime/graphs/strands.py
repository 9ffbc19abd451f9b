"""Strands in the process that executes them: bound to the actor and its methods, the same for all runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from aiodaft._protocol.calls.mailbox import Rules
from aiodaft._protocol.graphs.layout import ValueNote
from aiodaft._protocol.graphs.plan import Step, SubPlan
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.actors.hosted_actor import HostedActor
from aiodaft._runtime.connections.route import Route
from aiodaft._runtime.graphs.captured_call import Arguments
from aiodaft._runtime.graphs.context import GraphContext
from aiodaft._runtime.graphs.graph_value import GraphValue
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.platform.tasks import run_through
from aiodaft._runtime.serialization.tensors import kind_of
from aiodaft.methods import MethodSpec, Options

# The times and results of the steps of a graph, for graphs that are compiled with `timed=True`.
#
# Others have no such object: their steps call the methods themselves.


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
        """The method with a clock around it; a method that fails has made nothing."""

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
        """The result is encoded; a plain one never is."""
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
        # The value that is its only argument.
        self.only = self.slots[0] if self.is_bare and len(self.slots) == 1 and self.slots[0] >= 0 else None
        self.is_output = self.result.output is not None
        self.leaves_segment = self.result.leaves_segment
        self.timing = StepTiming() if plan.timed else None
        fn = method.fn
        self.fn = fn if self.timing is None else self.timing.around(fn, on_thread=step.rules.on_thread)
        self.transport = method.transport
        # The values of refs from outside the graph.
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
        """Find the actor and its methods. `execute` runs the steps, as a method of the actor.

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
        # The segment that it begins with.
        self.first = strand[0]
        self.steps = [
            BoundStep(plan, position, begins.get(position), self._method(step), routes)
            for position, step in zip(positions, steps, strict=True)
        ]
        # The last one of several steps.
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
