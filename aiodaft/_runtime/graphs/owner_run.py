"""Runs of a graph at its owner: their inputs, and what is known of their results."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from aiodaft._protocol import messages as m
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.run import RUN, UNSENT, RunEvent, RunState
from aiodaft._runtime.calls.call import CallState, Target
from aiodaft._runtime.graphs.deployment import Deployment, Specs
from aiodaft._runtime.graphs.graph_value import Flowing, GraphValue
from aiodaft._runtime.objects.received import ReceivedValue
from aiodaft._runtime.objects.ref_state import RefState, state_of
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.serialization.encoder import Names, all_plain, is_plain
from aiodaft._runtime.serialization.errors import copy_error, decode_failure
from aiodaft._runtime.serialization.pickling import TooLong
from aiodaft.exceptions import CallCancelled, DaftError
from aiodaft.methods import MethodSpec
from aiodaft.ref import Ref


class RunOwner(Protocol):
    """What a run needs of its graph; see `GraphOwner`."""

    inputs: int
    specs: Specs

    def may_begin(self) -> bool: ...

    def turn_came(self, run: OwnerRun) -> None: ...

    def withdraw(self, run: OwnerRun) -> None: ...

    def skip(self, run: OwnerRun) -> None: ...


class ResultState(CallState):
    """A result of a run, at the owner of the graph."""

    def __init__(self, run: OwnerRun, target: Target, spec: MethodSpec, number: CallId) -> None:
        super().__init__(target, spec, number)
        self._run = run

    def _cancel(self, why: str) -> bool:
        """Give up this result. The run is cancelled with its last wanted result."""
        if self._cancelling:
            return True
        self.expect_cancellation()
        if self._run.is_wanted:
            self.on_error(CallCancelled(f"{self.label} was cancelled, and its run goes on: {why}"))
        elif self._run.cancel(why):
            self._give_up_later(why)
        return True

    @property
    def is_wanted(self) -> bool:
        """Whether the result may still come and was not cancelled."""
        return not (self.settled or self._cancelling)

    def _release_remote(self) -> None:
        if self.connection is None:
            self.objects.store.drop((self.process.id, self.number))
        super()._release_remote()


class OwnerRun:
    """One run, from its start to the last report. Its states: `_protocol.run.RUN`."""

    # Defaults in the class: most runs set only some.
    state = RunState.WAITING
    number = 0
    # On the loop's clock.
    deadline: float | None = None
    # Set when the run is sent.
    deployment: Deployment | None = None
    # As an entry of `Order`: the actors, and the graph itself, because its runs keep their order.
    lanes: Sequence[Hashable] = ()
    # Refs inside the inputs.
    used: list[RefState] | None = None
    # All inputs travel in frames as they are.
    is_plain = False

    def __init__(self, graph: RunOwner, numbers: tuple[CallId, ...]) -> None:
        self.graph = graph
        # The numbers of the results, in the order of the deployment; and their states, by value.
        self.numbers = numbers
        self.states: dict[int, ResultState] = {}
        self.inputs: list[Flowing] = []
        # The values that are not reported yet, with the processes that report them.
        self.missing: dict[int, PeerId] = {}

    def on(self, event: RunEvent) -> None:
        """Go to the next state. Raises KeyError if the event cannot happen now."""
        self.state = RUN[self.state][event]

    # As an entry of `Order`.

    def may_go(self) -> bool:
        """Whether the inputs are encoded and the graph has room."""
        return self.state is RunState.WAITING and self.graph.may_begin()

    def go(self) -> None:
        """The turn of the run has come."""
        self.graph.turn_came(self)

    # Inputs.

    def take_inputs(self, args: tuple[Any, ...], store: Store) -> list[tuple[int, Any]]:
        """Encode the inputs. Returns the long ones with their positions, for the helper thread."""
        if all_plain(args):
            self.is_plain = True
            self.inputs.extend(args)
            return []
        long: list[tuple[int, Any]] = []
        for index, arg in enumerate(args):
            if is_plain(arg):
                self.inputs.append(arg)
                continue
            try:
                stored = store.keep(arg, input_names(index, arg), resolve=True)
            except TooLong:
                self.inputs.append(GraphValue())
                long.append((index, arg))
                continue
            self.inputs.append(self.take_input(stored))
            if not (store.pack_now(stored) and stored.ready):
                long.append((index, arg))
        return long

    def take_input(self, stored: StoredValue) -> GraphValue:
        """An encoded input. Holds the refs inside it while the run is under way."""
        used = [state_of(ref) for ref in (*stored.encoded.slots, *stored.refs)]
        for state in used:
            state.add_use()
        self.used = [*(self.used or ()), *used]
        return GraphValue.of_stored(stored)

    def drop_inputs(self) -> None:
        """The inputs were sent, or never will be."""
        for value in self.inputs:
            if type(value) is GraphValue and value.stored is not None:
                value.stored.release()
        self.inputs = []

    # Results.

    @property
    def is_wanted(self) -> bool:
        """Whether any result is still wanted."""
        return any(state.is_wanted for state in self.states.values())

    def cancel(self, why: str) -> bool:
        """Cancel the run. False if it was not sent, and so is over at once."""
        for state in self.states.values():
            state.expect_cancellation()
        if self.state in UNSENT:
            self.fail(CallCancelled(f"the run was cancelled before it began: {why}", executed=False))
            self.graph.withdraw(self)
            return False
        if self.state is RunState.UNDER_WAY:
            self.on(RunEvent.CANCELLED)
            self.graph.skip(self)
        return True

    def settle(self, item: m.GraphItem, refs: list[Ref[Any]]) -> None:
        """A result came, with the refs inside it, or the news that a step is over."""
        kind, state = len(item), self.states.get(item[0])
        if state is None:
            if kind == m.FAILED_VALUE:
                self._unheld(item[0]).on_error(decode_failure(item[1], item[2]))
        elif kind == m.PLAIN_VALUE:
            state.on_plain(item[1])
        elif kind == m.STORED_VALUE:
            state.on_stored()
        elif kind == m.FAILED_VALUE:
            state.on_error(decode_failure(item[1], item[2]))
        else:
            state.on_result(ReceivedValue(item[1], item[2], [], refs))

    def _unheld(self, index: int) -> ResultState:
        """The state of a step without a ref: its error is reported as that of any dropped ref."""
        target, spec = self.graph.specs[index - self.graph.inputs]
        state = ResultState(self, target, spec, target.caller.next_number())
        state.handles = 0
        if self.state is RunState.CANCELLED:
            state.expect_cancellation()
        return state

    def fail(self, error: BaseException) -> None:
        """Fail all results: the run never began."""
        for state in self.states.values():
            state.on_error(copy_error(error).with_executed(False) if isinstance(error, DaftError) else error)
        self.missing.clear()
        self.release()

    def release(self) -> None:
        """Free what a run that is over holds. Idempotent; nothing while inputs are being copied."""
        if self.state in (RunState.COPYING, RunState.ABANDONED):
            return
        if self.inputs:
            self.drop_inputs()
        if self.used:
            for state in self.used:
                state.drop_use(failed=False)
            self.used = None
        # They refer to the run: a cycle.
        self.states = {}


def input_names(index: int, arg: Any) -> Names:
    """What errors call an input."""
    return Names("the graph", ((f"args[{index}]", arg),))
