"""Threads of a simulation: each job takes virtual time, and runs in the one thread of the loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from aiodaft._runtime.platform.threads import HelperThread
from simulated.simulated_loop import SimulatedLoop


class SimulatedThread(HelperThread):
    """Runs jobs one after another, each at one moment of virtual time."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        assert isinstance(loop, SimulatedLoop)
        super().__init__(name, loop)
        self._simulated = loop
        self._waiting: deque[Callable[[], object]] = deque()
        self._busy = False

    @property
    def backlog(self) -> int:
        return len(self._waiting)

    def submit(self, job: Callable[[], object]) -> None:
        self._waiting.append(job)
        if not self._busy:
            self._busy = True
            self._after(0.002, self._take_one)

    def to_loop(self, callback: Callable[[], object]) -> None:
        self._after(0.001, callback)

    def close(self) -> None:
        """There is nothing to end."""

    def _take_one(self) -> None:
        self._waiting.popleft()()
        self._busy = bool(self._waiting)
        if self._busy:
            self._after(0.01, self._take_one)

    def _after(self, longest: float, callback: Callable[[], object]) -> None:
        self._simulated.call_later(self._simulated.rng.random() * longest, callback)
