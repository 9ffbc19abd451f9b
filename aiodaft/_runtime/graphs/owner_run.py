"""One run of a graph at its owner: its inputs, its results, and the refs of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.graphs.run import BEING_COPIED, UNSENT, OwnedRun, RunEvent, RunState
from aiodaft._protocol.ids import CallId
from aiodaft._runtime.calls.call import CallState
from aiodaft._runtime.graphs.deployment import Deployment, Specs
from aiodaft._runtime.graphs.graph_value import Flowing, GraphValue
from aiodaft._runtime.objects.ref_state import RefState, state_of
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.platform.context import Terms
from aiodaft._runtime.serialization.decoder import ReceivedValue
from aiodaft._runtime.serialization.encoder import Names, all_plain, is_plain
from aiodaft._runtime.serialization.errors import copy_error, decode_failure
from aiodaft.exceptions import CallCancelled, DaftError
from aiodaft.ref import Ref


class GraphOfRun(Protocol):
    """A run's view of its graph."""

    store: Store
    inputs: int
    specs: Specs

    def may_begin(self) -> bool: ...

    def turn_came(self, run: OwnerRun) -> None:
        """Send the first waiting run, or fail it."""

    def withdraw(self, run: OwnerRun) -> None:
        """Forget a run that was not sent."""


class ResultState(CallState):
    run: OwnerRun

    def _cancel(self, why: str) -> bool:
        """Give up this result. The run is cancelled with its last wanted result."""
        if self._cancelling:
            return True
        self.expect_cancellation()
        if any(not (state.settled or state._cancelling) for state in self.run.states.values()):
            self.on_error(CallCancelled(f"{self.label} was cancelled, and its run goes on: {why}"))
        elif self.run.cancel(why):
            self._give_up_later(why)
        return True

    def _release_remote(self) -> None:
        if self.connection is None:
            self.objects.store.drop((self.process.id, self.number))
        super()._release_remote()


class OwnerRun(OwnedRun):
    """One run, from its start to the last report."""

    # Defaults in the class: most runs set only some.
    terms: Terms | None = None
    # Set when the run is sent.
    deployment: Deployment | None = None
    # As an entry of `Order`: the actors, and the graph itself, because its runs keep their order.
    lanes: Sequence[Hashable] = ()
    # Refs inside the inputs.
    used: list[RefState] | None = None
    # All inputs travel in frames as they are.
    is_plain = False
    # A step has raised an error.
    has_failed = False

    def __init__(self, graph: GraphOfRun, numbers: tuple[CallId, ...]) -> None:
        # Not by `super`: the fewer functions a run enters, the better.
        self.missing = {}
        self._graph = graph
        # The numbers of the results, in the order of the deployment; and their states, by value.
        self.numbers = numbers
        self.states: dict[int, ResultState] = {}
        self.inputs: list[Flowing] = []

    # As an entry of `Order`.

    def may_go(self) -> bool:
        return self.state is RunState.WAITING and self._graph.may_begin()

    def go(self) -> None:
        self._graph.turn_came(self)

    # Inputs.

    def take_inputs(self, args: tuple[Any, ...]) -> list[StoredValue]:
        """Encode the inputs. Returns those that a helper thread or an accelerator has to copy."""
        if all_plain(args):
            self.is_plain = True
            self.inputs = [*args]
            return []
        waits: list[StoredValue] = []
        for index, arg in enumerate(args):
            if is_plain(arg):
                self.inputs.append(arg)
                continue
            stored = self._graph.store.keep(arg, _names(index, arg), resolve=True)
            self.inputs.append(self._use(stored))
            if not (self._graph.store.pack_now(stored) and stored.ready):
                waits.append(stored)
        return waits

    def _use(self, stored: StoredValue) -> GraphValue:
        """An encoded input. Holds the refs inside it while the run is under way."""
        used = [state_of(ref) for ref in (*stored.encoded.slots, *stored.refs)]
        for state in used:
            state.add_use()
        self.used = [*(self.used or ()), *used]
        return GraphValue(stored=stored)

    def drop_inputs(self) -> None:
        """The inputs were sent, or never will be."""
        if not self.is_plain:
            for value in self.inputs:
                if type(value) is GraphValue and value.stored is not None:
                    value.stored.release()
        self.inputs = []

    # Results.

    def cancel(self, why: str) -> bool:
        """Cancel the run. False if it was not sent, and so is over at once."""
        for state in self.states.values():
            state.expect_cancellation()
        if self.state in UNSENT:
            self.fail(CallCancelled(f"the run was cancelled before it began: {why}", executed=False))
            self._graph.withdraw(self)
            return False
        if self.state is RunState.UNDER_WAY and self.deployment is not None:
            self.on(RunEvent.CANCELLED)
            # The participants skip the rest.
            for route in self.deployment.routes.values():
                route.send_in_turn(m.skip(self.deployment.number, self.number))
        return True

    def settle(self, item: m.GraphItem, refs: list[Ref[Any]]) -> None:
        """A result came, with the refs inside it, or the news that a step is over."""
        kind, state = len(item), self.states.get(item[0])
        if state is None and kind == m.FAILED_VALUE:
            state = self._unheld(item[0])
        if state is None:
            return
        if kind == m.PLAIN_VALUE:
            state.on_plain(item[1])
        elif kind == m.STORED_VALUE:
            state.on_stored()
        elif kind == m.FAILED_VALUE:
            state.on_error(decode_failure(item[1], item[2]))
        else:
            state.on_result(ReceivedValue(item[1], item[2], [], refs))

    def _unheld(self, index: int) -> ResultState:
        """The state of a step without a ref: its error is reported as that of any dropped ref."""
        target, spec = self._graph.specs[index - self._graph.inputs]
        state = ResultState(target, spec, target.caller.next_number())
        state.run = self
        state.handles = 0
        if self.state is RunState.CANCELLED:
            state.expect_cancellation()
        return state

    def fail(self, error: BaseException) -> None:
        """Fail all results: the run never began."""
        for state in self.states.values():
            state.on_error(copy_error(error).with_executed(False) if isinstance(error, DaftError) else error)
        self.release()

    def release(self) -> None:
        """Free the values that a run that is over holds. Idempotent; nothing while inputs are being copied."""
        if self.state in BEING_COPIED:
            return
        if self.inputs:
            self.drop_inputs()
        if self.used:
            for state in self.used:
                state.drop_use()
            self.used = None
        # They refer to the run: a cycle.
        self.states = {}


def _names(index: int, arg: Any) -> Names:
    return Names("the graph", ((f"args[{index}]", arg),))
