"""Runs of a graph, as the process knows them that owns it: what is wanted of them, and what has come."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from aiodaft._protocol.ids import CallId, PeerId
from aiodaft.exceptions import CallCancelled, DaftError

from .failures import copy_error
from .flow import Flowing, Value
from .kept import Kept
from .refkinds import CallState
from .refs import RefState, state_of

if TYPE_CHECKING:
    from aiodaft.methods import MethodSpec

    from .calls import Target
    from .layouts import Layout
    from .link import Link
    from .neighbour import Neighbour
    from .own_graphs import OwnGraph


class ResultState(CallState):
    """A result of a run, as the process that owns the graph knows it."""

    def __init__(self, run: OwnRun, target: Target, spec: MethodSpec) -> None:
        self.peer = peer = target.peer
        self.target = target
        self.spec = spec
        self.number = peer.next_number()
        self._run = run

    def sent_over(self, way: Neighbour) -> CallId:
        """Its run is sent, and that is where the result will be. Returns its number there."""
        if way is not self.peer.loopback:
            self.link = cast("Link", way)
        return self.number

    def _cancel(self, why: str) -> bool:
        """Want it no more; the run is cancelled when nobody wants any of its results."""
        if self._cancelling:
            return True
        self.expect_cancellation()
        if self._run.wanted():
            self.on_error(CallCancelled(f"{self.label} was cancelled, and its run goes on: {why}"))
        elif self._run.cancel(why):
            self._give_up_later(why)
        return True

    @property
    def cancelling(self) -> bool:
        """Whether it was cancelled."""
        return self._cancelling

    def _release_remote(self) -> None:
        if self.link is None:
            self.peer.store.drop((self.peer.id, self.number))
        super()._release_remote()


class OwnRun:
    """One run, from its start to the last report."""

    __slots__ = (
        "cancelled",
        "deadline",
        "graph",
        "inputs",
        "layout",
        "missing",
        "number",
        "ready",
        "sent",
        "states",
        "used",
    )

    def __init__(self, graph: OwnGraph, number: int) -> None:
        self.graph = graph
        self.number = number
        self.states: dict[int, ResultState] = {}
        # Once it is sent: where it runs, and the values that have to be reported.
        self.layout: Layout | None = None
        self.missing: dict[int, PeerId] = {}
        self.inputs: list[Flowing] = []
        # Refs inside the inputs.
        self.used: list[RefState] | None = None
        self.ready = True
        self.sent = False
        self.cancelled = False
        self.deadline: float | None = None

    def take(self, kept: Kept) -> None:
        """Hold the refs inside an input while the run is under way."""
        used = [state_of(ref) for ref in (*kept.encoded.slots, *kept.refs)]
        for state in used:
            state.add_use()
        self.used = [*(self.used or ()), *used]

    def wanted(self) -> bool:
        """Whether somebody still wants a result."""
        return any(not (state.settled or state.cancelling) for state in self.states.values())

    def cancel(self, why: str) -> bool:
        """Skip what has not begun; False if nothing has, and it is over."""
        self.cancelled = True
        for state in self.states.values():
            state.expect_cancellation()
        if not self.sent:
            self.graph.withdraw(self)
            self.fail(CallCancelled(f"the run was cancelled before it began: {why}", executed=False))
            return False
        self.graph.skip(self)
        return True

    def fail(self, error: BaseException) -> None:
        """It never began."""
        for state in self.states.values():
            state.on_error(copy_error(error).with_executed(False) if isinstance(error, DaftError) else error)
        self.missing.clear()
        self.over()

    def drop_inputs(self) -> None:
        """They were sent, or will not be."""
        for value in self.inputs:
            if type(value) is Value and value.kept is not None:
                value.kept.release()
        self.inputs = []

    def over(self) -> None:
        """Nothing more will be reported. Idempotent."""
        if not self.ready:
            # Its inputs are being encoded; whoever does that comes back.
            return
        if self.inputs:
            self.drop_inputs()
        if self.used:
            for state in self.used:
                state.drop_use(failed=False)
            self.used = None
