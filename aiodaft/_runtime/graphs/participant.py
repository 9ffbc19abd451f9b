"""The part of a graph in one process: receives the values of each run, starts the strands, and sends the results.

    owner ---- RUN: inputs ------------------------> ParticipantRun.begin --> strands, into the actors' mailboxes
    other participants ---- FLOW: results ---------> ParticipantRun.values_came --> segments that waited start
    StrandCall: a step is over ---> ParticipantRun.tell --+--> segments of this process that wait for the result
                                                          +--> FLOW to the participants that need it
                                                          +--> REPORT to the owner

A strand is a call by the graph's owner, which starts with its first segment and waits for the values of each later one.
Each process sends each of its results, or its error, exactly once to every process that needs it. So no process waits
for ever if a step fails or is skipped or an actor dies. The values that a run waits for, the segments that a value
starts and the end of the run: `_protocol.graphs.run.Share`. The receivers of a result: `_protocol.graphs.plan.Result`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from aiodaft._protocol.calls.mailbox import ANSWER, FETCHED, FETCHING, NEXT
from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.codec import pack, pack_exts
from aiodaft._protocol.diagnostics.failures import CallAt
from aiodaft._protocol.graphs.listing import ValueNote
from aiodaft._protocol.graphs.plan import Dataflow, Report, SubPlan
from aiodaft._protocol.graphs.run import Needs, Share
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._runtime.actors.hosted_actor import InboundCall
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.route import Route
from aiodaft._runtime.graphs.graph_value import (
    Arguments,
    Flowing,
    GraphContext,
    GraphValue,
    Specs,
    fetch,
    item_of,
    value_of,
)
from aiodaft._runtime.graphs.owner import GraphOwner
from aiodaft._runtime.graphs.strand_call import BoundStep, BoundStrand, StrandCall
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.platform.tasks import received_terms
from aiodaft._runtime.serialization.encoder import PLAIN
from aiodaft._runtime.serialization.errors import copy_error
from aiodaft._runtime.serialization.small import SLOT, Small
from aiodaft.exceptions import ActorDied, DaftError, PeerLost, ResourceExhausted


class Participant:
    def __init__(self, context: GraphContext, owner: PeerId, number: int, plan: SubPlan[Arguments]) -> None:
        """Raises AttributeError: an actor has no such method."""
        self.context = context
        self.owner = owner
        self.number = number
        self.plan = plan
        self.needs = Needs(plan, owner, number)
        self.runs: dict[int, ParticipantRun] = {}
        self._receivers = set(itertools.chain.from_iterable(result.sends for result in plan.results))
        others = {owner, *plan.receives, *self._receivers}
        self.routes = {remote: context.connections.route_to(remote) for remote in others}
        self.route = self.routes[owner]
        self.strands = [BoundStrand(context, plan, strand, self.routes, StrandCall.execute) for strand in plan.strands]
        # The next run, made in advance, so that no message waits for it.
        self._next: ParticipantRun | None = ParticipantRun(self)
        self._finished: Callable[[], object] | None = None
        # Refs inside results: kept until the receivers have registered them.
        self.pins: dict[int, list[Any]] = {}
        self._cut: dict[PeerId, DaftError] = {}

    def run(self, number: int) -> ParticipantRun:
        run = self.runs.get(number)
        if run is None:
            run, self._next = self._next or ParticipantRun(self), None
            run.number = number
            self.runs[number] = run
            for remote in self.plan.receives:
                if remote in self._cut:
                    run.lost(remote, self._cut[remote])
                elif self.routes[remote].lost is not None:
                    self.context.when_explained(self.routes[remote], partial(run.lost, remote))
        return run

    def expects(self, remote: PeerId) -> bool:
        return remote not in self._cut

    def connection_lost(self, remote: PeerId, error: DaftError) -> None:
        """Fail the values that come from a process; if it lives and needs values of this one, tell the owner.

        It may have another connection to this process, which it does not lose.
        """
        for run in list(self.runs.values()):
            run.lost(remote, error)
        lives = isinstance(error, PeerLost | ResourceExhausted)
        if lives and remote in self._receivers and self.routes[remote].lost is not None:
            self.context.agent_of(self.owner).edge_cut.tell(self.number, remote, error)

    def edge_cut(self, remote: PeerId, error: DaftError) -> None:
        self._cut[remote] = error
        for run in list(self.runs.values()):
            run.lost(remote, error)

    def forget(self, run: ParticipantRun) -> None:
        if self.runs.pop(run.number, None) is None:
            return
        if self._finished is not None:
            self._end()
        elif self._next is None:
            self._next = ParticipantRun(self)

    def finish(self, finished: Callable[[], object]) -> None:
        self._finished = finished
        self._end()

    def _end(self) -> None:
        finished = self._finished
        if finished is not None and not self.runs:
            self.close()
            finished()

    def close(self) -> None:
        self._finished = None
        for run in filter(None, (self._next, *self.runs.values())):
            run.drop()
        self._next = None
        self.runs.clear()

    def find(self, number: CallId) -> StrandCall | None:
        """Find a strand by its number in the deadlock search, or by the number of a result that it makes."""
        for run in self.runs.values():
            strand = self.needs.strand_with(number, run.number, run.numbers)
            if strand is not None and run.calls:
                return run.calls[strand]
        return None


class ParticipantRun(Share[Flowing]):
    calls: Sequence[StrandCall] = ()
    number = 0
    numbers: tuple[CallId, ...] = ()
    # Results that steps of this process may still read.
    _read_here: list[StoredValue] | None = None

    def __init__(self, participant: Participant) -> None:
        super().__init__(participant.needs)
        self.participant = participant
        self.owner = participant.owner
        self._prepared: Sequence[StrandCall] = [StrandCall(self, strand) for strand in participant.strands]

    @property
    def key(self) -> tuple[PeerId, int, int]:
        """Names the run in all processes."""
        return self.owner, self.participant.number, self.number

    def drop(self) -> None:
        """The prepared calls refer to the run: otherwise only garbage collection frees them."""
        super().drop()
        self._prepared = ()

    def begin(
        self, sent: m.SentTerms, numbers: tuple[CallId, ...], items: tuple[m.GraphItem, ...], route: Route
    ) -> None:
        self.numbers = numbers
        items = self.run_came(items)
        if items:
            self.values_came(items, route)
        calls, self._prepared = self._prepared, ()
        if sent is not None:
            terms = received_terms(sent, self.participant.context.process.loop.time)
            for call in calls:
                call.terms, call.deadline = terms, terms.deadline
        # Set before the first call can end.
        self.calls = calls
        if any(self.missing):
            for call in calls:
                if self.missing[call.strand.first]:
                    call.stage = FETCHING
        for call in calls:
            call.deliver()

    def values_came(self, items: tuple[m.GraphItem, ...], route: Route) -> None:
        for item in items:
            if len(item) == m.PLAIN_VALUE:
                self._take(item[0], item[1])
            elif (value := value_of(item)) is not None:
                self._take(item[0], value)
            else:
                fetching = self._fetch(item, route)
                self.participant.context.process.tasks.create_task(fetching, name="fetch a value of a graph")

    async def _fetch(self, item: m.GraphItem, route: Route) -> None:
        self._take(item[0], await fetch(self.participant.context.objects, route, item))

    def _take(self, index: int, value: Flowing, *, at_once: bool = True) -> None:
        if type(value) is GraphValue:
            value.uses = self.participant.plan.uses[index]
        ready = self.take(index, value)
        if ready:
            self._start(ready, at_once=at_once)
        if not self.to_come:
            self._forget_if_done()

    def _start(self, segments: Sequence[int], *, at_once: bool = True) -> None:
        if self.calls:
            for segment in segments:
                call = self.calls[self.needs.strands[segment]]
                if segment == call.waits_at:
                    call.pause.wake()
                elif segment == call.strand.first and call.handle(FETCHED):
                    call.hosted.look_again(at_once=at_once)

    def give(self, step: BoundStep, value: GraphValue, stored: StoredValue) -> None:
        if stored.ready and not step.result.outlives(is_inline=stored.is_inline):
            self.tell(step, value, stored)
        else:
            self.unfinished += 1
            giving = self._give_later(step, value, stored)
            self.participant.context.process.tasks.create_task(giving, name="give a value of a graph")

    async def _give_later(self, step: BoundStep, value: GraphValue, stored: StoredValue) -> None:
        objects = self.participant.context.objects
        try:
            if step.result.outlives(is_inline=stored.is_inline):
                await value.fetch_own(objects)
            else:
                await objects.store.make_ready(stored)
        except Exception as error:  # noqa: BLE001 - the steps that need the value fail with the error
            stored.release()
            self.tell(step, GraphValue.of_error(error, executed=True))
        else:
            self.tell(step, value, stored)
        self._one_finished()

    def tell(self, step: BoundStep, value: Flowing, stored: StoredValue | None = None) -> None:
        participant, index, result = self.participant, step.index, step.result
        is_plain = type(value) is not GraphValue
        item: m.GraphItem = (index, value)
        if stored is not None and stored.refs:
            participant.pins.setdefault(self.number, []).extend(stored.refs)
        if result.awaited:
            self._start(self.put(index, value))
        for route in step.routes:
            if not is_plain:
                item = item_of(value, index, participant.context.objects.refs, route, executed=True)
            route.send((m.FLOW, self.owner, participant.number, self.number, (item,)))
        if result.reported and participant.route.lost is None:
            if not (is_plain and step.is_output):
                item, stored = self._report(step, value, stored)
            participant.route.send((m.REPORT, participant.number, self.number, (item,)))
        if stored is not None:
            # After the release, grants keep the block until the other processes have read it.
            if result.used:
                self._read_here = [*(self._read_here or ()), stored]
            else:
                stored.release()

    def _report(
        self, step: BoundStep, value: Flowing, stored: StoredValue | None
    ) -> tuple[m.GraphItem, StoredValue | None]:
        participant, result = self.participant, step.result
        objects = participant.context.objects
        stays = stored is not None and not (stored.ready and stored.is_inline)
        report = result.report(failed=stored is None and type(value) is GraphValue, stays=stays)
        if report is Report.VALUE:
            return item_of(value, step.index, objects.refs, participant.route, executed=True), stored
        if report is Report.STORED and stored is not None and result.output is not None:
            objects.store.entries[participant.owner, self.numbers[result.output]] = stored
            stored = None
        return (step.index,), stored

    def lost(self, remote: PeerId, error: DaftError) -> None:
        expected = self.expected_from(remote)
        for index in expected:
            self._take(index, GraphValue.of_error(copy_error(error), executed=error.executed), at_once=False)
        if expected:
            self.tell_owner(error)

    def tell_owner(self, why: DaftError) -> None:
        """A failed step: the other strands must not wait for it in collectives."""
        participant = self.participant
        participant.context.agent_of(self.owner).step_failed.tell(participant.number, self.number, why)

    def note_failure(self, why: DaftError) -> None:
        for call in self.calls:
            if not call.answered:
                call.hosted.undone(call, why)

    def skip(self) -> None:
        for call in self.calls:
            if not call.answered:
                call.hosted.cancel(call)

    def _one_finished(self) -> None:
        self.unfinished -= 1
        self._forget_if_done()

    def _forget_if_done(self) -> None:
        if self.end():
            self.calls = ()
            self.participant.forget(self)
            for stored in self._read_here or ():
                stored.release()

    # The results of its steps are told already; it has none of its own.
    is_local = True

    def answer(self, call: InboundCall, result: Any) -> None:
        assert isinstance(call, StrandCall)
        if call.rules.on_thread:
            call.flush()
        after = NEXT[ANSWER].get(call.stage)
        if after is not None:
            call.stage = after
            self.unfinished -= 1
            self._forget_if_done()

    def fail(self, call: InboundCall, error: BaseException, *, executed: bool | None) -> None:
        assert isinstance(call, StrandCall)
        if not call.answered:
            call.flush()
            call.fail_rest(error, executed=executed if call.waits_at is None else False)
            self._one_finished()

    def turn_away(self, call: InboundCall) -> None:
        """Fail a strand of an actor that moves to another process: a run has one plan."""
        self.fail(call, ActorDied(f"{call.hosted.name} was stopped: {call.hosted.stopping}"), executed=False)

    def answer_stored(self, call: InboundCall, stored: StoredValue | Small) -> None:
        raise AssertionError("strands give their results themselves")

    async def item(self, call: InboundCall, value: Any) -> None:
        raise AssertionError("strands are no streams")


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
