"""A graph at its owner: starts the runs, limits how many are under way, and receives their results.

    start --> [waits in `Order`, if it cannot begin at once] --> _send: RUN to each participant
    REPORT of a participant --> reported --> OwnerRun.settle; after the last report --> _end, and the next run begins

The states of the graph and of its runs, with their transitions, are in `_protocol.run`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any, Final, cast

from aiodaft._protocol import messages as m
from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.plan import Dataflow
from aiodaft._protocol.run import GRAPH, RUN, UNSENT, GraphEvent, GraphState, RunEvent, RunState, may_begin
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.route import Route
from aiodaft._runtime.graphs.captured_call import Arguments
from aiodaft._runtime.graphs.context import GraphContext
from aiodaft._runtime.graphs.deployment import Deployment, Specs
from aiodaft._runtime.graphs.graph_value import GraphValue, item_of
from aiodaft._runtime.graphs.owner_run import OwnerRun, ResultState, input_names
from aiodaft._runtime.platform.context import current_deadline, time_left
from aiodaft._runtime.serialization.errors import copy_error
from aiodaft.exceptions import ActorDied, DaftError, RuntimeClosed
from aiodaft.ref import Ref

# How often the plans are sent: a supervised actor may die again meanwhile.
_ATTEMPTS: Final = 10


class GraphOwner:
    """A graph and its runs."""

    def __init__(
        self,
        context: GraphContext,
        own: dict[int, GraphOwner],
        dataflow: Dataflow[Arguments],
        specs: Specs,
        max_in_flight: int,
    ) -> None:
        """Split the dataflow into plans and send them. `own` has the graphs of this process by deployment.

        Raises:
            CyclicGraph: Its steps would wait for each other in a cycle.
        """
        self.inputs = dataflow.inputs
        self.specs = specs
        self._context = context
        self._own = own
        self._lanes = self._find_lanes()
        self._deployment = Deployment(context, dataflow, specs)
        self._max_in_flight = max_in_flight
        # All runs that are not over; and the runs among them that are not sent, in order.
        self._runs: dict[int, OwnerRun] = {}
        self._waiting: deque[OwnerRun] = deque()
        self._last_run = 0
        # The next run, made in advance while the participants work.
        self._next: OwnerRun | None = None
        self._idle: asyncio.Future[None] | None = None
        self._closed = False
        self._state = GraphState.PREPARING
        # The error, if the state is BROKEN.
        self._broken: BaseException | None = None
        self._preparing = self._prepare()

    @property
    def dataflow(self) -> Dataflow[Arguments]:
        """The dataflow with the current actors."""
        return self._deployment.dataflow

    def _find_lanes(self) -> tuple[Hashable, ...]:
        """The lanes of `Order` in which the runs wait: one for the graph, one for each actor with ordered methods."""
        return (self, *dict.fromkeys(target.lane for target, spec in self.specs if spec.rules.ordered))

    def _on(self, event: GraphEvent, broken: BaseException | None = None) -> None:
        self._state, self._broken = GRAPH[self._state][event], broken

    def _prepare(self) -> asyncio.Task[None]:
        self._on(GraphEvent.MOVED)
        self._own[self._deployment.number] = self
        return self._context.process.tasks.create_task(self._install(), name="install a graph")

    async def _install(self) -> None:
        broken: BaseException | None = None
        for _ in range(_ATTEMPTS):
            broken = None
            try:
                await self._deployment.find_actors()
                if self._deployment.is_stale:
                    self._redeploy()
                await self._deployment.install()
                break
            except Exception as error:  # noqa: BLE001 - every run fails with it
                broken = error
                if not (isinstance(error, ActorDied) and self._deployment.is_stale):
                    break
        self._on(GraphEvent.INSTALLED if broken is None else GraphEvent.FAILED, broken)
        self._pump()

    def _redeploy(self) -> None:
        """Make a new deployment. The old one ends when its last run is over."""
        old = self._deployment
        self._deployment = Deployment(self._context, old.dataflow, self.specs)
        self._own[self._deployment.number] = self
        if self._is_idle(old):
            self._forget(old)

    def _is_idle(self, deployment: Deployment) -> bool:
        """Whether a deployment has no runs under way."""
        return all(run.deployment is not deployment for run in self._runs.values())

    async def replace(self, specs: Specs) -> None:
        """Use other actors from the next run on, and wait for the runs under way.

        Cancellation: the runs under way are cancelled.
        """
        old = self._deployment
        self.specs = specs
        self._preparing.cancel()
        self._redeploy()
        self._preparing = self._prepare()
        # Only now: a run that is first in its new lanes is sent at once.
        self._move_waiting(self._find_lanes())
        try:
            if not self._is_idle(old):
                await old.wait_end()
        except asyncio.CancelledError:
            for run in [run for run in self._runs.values() if run.deployment is old]:
                run.cancel("an actor of its graph was replaced")
            raise

    def _move_waiting(self, lanes: tuple[Hashable, ...]) -> None:
        """Move the waiting runs to other lanes."""
        outgoing = self._context.outgoing
        before, self._lanes = self._lanes, lanes
        for run in self._waiting:
            outgoing.order.move(run, lanes)
            run.lanes = lanes
        outgoing.look_again((*before, *lanes))

    # Starting runs.

    def start(self, args: tuple[Any, ...]) -> dict[int, Ref[Any]]:
        """Begin or queue a run. Returns the refs of its outputs, by value.

        Raises:
            SerializationError: An input cannot travel.
            RuntimeClosed: The graph is closed.
        """
        if self._closed:
            raise RuntimeClosed("the graph is closed")
        context, deployment = self._context, self._deployment
        if self._state is not GraphState.PREPARING and deployment.is_stale:
            self._preparing = self._prepare()
        self._last_run = number = self._last_run + 1
        run = self._next or self._make_run()
        self._next = None
        run.number, run.deadline, run.lanes = number, current_deadline.get(), self._lanes
        try:
            long = run.take_inputs(args, context.objects.store)
        except BaseException:
            run.release()
            raise
        order = context.outgoing.order
        at_once = (
            self._state is GraphState.READY
            and not (long or self._waiting)
            and len(self._runs) < self._max_in_flight
            and not (order.lanes and order.holds_up(self._lanes))
        )
        self._runs[number] = run
        if at_once:
            # First, so that the participants work while this makes the refs.
            self._send(run)
        refs: dict[int, Ref[Any]] = {}
        for (value, (target, spec, connection)), result in zip(deployment.results.items(), run.numbers, strict=True):
            state = run.states[value] = ResultState(run, target, spec, result)
            refs[value] = Ref(state)
            if at_once:
                state.connection = connection
        if at_once:
            self._next = self._make_run()
        else:
            self._queue(run, long)
        return refs

    def _make_run(self) -> OwnerRun:
        return OwnerRun(self, tuple(itertools.islice(self._context.process.numbers, len(self._deployment.results))))

    def _queue(self, run: OwnerRun, long: list[tuple[int, Any]]) -> None:
        """Queue a run, and copy its large inputs."""
        self._waiting.append(run)
        self._context.outgoing.order.enter(run)
        if long:
            run.on(RunEvent.COPY)
            copying = self._copy(run, long, self._context.objects.store.current_streams())
            self._context.process.tasks.create_task(copying, name="copy the inputs of a graph")
        else:
            self._pump()

    async def _copy(self, run: OwnerRun, long: list[tuple[int, Any]], streams: Sequence[Any]) -> None:
        store = self._context.objects.store
        try:
            for index, arg in long:
                value = run.inputs[index]
                stored = value.stored if type(value) is GraphValue else None
                if stored is None:
                    stored = await store.keep_anywhere(arg, input_names(index, arg), resolve=True, streams=streams)
                    run.inputs[index] = run.take_input(stored)
                await store.make_ready(stored)
        except Exception as error:  # noqa: BLE001 - the run fails with it
            if run.state is RunState.COPYING:
                run.fail(error)
                self.withdraw(run)
        run.on(RunEvent.COPIED)
        if run.state is RunState.OVER:
            run.release()
        self._pump()

    def _pump(self) -> None:
        """Send the runs that may begin now."""
        self._context.outgoing.look_again((self,))
        if self._closed and not self._runs:
            self._drained()

    def may_begin(self) -> bool:
        """Whether one more run can begin now. Starts a new preparation if the deployment is stale."""
        if not may_begin(self._state, len(self._runs) - len(self._waiting), self._max_in_flight):
            return False
        if self._state is GraphState.READY and self._deployment.is_stale:
            self._preparing = self._prepare()
            return False
        return True

    def turn_came(self, run: OwnerRun) -> None:
        """Send the first waiting run, or fail it if the graph is broken."""
        self._waiting.popleft()
        if self._broken is not None:
            run.on(RunEvent.ENDED)
            run.fail(self._broken)
            self._over(run)
        else:
            self._send(run)

    def _send(self, run: OwnerRun) -> None:
        context, inputs = self._context, run.inputs
        run.state = RUN[run.state][RunEvent.SENT]
        run.deployment = deployment = self._deployment
        for value, state in run.states.items():
            _, _, state.connection = deployment.results[value]
        run.missing = deployment.reports.copy()
        left = time_left(run.deadline, context.process.loop.time)
        oldest = next(iter(self._runs))
        for to in deployment.run_routes:
            route = to.route
            chosen = enumerate(inputs) if to.inputs is None else [(index, inputs[index]) for index in to.inputs]
            if run.is_plain:
                items = tuple(chosen)
            else:
                refs = context.objects.refs
                items = tuple([item_of(value, index, refs, route, executed=False) for index, value in chosen])
            numbers = run.numbers if to.results is None else tuple(map(run.numbers.__getitem__, to.results))
            route.send_in_turn((m.RUN, deployment.number, run.number, oldest, left, numbers, items))
            if route.lost is not None:
                context.process.tasks.create_task(self._explain_loss(run, to.process), name="explain a lost actor")
        run.drop_inputs()

    async def _explain_loss(self, run: OwnerRun, process: PeerId) -> None:
        """Fail the results that a run expects from a process that was gone before."""
        assert run.deployment is not None
        error = await self._context.connections.explanation(cast("Connection", run.deployment.routes[process]))
        self._lost_run(run, process, copy_error(error).with_executed(False))

    # Reports.

    def reported(self, number: int, items: tuple[m.GraphItem, ...], route: Route) -> None:
        """Settle the results in a REPORT."""
        run = self._runs.get(number)
        if run is None:
            return
        missing = run.missing
        for item in items:
            index = item[0]
            if index not in missing:
                continue
            if len(item) == m.ENCODED_VALUE and item[3]:
                self._context.process.tasks.create_task(self._adopt(run, item, route), name="adopt refs")
                continue
            del missing[index]
            if len(item) == m.PLAIN_VALUE and index in run.states:
                # The usual case.
                run.states[index].on_plain(item[1])
            else:
                run.settle(item, [])
        if not missing:
            self._end(run)

    async def _adopt(self, run: OwnerRun, item: m.GraphItem, route: Route) -> None:
        """Register the refs inside a result before it settles."""
        refs = await self._context.objects.refs.adopt(item[3], route)
        if item[0] in run.missing:
            del run.missing[item[0]]
            run.settle(item, refs)
            if not run.missing:
                self._end(run)

    def _end(self, run: OwnerRun) -> None:
        self._over(run)
        if self._waiting or self._closed:
            self._pump()

    def _over(self, run: OwnerRun) -> None:
        if self._runs.pop(run.number, None) is not None:
            if run.deployment is not None:
                run.state = RUN[run.state][RunEvent.ENDED]
            run.release()
            deployment = run.deployment
            if deployment is not self._deployment and deployment is not None and self._is_idle(deployment):
                deployment.end()
                self._forget(deployment)

    # Failures and cancellation.

    def withdraw(self, run: OwnerRun) -> None:
        """Forget a run that was not sent."""
        if run.state in UNSENT:
            self._waiting.remove(run)
            run.on(RunEvent.ENDED)
            self._context.outgoing.order.leave(run)
        self._end(run)
        self._context.outgoing.look_again(run.lanes)

    def skip(self, run: OwnerRun) -> None:
        """Tell the participants to skip the rest of a run, because no result is needed."""
        assert run.deployment is not None
        for route in run.deployment.routes.values():
            route.send_in_turn(m.skip(run.deployment.number, run.number))

    def in_flight_with(self, remote: PeerId) -> int:
        """The number of runs that use a process, including the waiting ones."""
        return sum(remote in (run.deployment or self._deployment).plans for run in self._runs.values())

    def lost(self, remote: PeerId, error: DaftError) -> None:
        """Fail the results that a lost process has not reported."""
        self._deployment.leave(remote)
        for run in [run for run in self._runs.values() if run.deployment is not None]:
            self._lost_run(run, remote, error)

    def _lost_run(self, run: OwnerRun, remote: PeerId, error: DaftError) -> None:
        for index in [index for index in run.missing if run.missing[index] == remote]:
            del run.missing[index]
            state = run.states.get(index)
            if state is not None:
                state.on_error(copy_error(error))
        if not run.missing:
            self._end(run)

    def abandon(self, error: DaftError) -> None:
        """Fail the waiting runs, because the runtime is closed."""
        self._preparing.cancel()
        self._on(GraphEvent.FAILED, error)
        for run in list(self._waiting):
            if run.state in UNSENT:
                run.fail(error)
                self.withdraw(run)

    def cancel(self, why: str) -> None:
        """Cancel every run."""
        for run in list(self._runs.values()):
            run.cancel(why)

    # Opening and closing.

    async def wait_ready(self) -> None:
        """Wait until every process has its plan, or the preparation failed (then every run fails with the error).

        Cancellation: only this wait ends.
        """
        while not self._preparing.done():
            await asyncio.wait([self._preparing])

    async def aclose(self) -> None:
        """Start no more runs, wait for the runs under way, and free the plans in the processes. Idempotent.

        Cancellation: the runs under way are cancelled; the plans are freed when they are over.
        """
        self._closed = True
        try:
            while self._runs:
                self._idle = self._idle or self._context.process.loop.create_future()
                await asyncio.shield(self._idle)
        except asyncio.CancelledError:
            self.cancel("its graph was closed")
            raise
        self._uninstall()

    def drop(self) -> None:
        """Close the graph without waiting. Safe in any thread. Idempotent."""
        if not self._closed:
            self._closed = True
            # If the loop is closed, the processes are gone.
            with suppress(RuntimeError):
                self._context.process.loop.call_soon_threadsafe(self._drained)

    def _drained(self) -> None:
        """Free the plans of a closed graph, if no runs are left."""
        if self._runs:
            return
        idle, self._idle = self._idle, None
        if idle is not None:
            idle.set_result(None)
        self._uninstall()

    def _uninstall(self) -> None:
        self._preparing.cancel()
        # Breaks a reference cycle.
        self._next = None
        self._forget(self._deployment)

    def _forget(self, deployment: Deployment) -> None:
        known = self._own.pop(deployment.number, None)
        if known is not None and self._context.process.closed is None:
            deployment.uninstall()
