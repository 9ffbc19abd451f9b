"""Worker processes of a simulation: the real worker code, started as tasks of the simulated loop."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.node.worker import Ending
from aiodaft._runtime.node.worker import HeartbeatWatch, Worker, WorkerEnvironment, WorkerSettings
from aiodaft._runtime.process import Env
from aiodaft.exceptions import SpawnFailed
from aiodaft.testing.in_process import FIRST_PID, EnclosedLauncher, EnclosedMain, NoOutput, Pulse
from simulated.network import SimulatedNetwork
from simulated.simulated_loop import SimulatedLoop, SimulatedProcess, settle


class SimulatedMain(EnclosedMain):
    """A worker of a simulation."""

    process: SimulatedProcess


class SimulatedPulse(Pulse):
    """A pulse whose questions and answers take time, and get no further than a process that has ended."""

    def __init__(self, loop: SimulatedLoop, process: SimulatedProcess) -> None:
        super().__init__()
        self._loop = loop
        self._process = process

    def send(self, question: bytes) -> None:
        if not self._process.alive:
            raise BrokenPipeError("the process has ended")
        self._loop.later(self._loop.rng.random() * 0.01, self._loop.within, self._process, self._asked)

    def _asked(self) -> None:
        self._loop.later(self._loop.rng.random() * 0.01, self._answers.append, self.answer())


class SimulatedWorker(Worker):
    """One worker, as the node sees it."""

    def __init__(self, worker_id: PeerId, label: str, process: SimulatedProcess, loop: SimulatedLoop) -> None:
        output: Any = NoOutput()
        line: Any = SimulatedPulse(loop, process)
        super().__init__(worker_id, label, output, HeartbeatWatch(line, loop, lambda pid: process.paused))
        self.line = line
        self.process = process


class SimulatedLauncher(EnclosedLauncher):
    """A `WorkerLauncher` with tasks of the loop in place of processes."""

    def __init__(self, network: SimulatedNetwork, env: Callable[[], Env], loop: SimulatedLoop, *_: object) -> None:
        self._network = network
        self._env = env
        self._loop = loop
        self._home = loop.current
        self._home.on_death.append(self._home_died)
        self._last_number = 0
        self.workers: dict[PeerId, SimulatedWorker] = {}
        # The main tasks of all started workers, also of ended ones.
        self.mains: list[SimulatedMain] = []
        self.on_ended: Callable[[Any, Ending], object] = lambda worker, ending: None

    async def spawn(
        self, settings: WorkerSettings, inherited: WorkerEnvironment, environment: dict[str, str], label: str
    ) -> tuple[SimulatedWorker, socket.socket]:
        await asyncio.sleep(self._loop.rng.random() * 0.001)
        self._last_number += 1
        home = self._home
        suffix = f"@{home.host}" if home.host else ""
        process = self._loop.new_process(f"worker{self._last_number}{suffix}", home.host)
        worker = self.workers[settings.options.id] = SimulatedWorker(settings.options.id, label, process, self._loop)
        worker.pid = FIRST_PID + self._last_number
        ours, theirs = self._network.connect(home, process)
        self._loop.later(self._loop.rng.random() * 0.01, self._begin, worker, settings.packed(), theirs)
        return worker, ours

    def _begin(self, worker: SimulatedWorker, settings: bytes, connection: socket.socket) -> None:
        if not worker.process.alive:
            return
        main = SimulatedMain(WorkerSettings.unpacked(settings), connection, worker.line, self._env())
        main.process = worker.process
        main.on_exit = lambda code: self.ended(worker.process, code, None)
        self.mains.append(main)

        async def live() -> None:
            status = await main.run()
            self.ended(worker.process, status, None)

        self._loop.start(worker.process, live())
        self._loop.within(self._home, settle, worker.started, None)

    def kill(self, worker: SimulatedWorker, number: int = signal.SIGKILL) -> None:
        """Send a signal, which takes a while."""
        self._loop.later(self._loop.rng.random() * 0.005, self.ended, worker.process, None, "SIGKILL")

    async def end(self, worker: SimulatedWorker) -> None:
        self.kill(worker)
        await asyncio.shield(worker.ended)

    def ended(self, process: SimulatedProcess, code: int | None, signal_name: str | None) -> None:
        """A process ends now; the node hears of it later."""
        if process.alive:
            self._loop.kill(process)
            worker = next(worker for worker in self.workers.values() if worker.process is process)
            report = partial(self._report, worker, Ending(code, signal_name))
            self._loop.later(self._loop.rng.random() * 0.02, self._loop.within, self._home, report)

    def _report(self, worker: SimulatedWorker, ending: Ending) -> None:
        if self.workers.pop(worker.id, None) is None:
            return
        worker.fail(SpawnFailed("the worker did not start"))
        self.on_ended(worker, ending)
        settle(worker.ended, ending)

    async def aclose(self) -> None:
        workers = list(self.workers.values())
        for worker in workers:
            self.kill(worker)
        await asyncio.gather(*(asyncio.shield(worker.ended) for worker in workers))

    def abandon(self) -> None:
        """There is nothing to end."""

    def _home_died(self) -> None:
        """The kernel kills the fork server and the workers."""
        for worker in self.workers.values():
            self._loop.kill(worker.process)
