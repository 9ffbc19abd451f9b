"""A random program for simulations of several hosts: clients of actors on all of them, another program, and fate."""

# Objects that are left at the end are looked for where users cannot look.
# ruff: noqa: SLF001
from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from sim_actors import Subject
from sim_program import Program
from simulated import Simulation

import aiodaft
from aiodaft._protocol.coordination.records import NamedActor
from aiodaft._protocol.coordination.registry import Registry
from aiodaft._protocol.ids import COORDINATOR, NODE
from aiodaft._protocol.supervision import Backoff, Restart
from aiodaft._runtime.peer import Peer
from aiodaft.exceptions import OutcomeUnknown

HOSTS: Final = ("one", "two", "three")
NAMES: Final = ("red", "blue")
LEASE: Final = 6.0
# Longer than a node waits for the lease of its predecessor, and than TCP for a host.
_QUIET: Final = 25.0


class HostProgram(Program):
    """The program of one seed."""

    # The value of an argument may come after the call for it was lost with the connection to its caller. It is dropped
    # when another connection to the caller is lost.
    may_be_left = frozenset({"answers"})

    def __init__(self, seed: object, hosts: tuple[str, ...] = HOSTS) -> None:
        super().__init__(seed, Simulation(seed, hosts=hosts, lease=LEASE))
        self.hosts = hosts
        self.history.apart = True
        rng = self.rng
        # Some seeds are peaceful, some are full of one kind of trouble.
        self.host_faults = {
            "partitions": rng.choice([0, 0, 1, 2]),
            "drops": rng.choice([0, 0, 1, 3]),
            "resets": rng.choice([0, 0, 2, 6]),
            "deaths": rng.choice([0, 0, 1, 2]),
        }
        self.slowness = rng.choice([1.0, 30.0, 200.0])
        self.granted: dict[int, NamedActor] = {}

    async def _main(self) -> None:
        world, rng = self.world, self.rng
        rt = world.runtime(unhandled="log", cancel_grace=rng.choice([0.05, 2.0]))
        await rt.__aenter__()
        try:
            await self._spawn(rt)
            within = rng.choice([0.05, 1.0, 4.0])
            world.disturb(kills=self.kills, cuts=self.cuts, pauses=self.pauses, within=within)
            world.disturb_hosts(**self.host_faults, within=within)
            visitor = world.start(rng.choice(self.hosts), self._visit())
            await asyncio.gather(*(self._client() for _ in range(rng.randint(1, 3))), self._use_names(rt, 5))
            self.refs.clear()
            await self._heal()
            await self._check_cluster(rt)
            await self._check_tables()
            await self._until("the other program does not end", lambda: not visitor.alive)
        finally:
            await rt.aclose()
        await self._check_end()
        self.history.judge()

    async def _spawn(self, rt: aiodaft.Runtime) -> None:
        place = rt.on(spread=True)
        group = await place.group(2, Subject)
        self.actors = [*group]
        restart = Restart(intensity=100, period=1e6, backoff=Backoff(base=0.1, max=2), follow=True)
        self.actors.append(await rt.on(restart=restart).spawn(Subject))
        if self.rng.random() < 0.5:
            self.actors.append(await rt.on(with_=self.actors[0]).spawn(Subject))

    async def _visit(self) -> None:
        """Another program, which calls an actor of its own, and those of the first program."""
        with suppress(aiodaft.DaftError):
            async with self.world.runtime(unhandled="log", stop_grace=0.5) as rt:
                mine = await rt.spawn(Subject)
                await self._use_names(rt, 3, mine)

    async def _use_names(self, rt: aiodaft.Runtime, times: int, actor: Any = None) -> None:
        for _ in range(times):
            await asyncio.sleep(self.rng.expovariate(1))
            name = self.rng.choice(NAMES)
            with suppress(aiodaft.DaftError):
                if self.rng.random() < 0.5:
                    await rt.name(actor or self.rng.choice(self.actors), name)
                self._note(await rt._controller.coordinator.lookup(name))
                found = await rt.lookup(name, Subject)
                number = self.history.made(found)
                await self.history.settle(number, found.at_once(number, 0))

    def _note(self, found: NamedActor) -> None:
        """One name at one epoch has one holder."""
        known = self.granted.setdefault(found.epoch, found)
        if (known.name, known.peer, known.actor) != (found.name, found.peer, found.actor):
            self.history.wrong.append(f"epoch {found.epoch} is that of {known} and of {found}")

    # When everything is over.

    async def _until(self, wrong: str, is_right: Callable[[], bool]) -> None:
        for _ in range(int(_QUIET)):
            if is_right():
                return
            await asyncio.sleep(1)
        self.history.wrong.append(wrong)

    async def _heal(self) -> None:
        while (left := self.world.calm_at - self.world.loop.time()) >= 0:
            await asyncio.sleep(left + 0.1)
        self.world.routes.heal()
        for host in self.world.hosts.values():
            host.start()
        # Some are used as soon as all nodes are there.
        await asyncio.sleep(self.rng.choice([0.0, _QUIET]))

    async def _check_cluster(self, rt: aiodaft.Runtime) -> None:
        """Every node is there, and is of use; so is every actor that is to be restarted."""
        nodes = rt._controller.nodes
        await self._until("a node is missing", lambda: all(nodes.member(name) for name in self.hosts))
        try:
            fresh = [await self._spawn_on(rt, name) for name in self.hosts]
            for one, other in zip(fresh, (*fresh[1:], fresh[0]), strict=True):
                await self._use(one, other)
            await self._use(self.actors[2], fresh[0])
        except aiodaft.DaftError as error:
            self.history.wrong.append(f"the cluster is of no use: {error!r}")
        for actor in self.actors:
            # However it ends.
            number = self.history.made(actor)
            with suppress(aiodaft.DaftError):
                await self.history.settle(number, actor.at_once(number, 0))

    async def _spawn_on(self, rt: aiodaft.Runtime, name: str) -> Subject:
        """As soon as the host is there: it may still be known by its old state."""
        for _ in range(int(_QUIET)):
            try:
                return await rt.on(node=name).spawn(Subject)
            except (OutcomeUnknown, aiodaft.exceptions.InsufficientResources):
                await asyncio.sleep(1)
        return await rt.on(node=name).spawn(Subject)

    async def _use(self, actor: Any, other: Any) -> None:
        for attempt in range(int(_QUIET)):
            number = self.history.made(actor, 2)
            try:
                await self.history.settle(number, actor.relay(number, 2, other, 0.01))
            except OutcomeUnknown:
                # A connection may turn out late to be broken.
                if attempt == int(_QUIET) - 1:
                    raise
                await asyncio.sleep(1)
            else:
                return

    async def _check_end(self) -> None:
        """Nothing is left on any node; then all nodes end."""
        world, wrong = self.world, self.history.wrong
        await self._until("workers are left", lambda: not world.workers)
        await asyncio.sleep(1)
        for host in world.hosts.values():
            for peer, process in host.peers:
                if process.alive:
                    agent: Any = peer.actors[NODE].instance
                    if agent._reserved or agent._restartable or len(agent._resources):
                        wrong.append(f"{host} still gives away {agent._resources.free()}")
                    wrong += [f"{host} still has {name}" for name in self._names_at(peer)]
        for host in reversed(world.hosts.values()):
            host.end()
        await self._until("nodes do not end", lambda: not any(host.is_alive for host in world.hosts.values()))

    def _names_at(self, peer: Peer) -> list[str]:
        coordinator = peer.actors.get(COORDINATOR)
        if coordinator is None:
            return []
        registry: Registry = coordinator.instance._registry  # type: ignore[union-attr]
        return [named.name for named in registry.names.all()]
