"""A random program for simulations: actors spawn actors, several want one actor by its name, and fate."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

from inside import resources_of
from sim_program import EXPECTED
from simulated import Simulation

import aiodaft
from aiodaft import Actor, method
from aiodaft.testing import Hang

# Longer than every grace time.
_QUIET: Final = 10.0


class Spawning(Actor):
    """Spawns others like itself."""

    @method
    async def spawn(self, name: str | None, restart: Any) -> Spawning:
        rt = aiodaft.current_runtime()
        if name is not None:
            return await rt.get_or_create(name, Spawning)
        return await rt.on(restart=restart).spawn(Spawning)

    @method
    async def stop(self, other: Spawning) -> None:
        await aiodaft.current_runtime().stop(other)


class SpawningProgram:
    """The program of one seed."""

    def __init__(self, seed: object) -> None:
        self.world = Simulation(seed)
        self.rng = self.world.rng
        self.actors: list[Spawning] = []
        self.wrong: list[str] = []
        kills, cuts = self.rng.choice([0, 0, 1, 3]), self.rng.choice([0, 0, 1])
        self.faults = {"kills": kills, "cuts": cuts, "pauses": self.rng.choice([0, 1])}

    def run(self) -> list[str]:
        """Run it; returns its faults."""
        try:
            self.world.run(self._main())
        except Hang:
            self.wrong.append("nothing happens any more, and a task waits")
        finally:
            self.actors.clear()
        logged = [text for text in self.world.logged if not any(expected in text for expected in EXPECTED)]
        return self.wrong + self.world.problems + logged

    async def _main(self) -> None:
        async with self.world.runtime(unhandled="log", cancel_grace=0.05, stop_grace=0.2) as rt:
            roots = [await rt.on(restart="temporary").spawn(Spawning) for _ in range(2)]
            self.actors += roots
            self.world.disturb(**self.faults)
            await asyncio.gather(*(self._client(rt) for _ in range(3)))
            for root in roots:
                await rt.stop(root)
            for name in await rt.names():
                # It may have ended with another one.
                with suppress(aiodaft.NameNotFound, aiodaft.ActorDied):
                    await rt.stop(await rt.lookup(name, Spawning))
            await asyncio.sleep(_QUIET)
            # Names are free, and the children have ended with the actors that spawned them.
            if names := await rt.names():
                self.wrong.append(f"names are left: {names}")
            if left := [one.name for one in self.world.workers]:
                self.wrong.append(f"processes are left: {left}")
            for name in ("a", "b"):
                await rt.stop(await rt.get_or_create(name, Spawning))
            _, free = await resources_of(rt)
            if free["cpus"] != 100:
                self.wrong.append(f"resources are left in use: {free}")

    async def _client(self, rt: aiodaft.Runtime) -> None:
        for _ in range(self.rng.randint(2, 6)):
            task = self.world.loop.create_task(self._step(rt))
            if self.rng.random() < 0.3:
                await asyncio.sleep(self.rng.expovariate(100))
                task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                with suppress(aiodaft.DaftError):
                    task.result()

    async def _step(self, rt: aiodaft.Runtime) -> None:
        actor, chance = self.rng.choice(self.actors), self.rng.random()
        name = self.rng.choice(["a", "b", None])
        if chance < 0.15:
            await rt.stop(actor)
        elif chance < 0.25:
            await actor.stop(self.rng.choice(self.actors))
        elif chance < 0.4 and name is not None:
            self.actors.append(await rt.get_or_create(name, Spawning))
        else:
            self.actors.append(await actor.spawn(name, self.rng.choice([None, "permanent", "temporary"])))
