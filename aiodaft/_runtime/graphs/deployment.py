"""Layouts: a graph's dataflow, cut up for its actors where they are, and told to their processes once."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias, cast

from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.plan import ActorKey, Dataflow, SubPlan, make_plan
from aiodaft._runtime.calls.following import FollowingTarget
from aiodaft._runtime.graphs.captured_call import Arguments, Sealed
from aiodaft.exceptions import DaftError

if TYPE_CHECKING:
    from aiodaft._runtime.calls.call import Target
    from aiodaft._runtime.connections.connection import Connection
    from aiodaft._runtime.connections.route import Route
    from aiodaft._runtime.peer import Peer
    from aiodaft.methods import MethodSpec

# Whom each step calls, and how.
Specs: TypeAlias = "list[tuple[Target, MethodSpec]]"


class ValueRoute:
    """What one process is told of each run.

    Attributes:
        process: The process.
        way: How it is reached.
        plan: What it does.
        inputs: Those that it needs; none stands for all, in their order.
        results: Those that it makes, as positions among the numbers of a run; none stands for all, in their order.
    """

    __slots__ = ("inputs", "plan", "process", "results", "route")

    def __init__(
        self, process: PeerId, route: Route, plan: SubPlan[Arguments], inputs: int, results: list[int]
    ) -> None:
        self.process = process
        self.route = route
        self.plan = plan
        self.inputs = _none_if_all(plan.inputs, inputs)
        self.results = _none_if_all(tuple(map(results.index, plan.outputs)), len(results))


def _none_if_all(positions: tuple[int, ...], count: int) -> tuple[int, ...] | None:
    return None if positions == tuple(range(count)) else positions


class Deployment:
    """What the processes know of a graph. A new one is made when an actor is somewhere else, or replaced.

    Attributes:
        number: What the processes call it.
        flow: The dataflow, with the actors where they were when it was made.
        plans: What each process does.
        reports: The values that are reported, and by whom.
        ways: How the processes are reached.
        routes: What they are told of a run; those that wait for others come last.
        some_follow: Whether there are such.
    """

    def __init__(self, peer: Peer, flow: Dataflow[Arguments], specs: Specs) -> None:
        """Cut the dataflow up.

        Raises:
            CyclicGraph: Its steps would wait for each other in a circle.
        """
        self._peer = peer
        self.number = peer.process.next_number()
        self.flow = flow.with_actors({
            step.actor: (_place(target), target.label) for step, (target, _) in zip(flow.steps, specs, strict=True)
        })
        self.plans = make_plan(self.flow)
        self.reports = {value: process for process, plan in self.plans.items() for value in plan.reports}
        self.routes = {process: peer.connections.route_to(process) for process in self.plans}
        self.some_follow = any(plan.follows for plan in self.plans.values())
        # The outputs: the calls that make them, and the connection that each comes over (None if made here).
        self.results: dict[int, tuple[Target, MethodSpec, Connection | None]] = {}
        for value in flow.outputs:
            route = self.routes[self.reports[value]]
            connection = None if route is peer.connections.loopback else cast("Connection", route)
            self.results[value] = (*specs[value - flow.inputs], connection)
        self.value_routes = [
            ValueRoute(process, self.routes[process], plan, flow.inputs, [*self.results])
            for process, plan in sorted(self.plans.items(), key=lambda entry: entry[1].follows)
        ]
        # Its last run is over.
        self._over: asyncio.Future[None] | None = None
        self._broken = False
        # Two processes have lost each other, and may both live.
        self._some_cut_off = False
        self._places = [(target, _place(target)) for target in dict.fromkeys(target for target, _ in specs)]
        self._followed = [target for target, _ in self._places if isinstance(target, FollowingTarget)]

    @property
    def is_stale(self) -> bool:
        """Whether an actor was restarted, so that the next runs need another layout."""
        if not self._followed:
            return False
        return self._broken or any(_place(target) != place for target, place in self._places)

    @property
    def may_be_quiet(self) -> bool:
        """Whether some sleep, and each is woken by the values that it waits for: the dead wake nobody."""
        if self._some_cut_off:
            return False
        routes = self.routes.values()
        return any(route.is_asleep for route in routes) and all(route.lost is None for route in routes)

    def cut_off(self) -> None:
        """A process gets no values from another one any more: all notice now what they were told, and will be told."""
        self._some_cut_off = True
        self.wake()

    def wake(self) -> None:
        """Let all processes notice what they were told quietly."""
        for route in self.routes.values():
            route.wake()

    async def find_actors(self) -> None:
        """Wait until all actors are somewhere.

        Raises:
            DaftError: One is gone for good.
        """
        for target in self._followed:
            await target.arrive()

    def leave(self, remote: PeerId) -> None:
        """A process is gone: it has to be asked where its supervised actors are now."""
        for target in self._followed:
            # Whoever owns one is told, and must not forget it.
            if target.remote == remote and target.owner != self._peer.process.id:
                target.leave()

    def end(self) -> None:
        """The last of its runs is over, and no more will begin."""
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    async def wait_end(self) -> None:
        """Wait until that is so."""
        self._over = self._over or self._peer.process.loop.create_future()
        await asyncio.shield(self._over)

    async def install(self) -> None:
        """Tell the processes.

        Raises:
            DaftError: One of them is gone.
            AttributeError: An actor has no such method.
        """
        tasks = self._peer.process.tasks
        installing = [
            tasks.start(self._install_one(process, plan), name=f"install a graph in {process}")
            for process, plan in self.plans.items()
        ]
        results = await asyncio.gather(*installing, return_exceptions=True)
        failed = next((result for result in results if isinstance(result, BaseException)), None)
        if failed is not None:
            self._broken = True
            raise failed

    async def _install_one(self, process: PeerId, plan: SubPlan[Arguments]) -> None:
        self._peer.connections.ring_upgrades.want(self.routes[process])
        await self._peer.agent_of(process).install(self.number, Sealed(plan))

    def uninstall(self) -> None:
        """It has no more runs: the processes may forget it."""
        for process in self.plans:
            connection = self._peer.connections.get(process)
            if connection is None or connection.lost is None:
                self._peer.process.tasks.create_task(self._uninstall_one(process), name=f"forget a graph in {process}")

    async def _uninstall_one(self, process: PeerId) -> None:
        # Who dies meanwhile has forgotten it.
        with suppress(DaftError):
            await self._peer.agent_of(process).uninstall(self.number)


def _place(target: Target) -> ActorKey:
    return target.remote, target.actor
