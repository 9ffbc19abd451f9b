"""The owner's side of a graph: starts its runs, at most so many at a time, and takes their results."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, cast

from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.messages import RUN, SKIP
from aiodaft._protocol.plan import Dataflow
from aiodaft._runtime.graphs.captured_call import Arguments
from aiodaft._runtime.graphs.deployment import Deployment, Specs
from aiodaft._runtime.graphs.graph_value import GraphValue, Item, item_of
from aiodaft._runtime.graphs.owner_run import OwnerRun, ResultState, input_names
from aiodaft._runtime.platform.context import current_deadline, time_left
from aiodaft._runtime.serialization.errors import copy_error
from aiodaft.exceptions import ActorDied, DaftError, RuntimeClosed
from aiodaft.ref import Ref

if TYPE_CHECKING:
    from aiodaft._runtime.connections.connection import Connection
    from aiodaft._runtime.connections.route import Route
    from aiodaft._runtime.peer import Peer

# Supervised actors may die once more while the processes are told.
_ATTEMPTS: Final = 10


class GraphOwner:
    """A graph and its runs."""

    def __init__(self, peer: Peer, flow: Dataflow[Arguments], specs: Specs, max_in_flight: int) -> None:
        """Cut the dataflow up and begin to tell the actors' processes.

        Raises:
            CyclicGraph: Its steps would wait for each other in a circle.
        """
        self.inputs = flow.inputs
        self.specs = specs
        self._lanes = self._find_lanes()
        self._layout = Deployment(peer, flow, specs)
        self._max_in_flight = max_in_flight
        self._peer = peer
        # Sent or not; those that are not wait, and the first of these until it is ready.
        self._runs: dict[int, OwnerRun] = {}
        self._waiting: deque[OwnerRun] = deque()
        self._last_run = 0
        # The next one, made while the processes work, so that nobody waits for it.
        self._next: OwnerRun | None = None
        self._idle: asyncio.Future[None] | None = None
        self._closed = False
        # The layout is known to all, or it is known why it cannot be.
        self._ready = False
        self._broken: BaseException | None = None
        self._preparing = self._prepare()

    @property
    def flow(self) -> Dataflow[Arguments]:
        """The dataflow, with its actors where they are."""
        return self._layout.flow

    def _find_lanes(self) -> tuple[Hashable, ...]:
        """Where its runs stand in the order of what is submitted."""
        return (self, *dict.fromkeys(target.lane for target, spec in self.specs if spec.rules.ordered))

    def _prepare(self) -> asyncio.Task[None]:
        self._ready, self._broken = False, None
        self._peer.graphs.own[self._layout.number] = self
        return self._peer.process.tasks.create_task(self._install(), name="install a graph")

    async def _install(self) -> None:
        for _ in range(_ATTEMPTS):
            try:
                await self._layout.find_actors()
                if self._layout.is_stale:
                    self._change(self._layout)
                await self._layout.install()
                self._broken = None
                break
            except Exception as error:  # noqa: BLE001 - whatever it is, every run says so
                self._broken = error
                if not (isinstance(error, ActorDied) and self._layout.is_stale):
                    break
        self._ready = True
        self._pump()

    def _change(self, old: Deployment) -> None:
        """Make a new layout; the old one goes with the last of its runs."""
        self._layout = Deployment(self._peer, old.flow, self.specs)
        self._peer.graphs.own[self._layout.number] = self
        if self._is_idle(old):
            self._forget(old)

    def _is_idle(self, layout: Deployment) -> bool:
        """Whether it has no runs under way."""
        return all(run.layout is not layout for run in self._runs.values())

    async def replace(self, specs: Specs) -> None:
        """Call other actors from the next run on, and wait for the runs that are under way.

        Cancellation: what is under way is cancelled.
        """
        old = self._layout
        self.specs = specs
        self._move_waiting(self._find_lanes())
        self._preparing.cancel()
        self._change(old)
        self._preparing = self._prepare()
        try:
            if not self._is_idle(old):
                await old.wait_end()
        except asyncio.CancelledError:
            for run in [run for run in self._runs.values() if run.layout is old]:
                run.cancel("an actor of its graph was replaced")
            raise

    def _move_waiting(self, lanes: tuple[Hashable, ...]) -> None:
        """Runs that wait are for other actors now."""
        sender = self._peer.sender
        before, self._lanes = self._lanes, lanes
        for run in self._waiting:
            sender.order.move(run, lanes)
            run.lanes = lanes
        sender.look_again((*before, *lanes))

    # Running.

    def start(self, args: tuple[Any, ...]) -> dict[int, Ref[Any]]:
        """Begin a run, or let it wait for its turn: the refs of its outputs.

        Raises:
            SerializationError: An input cannot travel.
            RuntimeClosed: The graph is closed.
        """
        peer = self._peer
        if self._closed:
            raise RuntimeClosed("the graph is closed")
        layout = self._layout
        if self._ready and layout.is_stale:
            self._preparing = self._prepare()
        self._last_run = number = self._last_run + 1
        run = self._next or self._make_run()
        self._next = None
        run.number, run.deadline, run.lanes = number, current_deadline.get(), self._lanes
        try:
            long = run.take_inputs(args, peer.store)
        except BaseException:
            run.over()
            raise
        at_once = self._ready and self._broken is None and not (long or self._waiting)
        at_once = at_once and len(self._runs) < self._max_in_flight
        at_once = at_once and not (peer.sender.order.lanes and peer.sender.order.holds_up(self._lanes))
        self._runs[number] = run
        if at_once:
            # The processes work while the refs are made.
            self._send(run)
        refs: dict[int, Ref[Any]] = {}
        for (value, (target, spec, connection)), result in zip(layout.results.items(), run.numbers, strict=True):
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
        return OwnerRun(self, tuple(itertools.islice(self._peer.process.numbers, len(self._layout.results))))

    def _queue(self, run: OwnerRun, long: list[tuple[int, Any]]) -> None:
        """Let a run wait for its turn, and for those of its inputs that take long."""
        self._waiting.append(run)
        self._peer.sender.order.enter(run)
        if long:
            run.packed = False
            packing = self._pack(run, long, self._peer.store.current_streams())
            self._peer.process.tasks.create_task(packing, name="copy the inputs of a graph")
        else:
            self._pump()

    async def _pack(self, run: OwnerRun, long: list[tuple[int, Any]], streams: Sequence[Any]) -> None:
        store = self._peer.store
        try:
            for index, arg in long:
                value = run.inputs[index]
                kept = value.kept if type(value) is GraphValue else None
                if kept is None:
                    kept = await store.keep_anywhere(arg, input_names(index, arg), resolve=True, streams=streams)
                    run.take(kept)
                    run.inputs[index] = GraphValue.of_kept(kept)
                await store.make_ready(kept)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the run
            if not run.sent:
                run.fail(error)
                self.withdraw(run)
        run.packed = True
        if run.sent:
            # It was withdrawn meanwhile.
            run.over()
        self._pump()

    def _pump(self) -> None:
        """Send the runs whose turn it is."""
        self._peer.sender.look_again((self,))
        if self._closed and not self._runs:
            self._drained()

    def may_begin(self) -> bool:
        """Whether the graph is ready, and has room for one more run."""
        if not self._ready or len(self._runs) - len(self._waiting) >= self._max_in_flight:
            return False
        if self._broken is None and self._layout.is_stale:
            self._preparing = self._prepare()
            return False
        return True

    def turn_came(self, run: OwnerRun) -> None:
        """Nothing that was submitted before a run waits any more, and it may begin."""
        self._waiting.popleft()
        if self._broken is not None:
            run.sent = True
            run.fail(self._broken)
            self._over(run)
        else:
            self._send(run)

    def _send(self, run: OwnerRun) -> None:
        peer, inputs = self._peer, run.inputs
        run.sent = True
        run.layout = layout = self._layout
        for value, state in run.states.items():
            _, _, state.connection = layout.results[value]
        run.missing = layout.reports.copy()
        left = time_left(run.deadline, peer.process.loop.time)
        oldest = next(iter(self._runs))
        # Whoever may have to say that the time is over has to know when.
        quiet = layout.some_follow and left is None and layout.may_be_quiet
        # Who sleeps and waits for others is told first, and not woken: they do it. Else who begins is told first.
        for value_route in reversed(layout.value_routes) if quiet else layout.value_routes:
            route = value_route.route
            chosen = (
                enumerate(inputs)
                if value_route.inputs is None
                else [(index, inputs[index]) for index in value_route.inputs]
            )
            if run.plain:
                items = tuple(chosen)
            else:
                items = tuple([item_of(value, index, peer, route, executed=False) for index, value in chosen])
            numbers = (
                run.numbers if value_route.results is None else tuple(map(run.numbers.__getitem__, value_route.results))
            )
            send = route.send_quietly if quiet and value_route.plan.follows else route.send_in_turn
            send((RUN, layout.number, run.number, oldest, left, numbers, items))
            if route.lost is not None:
                peer.process.tasks.create_task(
                    self._explain_loss(run, value_route.process), name="explain a lost actor"
                )
        run.drop_inputs()

    async def _explain_loss(self, run: OwnerRun, process: PeerId) -> None:
        assert run.layout is not None
        error = await self._peer.connections.explanation(cast("Connection", run.layout.routes[process]))
        # It was gone before the run was sent.
        self._lost_run(run, process, copy_error(error).with_executed(False))

    # Reports.

    def reported(self, number: int, items: tuple[Item, ...], neighbour: Route) -> None:
        """Results came, or the news that steps are over."""
        run = self._runs.get(number)
        if run is None:
            return
        missing = run.missing
        for item in items:
            index = item[0]
            if index not in missing:
                continue
            if len(item) == 5 and item[3]:
                self._peer.process.tasks.create_task(self._adopt(run, item, neighbour), name="adopt refs")
                continue
            del missing[index]
            if len(item) == 2 and index in run.states:
                # The usual case.
                run.states[index].on_plain(item[1])
            else:
                run.settle(item, [])
        if not missing:
            self._end(run)

    async def _adopt(self, run: OwnerRun, item: Item, neighbour: Route) -> None:
        refs = await self._peer.refs.adopt(item[3], neighbour)
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
            run.over()
            layout = run.layout
            if layout is not self._layout and layout is not None and self._is_idle(layout):
                layout.end()
                self._forget(layout)

    # Ending.

    def withdraw(self, run: OwnerRun) -> None:
        """Take back a run that was not sent."""
        if not run.sent:
            self._waiting.remove(run)
            run.sent = True
            self._peer.sender.order.leave(run)
        self._end(run)
        self._peer.sender.look_again(run.lanes)

    def skip(self, run: OwnerRun) -> None:
        """Tell everybody that nobody wants a run's results."""
        assert run.layout is not None
        for route in run.layout.routes.values():
            route.send_in_turn((SKIP, run.layout.number, run.number))

    def in_flight_with(self, remote: PeerId) -> int:
        """Runs under way that a process takes part in."""
        # Those that wait say so, too, if a process that is gone is one that they need.
        return sum(remote in (run.layout or self._layout).plans for run in self._runs.values())

    def lost(self, remote: PeerId, error: DaftError) -> None:
        """A process is gone: what it has not reported will not come."""
        self._layout.leave(remote)
        sent = [(run, run.layout) for run in self._runs.values() if run.layout is not None]
        for layout in dict.fromkeys(layout for _, layout in sent):
            layout.wake()
        for run, _ in sent:
            self._lost_run(run, remote, error)

    def cut_off(self, number: int) -> None:
        """A process of a layout is not woken by another one any more: the owner wakes it for every run."""
        for layout in {self._layout, *(run.layout for run in self._runs.values())}:
            if layout is not None and layout.number == number:
                layout.cut_off()

    def _lost_run(self, run: OwnerRun, remote: PeerId, error: DaftError) -> None:
        for index in [index for index in run.missing if run.missing[index] == remote]:
            del run.missing[index]
            state = run.states.get(index)
            if state is not None:
                state.on_error(copy_error(error))
        if not run.missing:
            self._end(run)

    async def wait_ready(self) -> None:
        """Wait until every process knows its part, or it is known that one cannot: its runs say why.

        Cancellation: only this wait ends.
        """
        while not self._preparing.done():
            await asyncio.wait([self._preparing])

    def abandon(self, error: DaftError) -> None:
        """The runtime is closed: no run that waits begins any more."""
        self._ready, self._broken = True, error
        for run in list(self._waiting):
            if not run.sent:
                run.fail(error)
                self.withdraw(run)

    def cancel(self, why: str) -> None:
        """Cancel every run."""
        for run in list(self._runs.values()):
            run.cancel(why)

    async def aclose(self) -> None:
        """Start no more runs, wait for those under way, and free what the processes have of it. Idempotent.

        Cancellation: what is still under way is cancelled; what the processes have is freed when that is over.
        """
        self._closed = True
        try:
            while self._runs:
                self._idle = self._idle or self._peer.process.loop.create_future()
                await asyncio.shield(self._idle)
        except asyncio.CancelledError:
            self.cancel("its graph was closed")
            raise
        self._uninstall()

    def drop(self) -> None:
        """Nobody can start a run any more: the same as `aclose`, without waiting. Safe in any thread. Idempotent."""
        if not self._closed:
            self._closed = True
            # The loop may be closed: then the processes are gone.
            with suppress(RuntimeError):
                self._peer.process.loop.call_soon_threadsafe(self._drained)

    def _drained(self) -> None:
        """There may be no runs left of a graph that is closed."""
        if self._runs:
            return
        idle, self._idle = self._idle, None
        if idle is not None:
            idle.set_result(None)
        self._uninstall()

    def _uninstall(self) -> None:
        self._preparing.cancel()
        # It knows this.
        self._next = None
        self._forget(self._layout)

    def _forget(self, layout: Deployment) -> None:
        known = self._peer.graphs.own.pop(layout.number, None)
        if known is not None and self._peer.process.closed is None:
            layout.uninstall()
