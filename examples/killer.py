"""Kills processes of `unkillable.py` and `swarm.py`."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence

import aiodaft


class Killer(asyncio.TaskGroup):
    """Kills actors at random times; the next one when that has been replaced."""

    def __init__(self, rt: aiodaft.Runtime, kills: int, steps: int = 1, seed: int = 0) -> None:
        super().__init__()
        self.rt, self.random = rt, random.Random(seed)
        self.last = steps * 3 // 4
        self.due = sorted(self.random.sample(range(self.last), kills))  # in these steps, or soon after
        self.victim: aiodaft.Actor | None = None
        self.killing: asyncio.Task[None] | None = None
        self.killed_at, self.seconds = 0.0, list[float]()

    async def before_step(self, step: int, alive: Sequence[aiodaft.Actor]) -> None:
        if self.killing is not None and step >= self.last:
            await self.killing  # there has to be a step after it
        if self.victim is not None and self.victim not in alive:
            self.seconds.append(time.monotonic() - self.killed_at)
            print(f"step {step}: goes on {self.seconds[-1]:.2f} s after the kill")
            self.victim = None
        if self.victim is None and self.due and step >= self.due[0]:
            del self.due[0]
            self.victim = self.random.choice(alive)
            info = await self.rt.info(self.victim)
            assert info.pid is not None  # it is alive
            print(f"step {step}: kill -9 of {info.name}")
            self.killing = self.create_task(self.kill(info.pid, delay=self.random.uniform(0, 0.1)))

    async def kill(self, pid: int, delay: float) -> None:
        await asyncio.sleep(delay)
        self.killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
