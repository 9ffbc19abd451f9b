"""The owner's side of a graph: starts its runs, at most so many at a time, and takes their results."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.messages import RUN, SKIP
from aiodaft._protocol.plan import Dataflow, SubPlan, make_plan
from aiodaft.exceptions import DaftError, RuntimeClosed
from aiodaft.ref import Ref
from aiodaft_transport import TransportError

from .arguments import Arguments, Sealed
from .callers import is_plain
from .failures import copy_error, decode_error
from .flow import Item, Value
from .kept import Arrived
from .pickling import TooLong
from .runs import OwnRun, ResultState
from .serialization import Names

if TYPE_CHECKING:
    from aiodaft.methods import MethodSpec

    from .calls import Target
    from .link import Neighbour
    from .peer import Peer


class OwnGraph:
    """A graph and its runs."""

    def __init__(
        self, peer: Peer, flow: Dataflow[Arguments], specs: list[tuple[Target, MethodSpec]], max_in_flight: int
    ) -> None:
        """Cut the dataflow up and begin to tell the actors' processes.

        Raises:
            ImpossibleOrder: Its steps would wait for each other in a circle.
        """
        self.flow = flow
        self.specs = specs
        self.plans = make_plan(flow)
        self.reports = {value: process for process, plan in self.plans.items() for value in plan.reports}
        self.max_in_flight = max_in_flight
        self._outputs = tuple(dict.fromkeys(flow.outputs))
        self._routes = [(process, plan.inputs, plan.outputs) for process, plan in self.plans.items()]
        self._peer = peer
        self._number = peer.next_number()
        self._runs: dict[int, OwnRun] = {}
        self._waiting: deque[OwnRun] = deque()
        self._last_run = 0
        self._idle: asyncio.Event = asyncio.Event()
        self._idle.set()
        self._installed = False
        self._broken: BaseException | None = None
        self._closed = False
        peer.graphs.own[self._number] = self
        self._installing = peer.tasks.create_task(self._install(), name="install a graph")

    async def _install(self) -> None:
        peer = self._peer
        installing = [
            peer.tasks.start(self._install_one(process, plan), name=f"install a graph in {process}")
            for process, plan in self.plans.items()
        ]
        results = await asyncio.gather(*installing, return_exceptions=True)
        self._broken = next((result for result in results if isinstance(result, BaseException)), None)
        self._installed = True
        self._pump()

    async def _install_one(self, process: PeerId, plan: SubPlan[Arguments]) -> None:
        if process != self._peer.id:
            self._peer.upgrades.want(self._peer.link_to(process))
        await self._peer.agent_of(process).install(self._number, Sealed(plan))

    # Running.

    def start(self, args: tuple[Any, ...]) -> dict[int, Ref[Any]]:
        """Begin a run, or let it wait for its turn: the refs of its outputs.

        Raises:
            SerializationError: An input cannot travel.
            RuntimeClosed: The graph, or the runtime, is closed.
        """
        peer = self._peer
        if self._closed or peer.closed is not None:
            raise RuntimeClosed("the graph is closed" if self._closed else f"the graph cannot run: {peer.closed}")
        self._last_run += 1
        run = OwnRun(self, self._last_run)
        run.deadline = peer.deadline()
        long = self._take_inputs(run, args)
        for value in self._outputs:
            run.states[value] = ResultState(run, *self.specs[value - self.flow.inputs])
        self._runs[run.number] = run
        self._waiting.append(run)
        self._idle.clear()
        if long:
            peer.tasks.create_task(
                self._pack(run, long, peer.store.current_streams()), name="copy the inputs of a graph"
            )
        else:
            run.ready = True
            self._pump()
        return {value: Ref(state) for value, state in run.states.items()}

    def _take_inputs(self, run: OwnRun, args: tuple[Any, ...]) -> list[tuple[int, Any]]:
        """Encode the inputs; those that take long are left for later, and returned."""
        long: list[tuple[int, Any]] = []
        for index, arg in enumerate(args):
            if is_plain(arg):
                run.inputs.append(Value(arg))
                continue
            try:
                kept = self._peer.store.keep(arg, _names(index, arg), resolve=True)
            except TooLong:
                run.inputs.append(Value())
                long.append((index, arg))
                continue
            run.take(kept)
            run.inputs.append(Value.of_kept(kept))
            if not (self._peer.store.pack_now(kept) and kept.ready):
                long.append((index, arg))
        return long

    async def _pack(self, run: OwnRun, long: list[tuple[int, Any]], streams: Sequence[Any]) -> None:
        store = self._peer.store
        try:
            for index, arg in long:
                kept = run.inputs[index].kept
                if kept is None:
                    kept = await store.keep_anywhere(arg, _names(index, arg), resolve=True, streams=streams)
                    run.take(kept)
                    run.inputs[index] = Value.of_kept(kept)
                await store.make_ready(kept)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the run
            if not run.sent:
                self.withdraw(run)
                run.fail(error)
        run.ready = True
        if run.sent:
            # It was withdrawn meanwhile.
            run.over()
        self._pump()

    def _pump(self) -> None:
        """Send the runs whose turn it is."""
        while self._installed and self._waiting and self._waiting[0].ready:
            if len(self._runs) - len(self._waiting) >= self.max_in_flight:
                return
            run = self._waiting.popleft()
            run.sent = True
            if self._broken is not None:
                run.fail(self._broken)
                self._end(run)
            else:
                self._send(run)

    def _send(self, run: OwnRun) -> None:
        peer = self._peer
        left = None if run.deadline is None else max(0, int((run.deadline - peer.loop.time()) * 1000))
        oldest = next(iter(self._runs))
        for process, inputs, outputs in self._routes:
            neighbour: Neighbour = peer.loopback if process == peer.id else peer.link_to(process)
            items = tuple([self._item(run.inputs[index], index, neighbour) for index in inputs])
            numbers = tuple([run.states[value].number for value in outputs])
            peer.graphs.send(neighbour, (RUN, self._number, run.number, oldest, left, numbers, items))
            if neighbour.lost is not None:
                peer.tasks.create_task(self._explain_loss(run, process), name="explain a lost actor")
        run.drop_inputs()

    def _item(self, value: Value, index: int, neighbour: Neighbour) -> Item:
        try:
            return value.item(index, self._peer, neighbour)
        except (DaftError, TransportError) as error:
            return Value.of_error(error, executed=False).item(index, self._peer, neighbour)

    async def _explain_loss(self, run: OwnRun, process: PeerId) -> None:
        self._lost_run(run, process, await self._peer.explanation(self._peer.links[process]))

    # Reports.

    def reported(self, number: int, items: tuple[Item, ...], neighbour: Neighbour) -> None:
        """Results came, or the news that steps are over."""
        run = self._runs.get(number)
        for item in items:
            index = item[0]
            if run is None or index not in run.missing:
                continue
            refs = item[3] if len(item) == 5 else ()
            if refs:
                self._peer.tasks.create_task(self._adopt(run, item, neighbour), name="adopt refs")
                continue
            del run.missing[index]
            self._settle(run, item, [])
        if run is not None and not run.missing:
            self._end(run)

    async def _adopt(self, run: OwnRun, item: Item, neighbour: Neighbour) -> None:
        refs = await self._peer.refs.adopt(item[3], neighbour)
        if item[0] in run.missing:
            del run.missing[item[0]]
            self._settle(run, item, refs)
            if not run.missing:
                self._end(run)

    def _settle(self, run: OwnRun, item: Item, refs: list[Ref[Any]]) -> None:
        index = item[0]
        state = run.states.get(index)
        if state is None:
            if len(item) == 3:
                self._fail(self._nobody(run, index), item)
        elif len(item) == 1:
            state.on_stored()
        elif len(item) == 2:
            state.on_plain(item[1])
        elif len(item) == 3:
            self._fail(state, item)
        else:
            state.on_result(Arrived(item[1], item[2], [], refs))

    def _nobody(self, run: OwnRun, index: int) -> ResultState:
        """A step whose result nobody holds: its error is for whoever looks after such errors."""
        state = ResultState(run, *self.specs[index - self.flow.inputs])
        state.handles = 0
        if run.cancelled:
            state.expect_cancellation()
        return state

    def _fail(self, state: ResultState, item: Item) -> None:
        error = decode_error(item[1])
        if isinstance(error, DaftError):
            error.with_executed(item[2])
        state.on_error(error)

    def _end(self, run: OwnRun) -> None:
        if self._runs.pop(run.number, None) is not None:
            run.over()
            if not self._runs:
                self._idle.set()
            if self._waiting:
                self._pump()

    # Ending.

    def withdraw(self, run: OwnRun) -> None:
        """Take back a run that was not sent."""
        if not run.sent:
            self._waiting.remove(run)
            run.sent = True
        self._end(run)

    def skip(self, run: OwnRun) -> None:
        """Tell everybody that nobody wants a run's results."""
        for process in self.plans:
            neighbour: Neighbour = self._peer.loopback if process == self._peer.id else self._peer.link_to(process)
            self._peer.graphs.send(neighbour, (SKIP, self._number, run.number))

    def in_flight_with(self, remote: PeerId) -> int:
        """Runs under way that a process takes part in."""
        return len(self._runs) - len(self._waiting) if remote in self.plans else 0

    def lost(self, remote: PeerId, error: DaftError) -> None:
        """A process is gone: what it has not reported will not come."""
        for run in [run for run in self._runs.values() if run.sent]:
            self._lost_run(run, remote, error)

    def _lost_run(self, run: OwnRun, remote: PeerId, error: DaftError) -> None:
        for index in [index for index in run.missing if self.reports[index] == remote]:
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
        await asyncio.shield(self._installing)

    def cancel(self, why: str) -> None:
        """Cancel every run."""
        for run in list(self._runs.values()):
            run.cancel(why)

    async def aclose(self) -> None:
        """Start no more runs, wait for those under way, and free what the processes have of it. Idempotent.

        Cancellation: what is still under way is cancelled.
        """
        self._closed = True
        try:
            await self._idle.wait()
        except asyncio.CancelledError:
            self.cancel("its graph was closed")
            raise
        finally:
            self._uninstall()

    def _uninstall(self) -> None:
        if self._peer.graphs.own.pop(self._number, None) is None or self._peer.closed is not None:
            return
        self._installing.cancel()
        for process in self.plans:
            link = self._peer.links.get(process)
            if link is None or link.lost is None:
                self._peer.agent_of(process).uninstall.tell(self._number)


def _names(index: int, arg: Any) -> Names:
    return Names("the graph", ((f"args[{index}]", arg),))
