"""Dataflows that are captured once and run many times: `async with aiodaft.compile(fn) as graph`.

Capturing runs `fn` once with refs that have no value yet, and freezes the calls it makes. A run makes the same calls
with new inputs; nothing of `fn` runs again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, Self, TypeVar, overload

from aiodaft._protocol.ids import CallId
from aiodaft._protocol.messages import WANT_REPLY
from aiodaft._runtime.calls import State, Target
from aiodaft._runtime.current import current_peer
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.refkinds import CallState, PutState
from aiodaft._runtime.serialization import map_refs
from aiodaft.actor import MethodSpec
from aiodaft.exceptions import RuntimeClosed
from aiodaft.ref import Ref

__all__ = ["Graph", "compile"]

P = ParamSpec("P")
R = TypeVar("R")
A0 = TypeVar("A0")
A1 = TypeVar("A1")
A2 = TypeVar("A2")


@dataclass(frozen=True, slots=True)
class _Step:
    """One call of the dataflow."""

    target: Target
    spec: MethodSpec
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: CallState


class _Recorder:
    """Takes the place of what sends calls while `fn` runs."""

    def __init__(self) -> None:
        self.steps: list[_Step] = []

    def submit(
        self,
        target: Target,
        spec: MethodSpec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: State,
        number: CallId,
        mode: int,
    ) -> None:
        """Note a call."""
        if mode != WANT_REPLY or not isinstance(state, CallState):
            raise TypeError(f"{spec.label}: streams and tell() cannot be captured in a graph")
        self.steps.append(_Step(target, spec, args, kwargs, state))


class Graph(Generic[P, R]):
    """A captured dataflow. Calling it starts a run and gives a `Ref` like any other (or several, as `fn` returned).

    Runs may overlap; they make their calls in the order in which they were started.
    """

    def __init__(self, peer: Peer, inputs: list[Ref[Any]], steps: list[_Step], output: Any) -> None:
        self._peer = peer
        self._inputs = inputs
        self._steps = steps
        self._output = output
        self._runs: set[Ref[Any]] = set()
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
        values: dict[Any, Any] = {ref._state: arg for ref, arg in zip(self._inputs, args, strict=True)}

        def replace(ref: Ref[Any]) -> Any:
            return values.get(ref._state, ref)

        for step in self._steps:
            ref = step.target.call(step.spec, map_refs(step.args, replace), map_refs(step.kwargs, replace))
            values[step.result] = ref
            self._runs.add(ref)
            ref.add_done_callback(self._runs.discard)
        output: Ref[R] = map_refs(self._output, replace)
        return output

    async def aclose(self) -> None:
        """Start no more runs, and wait for those under way. Idempotent.

        Cancellation: what is still under way is cancelled.
        """
        self._closed = True
        try:
            await asyncio.gather(*(ref.ready() for ref in self._runs))
        except asyncio.CancelledError:
            for ref in self._runs:
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
    count = fn.__code__.co_argcount - (hasattr(fn, "__self__") and 1)
    inputs: list[Ref[Any]] = [Ref(_input(peer, index)) for index in range(count)]
    recorder = _Recorder()
    sender, peer.outgoing = peer.outgoing, recorder
    try:
        output = fn(*inputs)
    finally:
        peer.outgoing = sender
    known = {ref._state for ref in inputs} | {step.result for step in recorder.steps}
    outputs: Sequence[Any] = output if isinstance(output, list | tuple) else [output]
    if not all(isinstance(ref, Ref) and ref._state in known for ref in outputs) or not outputs:
        raise TypeError(f"{fn.__qualname__} must return the refs of calls it made, not {output!r:.80}")
    return Graph(peer, inputs, recorder.steps, output)


def _input(peer: Peer, index: int) -> PutState:
    return PutState(peer, peer.next_number(), None, f"input {index}")
