"""A graph at its owner: starts the runs, limits how many are under way, and receives their results.

    start --> [waits in `Order`, if it cannot begin at once] --> _send: RUN to each participant
    REPORT of a participant --> reported --> OwnerRun.settle; after the last report --> _over, and the next run begins

Which run may begin, which values a report or a lost process ends, and when nothing is left:
    `_protocol.graphs.run.GraphRuns`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Hashable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.graphs.listing import ValueNote
from aiodaft._protocol.graphs.plan import Dataflow
from aiodaft._protocol.graphs.run import (
    BEGUN,
    GraphEvent,
    GraphRuns,
    GraphState,
    RunEvent,
    RunState,
)
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.connections.route import Route
from aiodaft._runtime.graphs.graph_value import (
    Arguments,
    Deployment,
    GraphContext,
    GraphValue,
    OwnerRun,
    ResultState,
    Specs,
    item_of,
)
from aiodaft._runtime.graphs.strand_call import size_of
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.platform.tasks import current_terms, sent_terms
from aiodaft._runtime.serialization.encoded import kind_of
from aiodaft._runtime.serialization.errors import copy_error
from aiodaft.exceptions import ActorDied, DaftError, PeerLost, ResourceExhausted, RuntimeClosed
from aiodaft.ref import Ref

# The number of times that the plans are sent: a supervised actor may die again meanwhile.
_ATTEMPTS: Final = 10


class GraphOwner:
    def __init__(
        self,
        context: GraphContext,
        own: dict[int, GraphOwner],
        dataflow: Dataflow[Arguments],
        specs: Specs,
        max_in_flight: int,
    ) -> None:
        """Split the dataflow into plans and send them.

        Raises:
            CyclicGraph: Its steps would wait for each other in a cycle.
        """
        self.inputs = dataflow.inputs
        self.specs = specs
        self.store = context.objects.store
        self._context = context
        self._own = own
        self._lanes = self._find_lanes()
        self._deployment = Deployment(context, dataflow, specs)
        self._runs: GraphRuns[OwnerRun] = GraphRuns(max_in_flight)
        self._next: OwnerRun | None = None
        self._one_over: asyncio.Future[None] | None = None
        self._timed = dataflow.timed
        self._input_notes: dict[int, ValueNote] = {}
        self._preparing = self._prepare()

    @property
    def dataflow(self) -> Dataflow[Arguments]:
        return self._deployment.dataflow

    def _find_lanes(self) -> tuple[Hashable, ...]:
        """One lane of `Order` for the graph, one for each actor with ordered methods."""
        return (self, *dict.fromkeys(target.lane for target, spec in self.specs if spec.rules.ordered))

    def _prepare(self) -> asyncio.Task[None]:
        self._runs.on(GraphEvent.MOVED)
        self._own[self._deployment.number] = self
        return self._context.process.tasks.create_task(self._install(), name="install a graph")

    async def _install(self) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                await self._deployment.arrive()
                if self._deployment.is_stale:
                    self._redeploy()
                await self._deployment.install()
                self._runs.on(GraphEvent.INSTALLED)
                break
            except Exception as error:  # noqa: BLE001 - every run fails with it
                if not (isinstance(error, ActorDied) and self._deployment.is_stale) or attempt == _ATTEMPTS:
                    self._runs.on(GraphEvent.FAILED, error)
                    break
        self._pump()

    def _redeploy(self) -> None:
        old = self._deployment
        self._deployment = Deployment(self._context, old.dataflow, self.specs)
        self._own[self._deployment.number] = self
        if not self._runs.sent_with(old):
            self._forget(old)

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
        outgoing, before, self._lanes = self._context.outgoing, self._lanes, self._find_lanes()
        for run in self._runs.waiting:
            outgoing.order.move(run, self._lanes)
            run.lanes = self._lanes
        outgoing.look_again((*before, *self._lanes))
        try:
            while self._runs.sent_with(old):
                await self._wait_for_one()
        except asyncio.CancelledError:
            for run in self._runs.sent_with(old):
                run.cancel("an actor of its graph was replaced")
            raise

    def start(self, args: tuple[Any, ...]) -> dict[int, Ref[Any]]:
        """Begin or queue a run. Returns the refs of its outputs, by value.

        Raises:
            SerializationError: An input cannot travel.
            RuntimeClosed: The graph is closed.
        """
        context, deployment, runs = self._context, self._deployment, self._runs
        if runs.closed:
            raise RuntimeClosed("the graph is closed")
        may_be_stale = deployment.followed or deployment.is_cut
        if may_be_stale and runs.state is not GraphState.PREPARING and deployment.is_stale:
            self._preparing = self._prepare()
        run = self._next or self._make_run()
        self._next = None
        run.terms, run.lanes = current_terms.get(), self._lanes
        try:
            waits = run.take_inputs(args)
        except BaseException:
            run.release()
            raise
        if self._timed:
            self._note_inputs(run, args)
        order = context.outgoing.order
        at_once = runs.enter(run, must_wait=bool(waits or (order.lanes and order.holds_up(self._lanes))))
        if at_once:
            # First, so that the participants work while this makes the refs.
            self._send(run)
        refs: dict[int, Ref[Any]] = {}
        for position, (value, (target, spec, connection)) in enumerate(deployment.results.items()):
            state = run.states[value] = ResultState(target, spec, run.numbers[position])
            state.run = run
            refs[value] = Ref(state)
            if at_once:
                state.connection = connection
        if at_once:
            self._next = self._make_run()
            return refs
        order.enter(run)
        if waits:
            run.on(RunEvent.COPY)
            copying = self._copy(run, waits)
            context.process.tasks.create_task(copying, name="copy the inputs of a graph")
        else:
            self._pump()
        return refs

    def _note_inputs(self, run: OwnerRun, args: tuple[Any, ...]) -> None:
        for number, (arg, value) in enumerate(zip(args, run.inputs, strict=True)):
            stored = value.stored if type(value) is GraphValue else None
            self._input_notes[number] = ValueNote(kind_of(arg), None if stored is None else size_of(stored))

    async def notes(self) -> dict[int, ValueNote]:
        """Wait for the runs that are under way, and ask the processes their notes on the values.

        Raises:
            DaftError: A process is gone, or the graph is closed.
        """
        if self._runs.closed:
            raise RuntimeClosed("the graph is closed")
        begun = set(self._runs.all)
        while not begun.isdisjoint(self._runs.all):
            await self._wait_for_one()
        number, agent_of = self._deployment.number, self._context.agent_of
        answers = await asyncio.gather(*(agent_of(process).graph_notes(number) for process in self._deployment.plans))
        notes = self._input_notes.copy()
        for answer in answers:
            notes.update(answer)
        return notes

    def _make_run(self) -> OwnerRun:
        count = len(self._deployment.results)
        return OwnerRun(self, tuple(itertools.islice(self._context.process.numbers, count)))

    async def _copy(self, run: OwnerRun, inputs: list[StoredValue]) -> None:
        try:
            for stored in inputs:
                await self._context.objects.store.make_ready(stored)
        except Exception as error:  # noqa: BLE001 - the run fails with it
            if run.state is RunState.COPYING:
                run.fail(error)
                self.withdraw(run)
        run.on(RunEvent.COPIED)
        if run.state is RunState.OVER:
            run.release()
        self._pump()

    def _pump(self) -> None:
        self._context.outgoing.look_again((self,))
        if self._runs.closed:
            self._end()

    def may_begin(self) -> bool:
        if not self._runs.may_begin():
            return False
        if self._runs.state is GraphState.READY and self._deployment.is_stale:
            self._preparing = self._prepare()
            return False
        return True

    def turn_came(self, run: OwnerRun) -> None:
        broken = self._runs.turn_came()
        if broken is None:
            self._send(run)
        else:
            run.fail(broken)
            self._over(run)

    def _send(self, run: OwnerRun) -> None:
        context, inputs = self._context, run.inputs
        run.state = BEGUN[run.state]
        run.deployment = deployment = self._deployment
        for value, state in run.states.items():
            _, _, state.connection = deployment.results[value]
        run.missing = deployment.reports.copy()
        terms = None if run.terms is None else sent_terms(run.terms, context.process.loop.time)
        oldest = next(iter(self._runs.all))
        for route, needed, positions in deployment.run_routes:
            # Comprehensions, which take a third of the time of `zip` and `map`.
            if run.is_plain:
                items = tuple([(index, inputs[index]) for index in needed])
            else:
                refs = context.objects.refs
                items = tuple([item_of(inputs[index], index, refs, route, executed=False) for index in needed])
            numbers = tuple([run.numbers[position] for position in positions])
            route.send_in_turn((m.RUN, deployment.number, run.number, oldest, terms, numbers, items))
            if route.lost is not None:
                context.when_explained(route, partial(self._lost_unsent, run, route.remote))
        run.drop_inputs()

    def reported(self, number: int, items: tuple[m.GraphItem, ...], route: Route) -> None:
        run = self._runs.all.get(number)
        if run is None:
            return
        for item in items:
            if not run.report(item):
                continue
            if len(item) == m.PLAIN_VALUE and item[0] in run.states:
                run.states[item[0]].on_plain(item[1])
            elif len(item) == m.ENCODED_VALUE and item[3]:
                self._context.process.tasks.create_task(self._adopt(run, item, route), name="adopt refs")
            else:
                run.settle(item, [])
        if not run.missing:
            self._over(run)

    async def _adopt(self, run: OwnerRun, item: m.GraphItem, route: Route) -> None:
        refs = await self._context.objects.refs.adopt(item[3], route)
        if run.missing.pop(item[0], None) is not None:
            run.settle(item, refs)
            if not run.missing:
                self._over(run)

    def _over(self, run: OwnerRun) -> None:
        if not self._runs.over(run):
            return
        run.release()
        deployment = run.deployment
        if deployment is not None and deployment is not self._deployment and not self._runs.sent_with(deployment):
            self._forget(deployment)
        if self._one_over is not None:
            self._one_over.set_result(None)
            self._one_over = None
        if self._runs.waiting or self._runs.closed:
            self._pump()

    def edge_cut(self, number: int, sender: PeerId, receiver: PeerId, why: DaftError) -> None:
        if number == self._deployment.number:
            self._deployment.is_cut = True
        self._context.agent_of(receiver).edge_failed.tell(number, sender, why)

    def step_failed(self, number: int, why: DaftError) -> None:
        run = self._runs.all.get(number)
        if run is not None and run.deployment is not None and not run.has_failed:
            run.has_failed = True
            run.deployment.is_cut = run.deployment.is_cut or type(why) in {PeerLost, ResourceExhausted}
            for remote in run.deployment.plans:
                self._context.agent_of(remote).run_failed.tell(run.deployment.number, number, why)

    def withdraw(self, run: OwnerRun) -> None:
        self._runs.withdraw(run)
        self._context.outgoing.order.leave(run)
        self._over(run)
        self._context.outgoing.look_again(run.lanes)

    def in_flight_with(self, remote: PeerId) -> int:
        return sum(remote in (run.deployment or self._deployment).plans for run in self._runs.all.values())

    def lost(self, remote: PeerId, error: DaftError) -> None:
        for target in self._deployment.followed:
            target.not_found(remote)
        if remote in self._deployment.plans and type(error) is PeerLost:
            self._deployment.is_cut = True
        for run, values in self._runs.lose(remote):
            self._fail_lost(run, values, error)

    def _lost_unsent(self, run: OwnerRun, remote: PeerId, error: DaftError) -> None:
        self._fail_lost(run, run.lose(remote), copy_error(error).with_executed(False))

    def _fail_lost(self, run: OwnerRun, values: list[int], error: DaftError) -> None:
        if values:
            self.step_failed(run.number, error)
        for value in values:
            if value in run.states:
                run.states[value].on_error(copy_error(error))
        if run.is_reported:
            self._over(run)

    def abandon(self, error: DaftError) -> None:
        self._preparing.cancel()
        self._runs.on(GraphEvent.FAILED, error)
        # Each end lets the next runs fail in their turn.
        while self._runs.waiting:
            run = self._runs.waiting[0]
            run.fail(error)
            self.withdraw(run)

    def cancel(self, why: str) -> None:
        for run in list(self._runs.all.values()):
            run.cancel(why)

    async def wait_ready(self) -> None:
        """Wait until every process has its plan, or the preparation failed (then every run fails with the error)."""
        while not self._preparing.done():
            await asyncio.wait([self._preparing])

    async def aclose(self) -> None:
        """Start no more runs, wait for those under way, and free the plans in the processes. Idempotent.

        Cancellation: the runs under way are cancelled; the plans are freed when they are over.
        """
        self._runs.closed = True
        self._end()
        try:
            while self._runs.all:
                await self._wait_for_one()
        except asyncio.CancelledError:
            self.cancel("its graph was closed")
            raise

    async def _wait_for_one(self) -> None:
        self._one_over = self._one_over or self._context.process.loop.create_future()
        await asyncio.shield(self._one_over)

    def drop(self) -> None:
        if not self._runs.closed:
            self._runs.closed = True
            # If the loop is closed, the processes are gone.
            with suppress(RuntimeError):
                self._context.process.loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self._runs.all:
            return
        self._preparing.cancel()
        self._next = None
        self._forget(self._deployment)

    def _forget(self, deployment: Deployment) -> None:
        known = self._own.pop(deployment.number, None)
        if known is not None and self._context.process.closed is None:
            deployment.uninstall()
