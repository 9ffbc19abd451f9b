"""One run of a graph at its owner: its inputs, its results, and the refs of them."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias, cast

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.graphs.plan import ActorKey, Dataflow, SubPlan, make_plan
from aiodaft._protocol.graphs.run import BEING_COPIED, UNSENT, OwnedRun, RunEvent, RunState
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._runtime.calls.call import CallState, Target
from aiodaft._runtime.calls.following import FollowingTarget
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.graphs.graph_value import Arguments, Flowing, GraphContext, GraphValue, Opaque
from aiodaft._runtime.objects.ref_state import RefState, state_of
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.platform.tasks import Terms
from aiodaft._runtime.serialization.decoder import ReceivedValue
from aiodaft._runtime.serialization.encoder import Names, all_plain, is_plain
from aiodaft._runtime.serialization.errors import copy_error, decode_failure
from aiodaft.exceptions import CallCancelled, DaftError, PeerLost
from aiodaft.methods import MethodSpec
from aiodaft.ref import Ref

Specs: TypeAlias = list[tuple[Target, MethodSpec]]


class Deployment:
    """A dataflow on the processes where its actors are. When an actor moves or is replaced, a new one is made.

    Attributes:
        results: For each output: the actor and the method that make it, and the connection it comes over (None if it is
            made in this process).
        run_routes: For each process the route to it, the inputs that it needs, and the positions of its outputs among
            all.
        is_cut: Whether a connection between its processes broke, so that the next run needs another deployment.
        followed: Its supervised actors, also those that only have steps of collectives beside them.
    """

    def __init__(self, context: GraphContext, dataflow: Dataflow[Arguments], specs: Specs) -> None:
        """Cut the dataflow up.

        Raises:
            CyclicGraph: Its steps would wait for each other in a cycle.
        """
        self._context = context
        self.number = context.process.next_number()
        self.dataflow = dataflow.with_actors([(_place(target), target.label) for target, _ in specs])
        self.plans = make_plan(self.dataflow)
        self.reports = {
            result.value: process for process, plan in self.plans.items() for result in plan.results if result.reported
        }
        self.routes = {process: context.connections.route_to(process) for process in self.plans}
        self.results: dict[int, tuple[Target, MethodSpec, Connection | None]] = {}
        for value in dataflow.outputs:
            route = self.routes[self.reports[value]]
            connection = None if route is context.connections.loopback else cast("Connection", route)
            self.results[value] = (*specs[value - dataflow.inputs], connection)
        position = [*self.results].index
        self.run_routes = [
            (self.routes[process], plan.inputs, tuple(map(position, plan.outputs)))
            for process, plan in self.plans.items()
        ]
        self._failed = self.is_cut = False
        self._places = [(host, _place(host)) for host in dict.fromkeys(target.host for target, _ in specs)]
        self.followed = [host for host, _ in self._places if isinstance(host, FollowingTarget)]

    @property
    def is_stale(self) -> bool:
        if self.is_cut or not self.followed:
            return self.is_cut
        return self._failed or any(_place(host) != place for host, place in self._places)

    async def arrive(self) -> None:
        while True:
            for target in self.followed:
                await target.arrive()
            if not any(target.is_down for target in self.followed):
                return

    async def install(self) -> None:
        start = self._context.process.tasks.start
        installing = [
            start(self._install(plan), name=f"install a graph in {plan.process}") for plan in self.plans.values()
        ]
        results = await asyncio.gather(*installing, return_exceptions=True)
        failed = next((result for result in results if isinstance(result, BaseException)), None)
        if failed is not None:
            self._failed = True
            self.is_cut = type(failed) is PeerLost
            raise failed

    async def _install(self, plan: SubPlan[Arguments]) -> None:
        self._context.connections.want_rings(self.routes[plan.process])
        await self._context.agent_of(plan.process).install(self.number, Opaque(plan))

    def uninstall(self) -> None:
        for process in self.plans:
            connection = self._context.connections.get(process)
            if connection is None or connection.lost is None:
                self._context.process.tasks.create_task(self._uninstall(process), name=f"forget a graph in {process}")

    async def _uninstall(self, process: PeerId) -> None:
        # A process that dies meanwhile needs no message.
        with suppress(DaftError):
            await self._context.agent_of(process).uninstall(self.number)


def _place(target: Target) -> ActorKey:
    return target.host.remote, target.actor


class GraphOfRun(Protocol):
    store: Store
    inputs: int
    specs: Specs

    def may_begin(self) -> bool: ...

    def turn_came(self, run: OwnerRun) -> None: ...

    def withdraw(self, run: OwnerRun) -> None: ...


class ResultState(CallState):
    run: OwnerRun

    def _cancel(self, why: str) -> bool:
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
    terms: Terms | None = None
    deployment: Deployment | None = None
    # The actors, and the graph itself, because its runs keep their order.
    lanes: Sequence[Hashable] = ()
    # Refs inside the inputs.
    used: list[RefState] | None = None
    # All inputs travel in frames as they are.
    is_plain = False
    has_failed = False

    def __init__(self, graph: GraphOfRun, numbers: tuple[CallId, ...]) -> None:
        # Not by `super`: the fewer functions a run enters, the better.
        self.missing = {}
        self._graph = graph
        self.numbers = numbers
        self.states: dict[int, ResultState] = {}
        self.inputs: list[Flowing] = []

    def may_go(self) -> bool:
        return self.state is RunState.WAITING and self._graph.may_begin()

    def go(self) -> None:
        self._graph.turn_came(self)

    def take_inputs(self, args: tuple[Any, ...]) -> list[StoredValue]:
        """Returns those that a helper thread or an accelerator has to copy."""
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
        used = [state_of(ref) for ref in (*stored.encoded.slots, *stored.refs)]
        for state in used:
            state.add_use()
        self.used = [*(self.used or ()), *used]
        return GraphValue(stored=stored)

    def drop_inputs(self) -> None:
        if not self.is_plain:
            for value in self.inputs:
                if type(value) is GraphValue and value.stored is not None:
                    value.stored.release()
        self.inputs = []

    def cancel(self, why: str) -> bool:
        for state in self.states.values():
            state.expect_cancellation()
        if self.state in UNSENT:
            self.fail(CallCancelled(f"the run was cancelled before it began: {why}", executed=False))
            self._graph.withdraw(self)
            return False
        if self.state is RunState.UNDER_WAY and self.deployment is not None:
            self.on(RunEvent.CANCELLED)
            for route in self.deployment.routes.values():
                route.send_in_turn(m.skip(self.deployment.number, self.number))
        return True

    def settle(self, item: m.GraphItem, refs: list[Ref[Any]]) -> None:
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
        # Breaks a cycle.
        self.states = {}


def _names(index: int, arg: Any) -> Names:
    return Names("the graph", ((f"args[{index}]", arg),))
