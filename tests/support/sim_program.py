"""A random program for simulations: several clients of several actors, and fate."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

from sim_actors import Boom, Box, History, Onlooker, Subject, value_of
from simulated import Simulation
from simulated.simulated_loop import collect

import aiodaft
from aiodaft import Ref
from aiodaft._protocol.ids import COORDINATOR
from aiodaft._protocol.supervision import Restart
from aiodaft._runtime.peer import Peer
from aiodaft.testing import Hang

# Longer than every grace time and search.
_QUIET: Final = 5.0


class Program:
    """The program of one seed."""

    # The factor by which calls take longer, and clients wait longer between them.
    slowness = 1.0

    def __init__(self, seed: object, world: Simulation | None = None) -> None:
        self.world = world or Simulation(seed)
        self.rng = self.world.rng
        self.history = History(self.world.loop)
        self.actors: list[Any] = []
        self.refs: list[Ref[Any]] = []
        # Some seeds are peaceful, some are full of one kind of trouble.
        self.kills = self.rng.choice([0, 0, 1, 2])
        self.cuts = self.rng.choice([0, 0, 0, 1, 2])
        self.pauses = self.rng.choice([0, 1, 3])
        self.cancels = self.rng.choice([0.0, 0.2, 0.5])

    def run(self) -> list[str]:
        """Run it; returns its faults."""
        Onlooker.history = self.history
        try:
            self.world.run(self._main())
        except Hang:
            pending = [call.number for call in self.history.calls if call.outcome is None]
            self.history.wrong.append(f"nothing happens any more, and a task waits, perhaps for one of {pending}")
        finally:
            self.refs.clear()
            self.actors.clear()
        logged = [text for text in self.world.logged if not any(expected in text for expected in EXPECTED)]
        return self.history.wrong + self.world.problems + logged

    async def _main(self) -> None:
        rt = self.world.runtime(unhandled="log", cancel_grace=self.rng.choice([0.05, 2.0]))
        await rt.__aenter__()
        try:
            await self._spawn(rt)
            self.world.disturb(kills=self.kills, cuts=self.cuts, pauses=self.pauses)
            await asyncio.gather(*(self._client() for _ in range(self.rng.randint(1, 3))))
            self.refs.clear()
            await self._check_tables()
        finally:
            await rt.aclose()
        self.history.judge()

    async def _spawn(self, rt: aiodaft.Runtime) -> None:
        place: Any = rt
        if self.rng.random() < 0.5:
            place = rt.on(restart=Restart(intensity=self.rng.choice([1, 3]), follow=self.rng.random() < 0.7))
        first, second = await asyncio.gather(rt.spawn(Subject), place.spawn(Subject))
        self.actors = [first, second]
        if self.rng.random() < 0.5:
            self.actors.append(await rt.on(with_=first).spawn(Subject))
        if self.rng.random() < 0.5:
            self.actors.append(await place.spawn(Subject))

    # The work of a client.

    async def _client(self) -> None:
        waiting: list[asyncio.Task[None]] = []
        for _ in range(self.rng.randint(2, 8)):
            if self.rng.random() < 0.2:
                with suppress(aiodaft.DeadlineExceeded):
                    async with aiodaft.deadline(self.rng.expovariate(30) * self.slowness):
                        self._step(waiting)
                        await asyncio.sleep(self.rng.random() * 0.02 * self.slowness)
            else:
                self._step(waiting)
            if self.rng.random() < 0.5:
                await asyncio.sleep(self.rng.expovariate(200) * self.slowness)
        if waiting:
            await asyncio.wait(waiting)
            for task in waiting:
                if not task.cancelled() and task.exception() is not None:
                    self.history.wrong.append(f"a client failed: {task.exception()!r}")

    def _step(self, waiting: list[asyncio.Task[None]]) -> None:
        loop = self.world.loop
        if self.rng.random() < 0.1:
            waiting.append(loop.create_task(self._consume()))
            return
        number, ref = self._call()
        self.refs.append(ref)
        if self.rng.random() < 0.1:
            self.refs.remove(ref)
        waiting.append(loop.create_task(self._watch(number, ref)))

    async def _watch(self, number: int, ref: Ref[Any]) -> None:
        """Wait for a call; perhaps give up, and see then how it ended."""
        waiter = self.world.loop.create_task(self.history.settle(number, ref))
        if self.rng.random() < self.cancels:
            await asyncio.sleep(self.rng.expovariate(100) * self.slowness)
            if self.rng.random() < 0.3:
                ref.cancel()
            else:
                waiter.cancel()
                if self.rng.random() < 0.2:
                    await asyncio.sleep(0)
                    waiter.cancel()
        await asyncio.wait([waiter])
        with suppress(aiodaft.DaftError, Boom, asyncio.CancelledError):
            waiter.result()
        # The second answer is the same.
        with suppress(aiodaft.DaftError, Boom):
            await self.history.settle(number, ref)

    async def _consume(self) -> None:
        actor, count = self.rng.choice(self.actors), self.rng.randint(0, 40)
        number = self.history.made(actor)
        enough = self.rng.choice([count, count // 2])
        got: list[Any] = []
        with suppress(aiodaft.DaftError):
            async for item in actor.items(number, count):
                got.append(item)
                if len(got) == enough:
                    break
            if len(got) < enough:
                self.history.wrong.append(f"stream {number} ended after {len(got)} of {enough} items")
        if got != [value_of(index, index % 3) for index in range(len(got))]:
            self.history.wrong.append(f"stream {number} gave something else")

    def _call(self) -> tuple[int, Ref[Any]]:
        rng, history = self.rng, self.history
        actor, other, third = rng.choice(self.actors), rng.choice(self.actors), rng.choice(self.actors)
        size, seconds = rng.randrange(3), min(rng.expovariate(100) * self.slowness, 4.0)
        name = rng.choice(_METHODS)
        number = history.made(actor, size, ordered=name != "aside")
        if name in ("nap", "aside", "narrow", "stubborn"):
            return number, getattr(actor, name)(number, size, seconds)
        if name in ("at_once", "compute", "look"):
            return number, getattr(actor, name)(number, size)
        if name == "fail":
            return number, actor.fail(number, seconds)
        if name in ("fail_on_thread", "fail_to_encode", "leave"):
            return number, getattr(actor, name)(number)
        if name == "relay":
            return number, actor.relay(number, size, other, seconds)
        if name == "pair":
            return number, actor.pair(number, size, other, third, seconds)
        parts = rng.choices(self.refs, k=rng.randint(1, 3)) if self.refs else []
        if name == "keep":
            return number, actor.keep(
                number, size, Box(parts[0] if parts else actor.aside(self._extra(actor), 2, 0.01))
            )
        return number, getattr(actor, name)(number, size, *parts)

    def _extra(self, actor: Any) -> int:
        return self.history.made(actor, 2, ordered=False)

    # When everything is over.

    async def _check_tables(self) -> None:
        """Nothing is left of any call or value in a process that lives."""
        for actor in self.actors:
            with suppress(aiodaft.DaftError):
                await actor.drop()
        # Objects in cycles (errors are, with their frames) are collected here only, so that each run is the same.
        await asyncio.sleep(_QUIET)
        while any(process.paused for process in self.world.workers):
            await asyncio.sleep(_QUIET)
        for _ in range(4):
            # An object that one process lets go of may be the last use of another's.
            collect()
            await asyncio.sleep(1)
            left = self._left()
            if not left:
                break
        self.history.wrong += left

    # The objects that may be left after the faults of a program, at most.
    may_be_left: frozenset[str] = frozenset()

    def _left(self) -> list[str]:
        living = [
            (peer, process) for peer, process in self.world.peers if process.alive and peer.process.closed is None
        ]
        found = {
            process.name: {name: what for name, what in tables(peer).items() if what and name not in self.may_be_left}
            for peer, process in living
        }
        return [f"left in {name}: {what}" for name, what in found.items() if what]


def tables(peer: Peer) -> dict[str, Any]:
    """Everything that a process remembers of calls and values that are not over."""
    connections = [connection for connection in peer.connections.values() if connection.lost is None]
    transports = peer.store.transports.values()
    return {
        "calls": _labels(call for connection in connections for call in connection.session.calls.values()),
        "incoming": _labels((
            *peer.host.calls(),
            *(call for responder in peer.inbound.responders() for call in responder.calls.values()),
        )),
        "local": _labels(peer.inbound.local.states.values()),
        "pins": [responder.pins for responder in peer.inbound.responders() if responder.pins],
        "values": list(peer.store.entries),
        "own refs": list(peer.objects.borrowing.shared),
        "refs in calls": list(peer.objects.borrowing.used),
        "borrowed refs": list(peer.objects.borrowing.borrowed),
        "pulls": list(peer.transfer.questions.open),
        "answers": [] if peer.transfer.handover.is_empty else [peer.transfer.handover],
        "fetching": list(peer.transfer.relays.table.fetching),
        "blocks": sum(transport.arena.live_blocks() for transport in transports),
        "channels": [*peer.channels.table.keepers, *peer.channels.table.ends],
        "running": [
            hosted.name
            for hosted in peer.actors.values()
            if hosted.id != COORDINATOR and (hosted.running or hosted.abandoned)
        ],
        "queued": [hosted.name for hosted in peer.actors.values() if hosted.mailbox.queued],
    }


def _labels(calls: Iterable[Any]) -> list[str]:
    """The names of calls, but for those of nodes to the coordinator."""
    return [call.label for call in calls if not call.label.startswith("Coordinator.")]


def failures(seeds: range, program: type[Any] = Program) -> dict[int, list[str]]:
    """The first few seeds that show something wrong."""
    found: dict[int, list[str]] = {}
    for seed in seeds:
        if wrong := program(seed).run():
            found[seed] = wrong
        # Objects that a program kept to its end: processes that ended in the middle of anything are no news.
        collect()
        if len(found) == 3:
            break
    return found


def finds(seen: str, program: type[Program]) -> bool:
    """Whether one of a few hundred seeds shows this."""
    with warnings.catch_warnings():
        # Of runtimes that the bug has kept from being closed.
        warnings.simplefilter("ignore", ResourceWarning)
        found = any(seen in wrong for seed in range(400) for wrong in program(seed).run())
        collect()
    return found


# Errors that are logged of a tell, of a ref that a random program drops, of dead actors, and of a stopped worker.
EXPECTED: Final = (
    "called by tell()", "before any code saw the error", "no call was under way", "more often than its restart policy",
    "has not answered for", "a node was lost while no call",
)  # fmt: skip
_METHODS: Final = (
    "nap", "nap", "at_once", "at_once", "compute", "compute", "aside", "narrow", "fail", "fail_on_thread",
    "fail_to_encode", "stubborn", "combine", "combine", "combine_on_thread", "keep", "look", "relay", "pair", "leave",
)  # fmt: skip
