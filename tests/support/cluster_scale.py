"""`python tests/support/cluster_scale.py [HOSTS ...]`: the costs of a cluster at several sizes, counted in simulations.

Every host has a node and nothing else; one program attaches, and makes an actor on each host. The calls that are
counted are those of the runtime itself, to the coordinator and to the agents of nodes. A call is two messages: itself,
and its answer.
"""

from __future__ import annotations

import asyncio
import sys
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final
from unittest.mock import patch

from inside import known_nodes_of
from simulated.simulated_loop import collect
from simulated.simulation import Simulation

from aiodaft._protocol.ids import COORDINATOR, NODE
from aiodaft._runtime.actors.hosted_actor import HostedActor, InboundCall
from aiodaft._runtime.peer import Peer
from aiodaft.actor import Actor
from aiodaft.placement import Placement
from aiodaft.runtime import Runtime

LEASE: Final = 10.0
# Seconds between two keepalives of a node, and after which nothing of an event is under way any more.
_PERIOD: Final = LEASE / 4
_SETTLED: Final = 1.5
_SIZES: Final = (10, 30, 100)


class Idle(Actor):
    """Does nothing."""


@dataclass
class Phase:
    """The counts of one phase.

    Attributes:
        calls: The calls, by their names.
        seconds: Its length, in virtual time.
        kilobytes: The traffic of the process with the coordinator, in 1,000 bytes.
    """

    calls: Counter[str] = field(default_factory=Counter[str])
    seconds: float = 0.0
    kilobytes: float = 0.0

    def __str__(self) -> str:
        calls = ", ".join(f"{name} {count}" for name, count in sorted(self.calls.items()))
        return f"{self.seconds:5.1f} s {self.kilobytes:10.1f} kB  {calls}"


class Count:
    """Counts in one simulation; `run` it once.

    Attributes:
        phases: The phases.
        connections: The connections of the first node, of another one, and of the program with an actor on each host.
        heap: Bytes of memory that the objects of one node take, on average.
    """

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts
        self.phases: dict[str, Phase] = {}
        self.connections: tuple[int, int, int] = (0, 0, 0)
        self.heap = 0.0
        self._phase = self.phases["start"] = Phase()
        self._simulation = Simulation("scale", hosts=[f"n{index}" for index in range(hosts)], lease=LEASE)

    def run(self) -> None:
        """Run the simulation."""
        deliver = HostedActor.deliver

        def count(hosted: HostedActor, call: InboundCall) -> None:
            if hosted.id in {COORDINATOR, NODE}:
                self._phase.calls[call.label] += 1
            deliver(hosted, call)

        tracemalloc.start()
        try:
            with patch.object(HostedActor, "deliver", count):
                self._simulation.run(self._main())
        finally:
            tracemalloc.stop()

    @property
    def _nodes(self) -> list[Peer]:
        """The nodes that live, the one with the coordinator first."""
        return [peer for host in self._simulation.hosts.values() for peer, process in host.peers if process.alive]

    def _bytes(self) -> int:
        return self._nodes[0].connections.traffic().control

    async def _during(self, name: str, work: Awaitable[object], settled: float = _SETTLED) -> None:
        """Count during some work, and until nothing of it is under way."""
        self._phase = phase = self.phases[name] = Phase()
        before, begun = self._bytes(), self._simulation.loop.time()
        await work
        phase.seconds = self._simulation.loop.time() - begun
        await asyncio.sleep(settled)
        phase.kilobytes = (self._bytes() - before) / 1000
        self._phase = Phase()

    async def _between_keepalives(self) -> None:
        # All nodes have joined within a moment, and go on in step.
        await asyncio.sleep((0.5 - self._simulation.loop.time()) % _PERIOD)

    async def _main(self) -> None:
        await self._until(lambda: all(known == self.hosts for known in self._known()))
        self._phase.seconds, self._phase.kilobytes = self._simulation.loop.time(), self._bytes() / 1000
        self._phase = Phase()
        collect()
        self.heap = tracemalloc.get_traced_memory()[0] / self.hosts
        await self._between_keepalives()
        await self._during("a lease without events", asyncio.sleep(LEASE), 0.0)
        rt = self._simulation.runtime("n0", unhandled="log")
        await self._during("a program attaches", rt.__aenter__())
        await self._between_keepalives()
        await self._during("it makes its first actor", _spawn(rt.on(cpus=1)))
        await self._during("its node says what is free", asyncio.sleep(_PERIOD), 0.0)
        await self._between_keepalives()
        await self._during("it makes another actor", _spawn(rt))
        for name in self._simulation.hosts:
            await rt.on(node=name).spawn(Idle)
        program = next(peer for peer, process in self._simulation.peers if process is self._simulation.controller)
        self.connections = (_open(self._nodes[0]), _open(self._nodes[1]), _open(program))
        await self._between_keepalives()
        [*self._simulation.hosts.values()][-1].unplug()
        await self._during("a machine dies", self._until(lambda: all(known < self.hosts for known in self._known())))
        await rt.aclose()

    def _known(self) -> list[int]:
        """The number of nodes that each one knows."""
        return [known_nodes_of(host.nodes[-1][0]) for host in self._simulation.hosts.values() if host.is_alive]

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await asyncio.sleep(0.05)


async def _spawn(place: Placement | Runtime) -> None:
    await place.spawn(Idle)


def _open(peer: Peer) -> int:
    return sum(connection.lost is None for connection in peer.connections.values())


def main(sizes: list[int]) -> None:
    """Print the counts at each size."""
    for size in sizes:
        count = Count(size)
        count.run()
        print(
            f"{size} hosts: {count.heap / 1000:.0f} kB of objects per node; connections of the first node, of another "
            f"one, of the program: {count.connections}"
        )
        for name, phase in count.phases.items():
            print(f"  {name:32}{phase}", flush=True)


if __name__ == "__main__":
    main([*map(int, sys.argv[1:])] or [*_SIZES])
