"""Deployments: a graph's dataflow, cut into plans for the processes of its actors, which are told once."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TypeAlias, cast

from aiodaft._protocol.graphs.plan import ActorKey, Dataflow, SubPlan, make_plan
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.calls.following import FollowingTarget
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.graphs.captured_call import Arguments, Opaque
from aiodaft._runtime.graphs.context import GraphContext
from aiodaft.exceptions import DaftError, PeerLost
from aiodaft.methods import MethodSpec

# The actor and the method of each step.
Specs: TypeAlias = list[tuple[Target, MethodSpec]]


class Deployment:
    """A dataflow on the processes where its actors are. When an actor moves or is replaced, a new one is made.

    Attributes:
        number: The number by which the processes know it.
        dataflow: The dataflow, with the actors at their places.
        plans: The plan of each process.
        reports: The values that are reported, with the processes that report them.
        results: For each output: the actor and the method that make it, and the connection it comes over (None if it
            is made in this process).
        routes: The routes to the processes.
        run_routes: For each process the route to it, and the parts of a RUN: the inputs that it needs, and the
            positions of its outputs among all.
        is_cut: Whether a connection between its processes broke, so that the next run needs another deployment.
        followed: Its supervised actors, which may move, also those that only have steps of collectives beside them.
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
        """Whether a supervised actor was restarted, or it is cut, so that the next run needs another deployment."""
        if self.is_cut or not self.followed:
            return self.is_cut
        return self._failed or any(_place(host) != place for host, place in self._places)

    async def arrive(self) -> None:
        """Wait until its supervised actors are up, all at the same time.

        Raises:
            DaftError: One of them is gone for good.
        """
        while True:
            for target in self.followed:
                await target.arrive()
            if not any(target.is_down for target in self.followed):
                return

    async def install(self) -> None:
        """Tell the processes their plans.

        Raises:
            DaftError: A process is gone.
            AttributeError: An actor has no such method.
        """
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
        """No more runs begin: the processes may forget the plans."""
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
