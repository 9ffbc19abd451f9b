"""The graphs that a process owns or takes part in; handles the messages of graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.codec import pack, pack_exts
from aiodaft._protocol.diagnostics.deadlock import CallAt
from aiodaft._protocol.graphs.layout import ValueNote
from aiodaft._protocol.graphs.plan import Dataflow, SubPlan
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.route import Route
from aiodaft._runtime.graphs.graph_value import Arguments, GraphContext, GraphValue, fetch
from aiodaft._runtime.graphs.owner import GraphOwner
from aiodaft._runtime.graphs.owner_run import Specs
from aiodaft._runtime.graphs.participant import Participant
from aiodaft._runtime.graphs.strand_call import StrandCall
from aiodaft._runtime.serialization.encoder import PLAIN
from aiodaft._runtime.serialization.small import SLOT
from aiodaft.exceptions import DaftError

# The skeleton of a value that is the value of a ref.
_FIRST_SLOT: Final = bytes((PLAIN,)) + pack(pack_exts(SLOT, 0))


class Graphs:
    def __init__(self, context: GraphContext) -> None:
        self._context = context
        self.participants: dict[tuple[PeerId, int], Participant] = {}
        self.own: dict[int, GraphOwner] = {}
        self.handlers: dict[int, Callable[[Route, m.Message], object]] = {
            m.RUN: self._run_came,
            m.FLOW: self._flow_came,
            m.REPORT: self._report_came,
            m.SKIP: self._skip_came,
        }

    def open(self, dataflow: Dataflow[Arguments], specs: Specs, max_in_flight: int) -> GraphOwner:
        """Own a graph.

        Raises:
            CyclicGraph: Its steps would wait for each other in a cycle.
        """
        return GraphOwner(self._context, self.own, dataflow, specs, max_in_flight)

    async def install(self, owner: PeerId, number: int, plan: SubPlan[Arguments]) -> None:
        """Take part in a graph. Refs from outside are constants: their values are fetched now.

        Raises:
            AttributeError: An actor of the plan has no such method.
        """
        participant = Participant(self._context, owner, number, plan)
        for route in participant.routes.values():
            self._context.connections.want_rings(route)
        for step in (step for strand in participant.strands for step in strand.steps):
            for ref in step.data.outside:
                step.outside.append(await self._constant(ref))
        self.participants[owner, number] = participant

    async def _constant(self, ref: Any) -> GraphValue:
        descriptor = self._context.objects.refs.describe(ref)
        item = (0, _FIRST_SLOT, None, (), (descriptor,))
        return await fetch(self._context.objects, self._context.connections.loopback, item)

    def notes(self, owner: PeerId, number: int) -> dict[int, ValueNote]:
        participant = self.participants.get((owner, number))
        steps = [] if participant is None else [step for strand in participant.strands for step in strand.steps]
        return {step.index: step.timing.note for step in steps if step.timing is not None}

    def uninstall(self, owner: PeerId, number: int) -> None:
        """Runs that the owner gave up when a process died may still be under way."""
        participant = self.participants.get((owner, number))
        if participant is not None:
            participant.finish(lambda: self.participants.pop((owner, number), None))

    def _run_came(self, route: Route, message: m.Message) -> None:
        _, graph, number, oldest, terms, numbers, items = message
        participant = self.participants[route.remote, graph]
        if participant.pins:
            # All runs before `oldest` are over.
            participant.pins = {run: refs for run, refs in participant.pins.items() if run >= oldest}
        participant.run(number).begin(terms, numbers, items, route)

    def _flow_came(self, route: Route, message: m.Message) -> None:
        _, owner, graph, number, items = message
        participant = self.participants.get((owner, graph))
        if participant is None or not participant.expects(route.remote):
            for _, _, blobs, *_ in (item for item in items if len(item) == m.ENCODED_VALUE):
                self._context.objects.store.decline(route, blobs)
            return
        participant.run(number).values_came(items, route)

    def _skip_came(self, route: Route, message: m.Message) -> None:
        graph, number = m.read_skip(message)
        participant = self.participants.get((route.remote, graph))
        run = None if participant is None else participant.runs.get(number)
        if run is not None:
            run.skip()

    def run_failed(self, owner: PeerId, number: int, run: int, why: DaftError) -> None:
        participant = self.participants.get((owner, number))
        found = None if participant is None else participant.runs.get(run)
        if found is not None:
            found.note_failure(why)

    def edge_failed(self, owner: PeerId, number: int, sender: PeerId, why: DaftError) -> None:
        participant = self.participants.get((owner, number))
        if participant is not None:
            participant.edge_cut(sender, why)

    def edge_cut(self, number: int, sender: PeerId, receiver: PeerId, why: DaftError) -> None:
        own = self.own.get(number)
        if own is not None:
            own.edge_cut(number, sender, receiver, why)

    def step_failed(self, number: int, run: int, why: DaftError) -> None:
        own = self.own.get(number)
        if own is not None:
            own.step_failed(run, why)

    def _report_came(self, route: Route, message: m.Message) -> None:
        _, graph, number, items = message
        own = self.own.get(graph)
        if own is not None:
            own.reported(number, items, route)

    def abandon(self, error: DaftError) -> None:
        for own in list(self.own.values()):
            own.abandon(error)

    def find(self, at: CallAt) -> StrandCall | None:
        mine = (participant for (owner, _), participant in self.participants.items() if owner == at.owner)
        return next(filter(None, (participant.find(at.number) for participant in mine)), None)

    def in_flight(self, connection: Connection) -> int:
        """The number of calls and runs whose errors would tell of the end of a process."""
        remote, session = connection.remote, connection.session
        calls = len(session.calls) - session.waiting
        own = sum(graph.in_flight_with(remote) for graph in self.own.values())
        taking_part = self.participants.values()
        return calls + own + sum(len(share.runs) for share in taking_part if remote in share.plan.receives)

    def owner_lost(self, remote: PeerId) -> None:
        for key in [key for key in self.participants if key[0] == remote]:
            participant = self.participants.pop(key)
            for run in list(participant.runs.values()):
                run.skip()
            participant.close()

    def connection_lost(self, remote: PeerId, error: DaftError) -> None:
        for participant in list(self.participants.values()):
            participant.connection_lost(remote, error)
        for own in list(self.own.values()):
            own.lost(remote, error)
