"""Runs of a graph, as the process knows them that owns it: what is wanted of them, and what has come."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._runtime.calls.call import CallState
from aiodaft._runtime.graphs.graph_value import Flowing, GraphValue, Item
from aiodaft._runtime.objects.received import ReceivedValue
from aiodaft._runtime.objects.ref_state import RefState, state_of
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.serialization.encoder import Names, all_plain, is_plain
from aiodaft._runtime.serialization.errors import copy_error, decode_failure
from aiodaft._runtime.serialization.pickling import TooLong
from aiodaft.exceptions import CallCancelled, DaftError

if TYPE_CHECKING:
    from aiodaft._runtime.calls.call import Target
    from aiodaft._runtime.graphs.deployment import Deployment
    from aiodaft._runtime.graphs.owner import GraphOwner
    from aiodaft._runtime.objects.store import Store
    from aiodaft.methods import MethodSpec
    from aiodaft.ref import Ref


class ResultState(CallState):
    """A result of a run, as the process that owns the graph knows it."""

    def __init__(self, run: OwnerRun, target: Target, spec: MethodSpec, number: CallId) -> None:
        super().__init__(target, spec, number)
        self._run = run

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
        if self.connection is None:
            self.objects.store.drop((self.process.id, self.number))
        super()._release_remote()


class OwnerRun:
    """One run, from its start to the last report."""

    # Defaults live in the class: most runs set only what they need.
    number = 0
    # When its time is over, on the loop's clock.
    deadline: float | None = None
    # Once it is sent: where it runs.
    layout: Deployment | None = None
    # The actors that it calls, and the graph: its runs stand in one lane.
    lanes: Sequence[Hashable] = ()
    # Refs inside the inputs.
    used: list[RefState] | None = None
    # Its inputs travel in frames as they are; they are encoded.
    plain = False
    packed = True
    sent = False
    cancelled = False

    def __init__(self, graph: GraphOwner, numbers: tuple[CallId, ...]) -> None:
        self.graph = graph
        # The numbers of its results, in the order of its layout, and what is known of them.
        self.numbers = numbers
        self.states: dict[int, ResultState] = {}
        self.inputs: list[Flowing] = []
        # The values that have to be reported.
        self.missing: dict[int, PeerId] = {}

    # As an entry of `Order`.

    def may_go(self) -> bool:
        """Whether its inputs are there, and its graph is ready for it."""
        return self.packed and self.graph.may_begin()

    def go(self) -> None:
        """Its turn has come."""
        self.graph.turn_came(self)

    def take_inputs(self, args: tuple[Any, ...], store: Store) -> list[tuple[int, Any]]:
        """Encode the inputs; those that take long are left for later, and returned."""
        if all_plain(args):
            self.plain = True
            self.inputs.extend(args)
            return []
        long: list[tuple[int, Any]] = []
        for index, arg in enumerate(args):
            if is_plain(arg):
                self.inputs.append(arg)
                continue
            try:
                kept = store.keep(arg, input_names(index, arg), resolve=True)
            except TooLong:
                self.inputs.append(GraphValue())
                long.append((index, arg))
                continue
            self.take(kept)
            self.inputs.append(GraphValue.of_kept(kept))
            if not (store.pack_now(kept) and kept.ready):
                long.append((index, arg))
        return long

    def take(self, kept: StoredValue) -> None:
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
            self.fail(CallCancelled(f"the run was cancelled before it began: {why}", executed=False))
            self.graph.withdraw(self)
            return False
        self.graph.skip(self)
        return True

    def settle(self, item: Item, refs: list[Ref[Any]]) -> None:
        """A result came, with the refs in it, or the news that a step is over."""
        state = self.states.get(item[0])
        size = len(item)
        if state is None:
            if size == 3:
                self._nobody(item[0]).on_error(decode_failure(item[1], item[2]))
        elif size == 2:
            state.on_plain(item[1])
        elif size == 1:
            state.on_stored()
        elif size == 3:
            state.on_error(decode_failure(item[1], item[2]))
        else:
            state.on_result(ReceivedValue(item[1], item[2], [], refs))

    def _nobody(self, index: int) -> ResultState:
        """A step whose result nobody holds: its error is for whoever looks after such errors."""
        target, spec = self.graph.specs[index - self.graph.inputs]
        state = ResultState(self, target, spec, target.peer.process.next_number())
        state.handles = 0
        if self.cancelled:
            state.expect_cancellation()
        return state

    def fail(self, error: BaseException) -> None:
        """It never began."""
        for state in self.states.values():
            state.on_error(copy_error(error).with_executed(False) if isinstance(error, DaftError) else error)
        self.missing.clear()
        self.over()

    def drop_inputs(self) -> None:
        """They were sent, or will not be."""
        for value in self.inputs:
            if type(value) is GraphValue and value.kept is not None:
                value.kept.release()
        self.inputs = []

    def over(self) -> None:
        """Nothing more will be reported. Idempotent."""
        if not self.packed:
            # Its inputs are being encoded; whoever does that comes back.
            return
        if self.inputs:
            self.drop_inputs()
        if self.used:
            for state in self.used:
                state.drop_use(failed=False)
            self.used = None
        # A circle that would be garbage: they know the run.
        self.states = {}


def input_names(index: int, arg: Any) -> Names:
    """What an input is called, in errors."""
    return Names("the graph", ((f"args[{index}]", arg),))
