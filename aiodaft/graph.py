"""Dataflows that are captured once and run many times: `async with aiodaft.compile(fn) as graph`.

Capturing runs `fn` once with refs that have no value yet, and freezes the calls it makes. A run makes the same calls
with new inputs; nothing of `fn` runs again.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, Self, TypeVar, overload

from aiodaft._protocol.messages import WANT_REPLY
from aiodaft._runtime.calls import Request
from aiodaft._runtime.current import current_peer
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.refkinds import PutState
from aiodaft._runtime.refs import RefState, state_of
from aiodaft._runtime.serialization import map_refs
from aiodaft.exceptions import RuntimeClosed
from aiodaft.ref import Ref, parts_of

__all__ = ["Graph", "compile"]

P = ParamSpec("P")
R = TypeVar("R")
A0 = TypeVar("A0")
A1 = TypeVar("A1")
A2 = TypeVar("A2")


class _Recorder:
    """Takes the place of what sends calls while `fn` runs."""

    def __init__(self) -> None:
        self.steps: list[Request] = []

    def submit(self, request: Request) -> None:
        """Note a call."""
        if request.mode != WANT_REPLY:
            raise TypeError(f"{request.spec.label}: streams and tell() cannot be captured in a graph")
        self.steps.append(request)


class Graph(Generic[P, R]):
    """A captured dataflow. Calling it starts a run and gives a `Ref` like any other (or several, as `fn` returned).

    Runs may overlap; they make their calls in the order in which they were started.
    """

    def __init__(self, peer: Peer, inputs: list[Ref[Any]], steps: list[Request], output: Any) -> None:
        self._peer = peer
        self._inputs = inputs
        self._steps = steps
        self._output = output
        self._runs: dict[RefState, Ref[Any]] = {}
        self._closed = False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Ref[R]:
        """Start a run.

        Raises:
            TypeError: The inputs are not as many as `fn` takes.
            RuntimeClosed: The graph is closed.
        """
        if self._closed:
            raise RuntimeClosed("the graph is closed")
        if kwargs or len(args) != len(self._inputs):
            raise TypeError(
                f"the graph takes {len(self._inputs)} positional inputs, not {len(args)} and {len(kwargs)} by name"
            )
        values: dict[Any, Any] = {state_of(ref): arg for ref, arg in zip(self._inputs, args, strict=True)}

        def replace(ref: Ref[Any]) -> Any:
            parts = parts_of(ref)
            if parts is not None:
                # The list of the captured refs would never be complete: this run's own.
                return [replace(part) for part in parts]
            return values.get(state_of(ref), ref)

        for step in self._steps:
            ref = step.target.call(step.spec, map_refs(step.args, replace), map_refs(step.kwargs, replace))
            values[step.state] = ref
            state = state_of(ref)
            self._runs[state] = ref
            # A watcher is no awaiter: a run whose only awaiter is cancelled is cancelled.
            state.watch(self._run_ended)
        output: Ref[R] = map_refs(self._output, replace)
        return output

    def _run_ended(self, state: RefState) -> None:
        self._runs.pop(state, None)

    async def aclose(self) -> None:
        """Start no more runs, and wait for those under way. Idempotent.

        Cancellation: what is still under way is cancelled.
        """
        self._closed = True
        try:
            await asyncio.gather(*(ref.ready() for ref in self._runs.values()))
        except asyncio.CancelledError:
            for ref in list(self._runs.values()):
                ref.cancel()
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<Graph of {len(self._steps)} calls>"


@overload
def compile(fn: Callable[[], Ref[R]], /) -> Graph[[], R]: ...
@overload
def compile(fn: Callable[[Ref[A0]], Ref[R]], /) -> Graph[[A0], R]: ...
@overload
def compile(fn: Callable[[Ref[A0], Ref[A1]], Ref[R]], /) -> Graph[[A0, A1], R]: ...
@overload
def compile(fn: Callable[[Ref[A0], Ref[A1], Ref[A2]], Ref[R]], /) -> Graph[[A0, A1, A2], R]: ...
def compile(fn: Callable[..., Any], /) -> Graph[Any, Any]:
    """Capture a dataflow: `fn` takes refs, calls actors with them, and returns a ref.

    `fn` runs once, now. What it does besides calling actors happens now as well, and not when the graph runs.

    Raises:
        TypeError: `fn` looks at a value (which does not exist yet), or does not return what its calls gave.
    """
    peer = current_peer()
    inputs: list[Ref[Any]] = [Ref(_input(peer, index)) for index in range(_count_inputs(fn))]
    recorder = _Recorder()
    sender, peer.outgoing = peer.outgoing, recorder
    try:
        output = fn(*inputs)
    finally:
        peer.outgoing = sender
    known = {state_of(ref) for ref in inputs} | {step.state for step in recorder.steps}
    outputs: Sequence[Any] = output if isinstance(output, list | tuple) else [output]
    if not all(isinstance(ref, Ref) and state_of(ref) in known for ref in outputs) or not outputs:
        raise TypeError(f"{getattr(fn, '__qualname__', fn)} must return the refs of calls it made, not {output!r:.80}")
    return Graph(peer, inputs, recorder.steps, output)


def _count_inputs(fn: Callable[..., Any]) -> int:
    name = getattr(fn, "__qualname__", repr(fn))
    if inspect.iscoroutinefunction(fn):
        raise TypeError(f"{name} is async: what is compiled only calls actors, and awaits nothing")
    parameters = inspect.signature(fn).parameters.values()
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise TypeError(f"{name}: inputs of a graph are positional, and {parameter} is not")
    return len([parameter for parameter in parameters if parameter.default is parameter.empty])


def _input(peer: Peer, index: int) -> PutState:
    return PutState(peer, peer.next_number(), None, f"input {index}")
