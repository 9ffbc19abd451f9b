"""Compiled graphs: dataflows that are captured once and run many times, `async with aiodaft.compile(fn) as graph`.

Capturing runs `fn` once with refs that have no value, and records the calls it makes. Each participating process gets
its part of the calls once; a run is then one message to each process, values that go from actor to actor, and one
message back. Processes that share memory use rings: no socket, and no system call while there is traffic.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, ParamSpec, Self, TypeVar, cast, overload

from aiodaft._protocol.connections.messages import WANT_REPLY
from aiodaft._protocol.graphs.listing import NO_NOTE, ValueNote, listing_of, mermaid_of, rows_of, summary
from aiodaft._protocol.graphs.plan import Dataflow, Step
from aiodaft._runtime.calls.call import Caller, CallSink, Request, Target
from aiodaft._runtime.calls.following import AlwaysBeside
from aiodaft._runtime.graphs.graph_value import Arguments
from aiodaft._runtime.graphs.owner import GraphOwner
from aiodaft._runtime.graphs.participant import Graphs
from aiodaft._runtime.objects.ref_table import PutState
from aiodaft._runtime.process import Process, current_process
from aiodaft._runtime.serialization.containers import map_refs
from aiodaft.actor import class_of, target_of
from aiodaft.exceptions import DaftError
from aiodaft.html import page, table
from aiodaft.methods import MethodSpec, specs_of
from aiodaft.ref import Ref, Refs, parts_of

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["Graph", "StepTime", "compile"]

P = ParamSpec("P")
Out = TypeVar("Out")
A0 = TypeVar("A0")
A1 = TypeVar("A1")
A2 = TypeVar("A2")

_MAX_IN_FLIGHT: Final = 16
# The folder of the framework's own code.
_OWN: Final = os.path.dirname(__file__) + os.sep


@dataclass(frozen=True, slots=True)
class StepTime:
    """The last run of one step of a graph: its time, and the type and size of its result.

    Attributes:
        actor: Name of the actor.
        method: The method, such as "Model.execute".
        line: The line of your code that made the call.
        seconds: The time for which the method ran; None if it has not run.
        value: The type of its result; of a tensor the dtype and the shape, such as "float32[8, 64]".
        size: The bytes of the encoded result, which go to each process that needs it; None for a number, a short text
            and the like.
    """

    actor: str
    method: str
    line: str
    seconds: float | None
    value: str
    size: int | None


class _Recorder(CallSink):
    def __init__(self, inputs: list[PutState]) -> None:
        # The values that the graph's own refs stand for: inputs first, then results in the order of the calls.
        self.numbers: dict[Any, int] = {state: index for index, state in enumerate(inputs)}
        self.steps: list[Step[Arguments]] = []
        self.specs: list[tuple[Target, MethodSpec]] = []

    def submit(self, request: Request) -> None:
        spec, target, line = request.spec, request.target, _line()
        if request.mode != WANT_REPLY:
            raise TypeError(f"{spec.label}: streams and tell() cannot be captured in a graph ({line})")
        try:
            arguments = Arguments(target, spec, request.args, request.kwargs, self.numbers)
        except (TypeError, DaftError) as error:
            error.add_note(f"captured at {line}")
            raise
        actor = (target.remote, target.actor)
        self.steps.append(Step(actor, target.label, spec.label, line, spec.rules, arguments.needs, arguments))
        self.specs.append((target, spec))
        self.numbers[request.state] = len(self.numbers)

    def forget(self) -> None:
        """Fail the captured refs, which will never have a value, for code that awaits one."""
        for state in self.numbers:
            state.seen = True
            state.on_error(TypeError(f"{state.label} was captured in a graph, and has no value here: call the graph"))


def _line() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Graph(Generic[P, Out]):
    """A captured dataflow. Calling it starts a run and gives the result of `fn`: an ordinary `Ref`, or several.

    Runs start in the order of the calls, and overlap; each step is a call of its actor. On every actor of the graph,
    the steps of a run start after the calls and runs that this process submitted to that actor earlier, and before
    later ones, even if the run waits: for room, for the graph to be ready, or for a large input to be copied. Methods
    declared `@method(ordered=False)` are outside this order; a method that ends the wait of running steps must be one
    of them. A failed step fails its run, or the part of the run that depends on the step. Runs that begin while a
    supervised actor is down wait for its restart. The rings between processes stay after the graph is closed; other
    calls use them too.

    Leaving the block waits for the runs under way; leaving it by an error cancels them. A graph that is dropped is
    closed when the last of its runs is over.

    Cancellation: cancelling all awaited results of a run skips the steps that have not begun, and cancels the others.
    """

    def __init__(self, caller: Caller, core: GraphOwner, output: Any, numbers: dict[Any, int]) -> None:
        self._caller = caller
        self._core = core
        self._output = output
        self._only = core.dataflow.outputs[0] if isinstance(output, Ref) and parts_of(output) is None else None
        self._numbers = numbers
        # The notes that `times` has fetched.
        self._found: dict[int, ValueNote] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Out:
        """Start a run; at most `max_in_flight` runs are under way at a time, others wait here for their turn.

        Raises:
            TypeError: The number of inputs is not that of `fn`; or another graph is being captured.
            SerializationError: An input cannot travel.
            RuntimeClosed: The graph is closed.
        """
        core = self._core
        if kwargs or len(args) != core.inputs:
            raise TypeError(
                f"the graph takes {core.inputs} positional inputs, not {len(args)} and {len(kwargs)} by name"
            )
        _check_loop(self._caller.process, "a graph is run")
        if isinstance(self._caller.outgoing, _Recorder):
            raise TypeError(f"{self!r} cannot run inside another ({_line()}): call there the function it was made of")
        refs = core.start(args)
        if self._only is not None:
            return cast("Out", refs[self._only])
        output: Out = _map_output(self._output, lambda ref: refs[self._numbers[ref._state]])
        return output

    async def replace(self, dead: object, new: object) -> None:
        """Replace an actor, dead or alive, by another one. Runs under way go on with the old actor.

        Waiting runs call the new actor, in the order of submission among its other calls.

        Raises:
            ValueError: The graph does not call the actor.
            TypeError: The new actor lacks a method.

        Cancellation: the new actor is in place; runs that were under way are cancelled.
        """
        old, fresh = _target(dead), _target(new)
        core = self._core
        if old not in (target.host for target, _ in core.specs):
            raise ValueError(f"{old.label} has no part in {self!r}")
        methods = specs_of(class_of(new))
        lacking = [spec.label for target, spec in core.specs if target == old and spec.name not in methods]
        if lacking:
            raise TypeError(f"{fresh.label} cannot take the place of {old.label}: it has no {lacking[0]}")
        await core.replace([(_moved(target, old, fresh), spec) for target, spec in core.specs])

    async def aclose(self) -> None:
        """Refuse new runs, wait for those under way, and free the graph in all processes. Idempotent.

        Cancellation: the runs under way are cancelled.
        """
        await self._core.aclose()

    async def __aenter__(self) -> Self:
        await self._core.wait_ready()
        return self

    async def __aexit__(self, error_type: type[BaseException] | None, *exc_info: object) -> None:
        if error_type is not None:
            self._core.cancel("its graph was left by an error")
        await self.aclose()

    def draw(self) -> str:
        """Return the graph as a Mermaid flowchart, which GitHub, JupyterLab, Sphinx and mermaid.live render.

        Each actor has a frame with its calls, those of collectives in the frame of their member. A dashed arrow is a
        value that stays in its process. Of a graph with more than 400 calls and arrows, only the first are shown.
        """
        return mermaid_of(self._core.dataflow, self._notes())

    def describe(self) -> str:
        """Return the graph as text: its actors, and for each call a line with the values that it takes."""
        return listing_of(self._core.dataflow, self._notes())

    async def times(self) -> list[StepTime]:
        """Wait for the runs under way, and return the time of each step's last run; for `timed=True` only.

        `draw` and `describe` show these from then on, with the types and bytes of inputs and results.

        Raises:
            RuntimeError: The graph was compiled without `timed=True`.
            DaftError: A process of the graph is gone, or the graph is closed.

        Cancellation: nothing is lost.
        """
        flow = self._core.dataflow
        if not flow.timed:
            raise RuntimeError(f"{self!r} has no times: compile it with timed=True")
        self._found = await self._core.notes()
        notes = [self._found.get(value, NO_NOTE) for value in range(flow.inputs, flow.inputs + len(flow.steps))]
        return [
            StepTime(step.name, step.label, step.line, note.seconds, note.kind, note.size)
            for step, note in zip(flow.steps, notes, strict=True)
        ]

    def _notes(self) -> dict[int, ValueNote]:
        declared = {
            value: ValueNote(spec.declared) for value, (_, spec) in enumerate(self._core.specs, self._core.inputs)
        }
        return {**declared, **{value: note for value, note in self._found.items() if note.kind}}

    def _repr_html_(self) -> str:
        rows = [*rows_of(self._core.dataflow, self._notes())]
        return page(repr(self).strip("<>"), table(["", "call", "value", "time", "line"], rows))

    def __rich__(self) -> Text:
        from rich.text import Text  # noqa: PLC0415 - only rich calls this

        return Text(self.describe(), no_wrap=True)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} stays in the process that captured it; pass its results on, or capture it there")

    def __del__(self) -> None:
        self._core.drop()

    def __repr__(self) -> str:
        steps = self._core.dataflow.steps
        return f"<Graph of {summary(len(steps), len({step.lane for step in steps}))}>"


def _map_output(output: Any, replace: Callable[[Ref[Any]], Ref[Any]]) -> Any:
    def one(ref: Ref[Any]) -> Ref[Any]:
        parts = parts_of(ref)
        return replace(ref) if parts is None else Refs([replace(part) for part in parts]).gather()

    return Refs([one(ref) for ref in output]) if isinstance(output, Refs) else map_refs(output, one)


def _target(actor: object) -> Target:
    target = target_of(actor)
    assert isinstance(target, Target)
    return target


def _moved(target: Target, old: Target, fresh: Target) -> Target:
    """A target of a graph in which one actor takes the place of another, with the actors beside it."""
    if target == old:
        return fresh
    return AlwaysBeside(fresh, target.actor) if target.host == old else target


def _check_loop(process: Process, what: str) -> None:
    if process.closed is not None:
        process.check_open(f"{what} on an open runtime")
    if asyncio._get_running_loop() is not process.loop:
        raise RuntimeError(f"{what} on the event loop of its runtime, not in another thread")


@overload
def compile(fn: Callable[[], Out], /, *, max_in_flight: int = ..., timed: bool = ...) -> Graph[[], Out]: ...
@overload
def compile(fn: Callable[[Ref[A0]], Out], /, *, max_in_flight: int = ..., timed: bool = ...) -> Graph[[A0], Out]: ...
@overload
def compile(
    fn: Callable[[Ref[A0], Ref[A1]], Out], /, *, max_in_flight: int = ..., timed: bool = ...
) -> Graph[[A0, A1], Out]: ...
@overload
def compile(
    fn: Callable[[Ref[A0], Ref[A1], Ref[A2]], Out], /, *, max_in_flight: int = ..., timed: bool = ...
) -> Graph[[A0, A1, A2], Out]: ...
# A function that is also called eagerly: with values.
@overload
def compile(  # type: ignore[overload-cannot-match]  # mypy takes P for []
    fn: Callable[P, Out], /, *, max_in_flight: int = ..., timed: bool = ...
) -> Graph[P, Out]: ...
def compile(fn: Callable[..., Any], /, *, max_in_flight: int = _MAX_IN_FLIGHT, timed: bool = False) -> Graph[Any, Any]:
    """Capture a dataflow: `fn` takes refs, calls actors with them, and returns a ref, or a container of refs.

    `fn` runs once, now. Its other effects happen now as well, and not when the graph runs. An argument that is not a
    ref of the graph is a constant: it is encoded now, and decoded for each run. A ref from outside is a constant, too;
    runs wait until it has its value.

    Args:
        fn: The dataflow.
        max_in_flight: The runs that are under way at a time, which bounds their memory in the actors.
        timed: Whether `graph.times()` can say what the steps took: it costs a microsecond or two per step, and nothing
            if it is off.

    Raises:
        TypeError: `fn` uses a value, which does not exist yet, or does not return refs of its calls.
        SerializationError: A constant cannot travel.
        CyclicGraph: Steps would wait for each other in a cycle.
    """
    process = current_process()
    caller = process.part(Caller)
    _check_loop(process, "a graph is captured")
    if max_in_flight < 1:
        raise ValueError(f"at least one run is under way, not {max_in_flight}")
    states = [PutState(caller.objects, None, f"input {index}") for index in range(_count_inputs(fn))]
    recorder = _Recorder(states)
    inputs: list[Ref[Any]] = [Ref(state) for state in states]
    sender, caller.outgoing = caller.outgoing, recorder
    try:
        output = fn(*inputs)
    finally:
        caller.outgoing = sender
        recorder.forget()
    outputs: list[Ref[Any]] = []

    def collect(ref: Ref[Any]) -> Ref[Any]:
        outputs.append(ref)
        return ref

    _map_output(output, collect)
    numbers = [recorder.numbers.get(ref._state, -1) for ref in outputs]
    if not outputs or min(numbers) < len(inputs):
        raise TypeError(f"{getattr(fn, '__qualname__', fn)} must return the refs of calls it made, not {output!r:.80}")
    flow = Dataflow(len(inputs), tuple(recorder.steps), tuple(numbers), timed=timed)
    core = process.part(Graphs).open(flow, recorder.specs, max_in_flight)
    return Graph(caller, core, output, recorder.numbers)


def _count_inputs(fn: Callable[..., Any]) -> int:
    name = getattr(fn, "__qualname__", repr(fn))
    if inspect.iscoroutinefunction(fn):
        raise TypeError(f"{name} is async: a compiled function only calls actors, and awaits nothing")
    parameters = inspect.signature(fn).parameters.values()
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise TypeError(f"{name}: inputs of a graph are positional, and {parameter} is not")
    return len([parameter for parameter in parameters if parameter.default is parameter.empty])
