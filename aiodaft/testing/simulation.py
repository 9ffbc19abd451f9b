"""A machine that is simulated: the real runtime, node and workers, on virtual time, sockets, threads and processes."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

from aiodaft._runtime.peer import Peer
from aiodaft._runtime.platform.env import Env
from aiodaft._runtime.process import closed
from aiodaft.runtime import Runtime
from aiodaft.testing.launcher import FIRST_PID, SimulatedLauncher
from aiodaft.testing.network import End, NetworkConditions, SimulatedNetwork
from aiodaft.testing.simulated_loop import SimulatedLoop, SimulatedProcess
from aiodaft.testing.threads import SimulatedThread

T = TypeVar("T")


class Simulation:
    """One run of a program with its actors in one thread. Everything in it follows from the seed.

    Every process of a runtime is simulated, with the framework's real code in it: messages take time and come in
    pieces, `def` methods take virtual time, and `disturb` has processes die, stop and lose connections.

    Not simulated: compiled graphs, GPUs, the operating system (files, subprocesses, sockets of your own). Modules are
    not loaded again for each process, so module globals are shared by all of them.

    Args:
        seed: Decides everything that happens: a number, or anything with a repr of its own.
        hang_after: Virtual seconds after which a program that has not ended counts as hung.

    Attributes:
        rng: Makes the choices of the simulation; use it for your own choices, so that they follow from the seed, too.
        problems: Errors that the event loop reported because no code handled them.
        logged: Errors that the runtime logged.
        trace: What happened, in short, each with its time and process; equal for equal seeds.
    """

    def __init__(self, seed: object, *, hang_after: float = 300.0) -> None:
        self.loop = SimulatedLoop(seed, hang_after)
        self.rng = self.loop.rng
        conditions = NetworkConditions(
            delay=self.rng.choice([0.0001, 0.001, 0.02]),
            room=self.rng.choice([1000, 10_000, 1 << 20]),
            chop=self.rng.choice([0.0, 0.1, 0.9]),
        )
        self.network = SimulatedNetwork(self.loop, conditions)
        self.controller = self.loop.new_process("controller")
        self.problems = self.loop.problems
        self.logged: list[str] = []
        self.trace = self.loop.trace
        self._runtimes: list[Runtime] = []
        self._launchers: list[SimulatedLauncher] = []

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run the controller's program to its end; a simulation runs once.

        Raises:
            Hang: A task waits, and nothing will ever wake it.
        """
        # What is collected when would differ from run to run; so would the paths in tracebacks, which travel.
        with _errors_to(self.logged), _without_collector(), patch.object(sys, "tracebacklimit", 0, create=True):
            try:
                return self.loop.run_main(self.controller, main)
            finally:
                self._bury()

    def runtime(self, **options: Any) -> Runtime:
        """A runtime of this simulation, to be used as `async with`; takes the options of `aiodaft.Runtime`."""
        fixed = {"cpus": 100, "gpus": 0, "transport": "shm", "preload": (), "uvloop": False, "fork": True}
        runtime = Runtime(**{**fixed, **options}, env=self._env())
        self._runtimes.append(runtime)
        return runtime

    @property
    def workers(self) -> list[SimulatedProcess]:
        """The worker processes that live."""
        return [one for one in self.loop.processes if one.name.startswith("worker") and one.alive]

    @property
    def peers(self) -> list[tuple[Peer, SimulatedProcess]]:
        """What runs in each process, also in ended ones."""
        workers = [main for launcher in self._launchers for main in launcher.mains]
        found: list[tuple[Peer | None, SimulatedProcess]] = []
        found += [(one._controller.peer, self.controller) for one in self._runtimes if one._controller.name]
        found += [(worker.peer, worker.process) for worker in workers]
        return [(peer, process) for peer, process in found if peer is not None]

    # Faults.

    def disturb(self, *, kills: int = 0, cuts: int = 0, pauses: int = 0, within: float = 0.05) -> None:
        """Have faults happen from now on, at times that the seed decides.

        Args:
            kills: Workers that are killed.
            cuts: Connections that break, at any byte.
            pauses: Processes that stop for a while; one worker in ten for so long that the runtime gives it up.
            within: Seconds after which a fault happens, on average.
        """
        for happens, count in ((self._kill_one, kills), (self._cut_one, cuts), (self._pause_one, pauses)):
            for _ in range(count):
                self.loop.later(self.rng.expovariate(1 / within), happens)

    def kill(self, process: SimulatedProcess) -> None:
        """Kill a worker, as SIGKILL does."""
        for launcher in self._launchers:
            if any(main.process is process for main in launcher.mains):
                launcher.ended(process, None, "SIGKILL")

    def pause(self, process: SimulatedProcess, seconds: float) -> None:
        """Stop a process, as SIGSTOP does, and let it go on some time later."""
        self.loop.note("pause", process.name, seconds)
        process.paused = True
        self.loop.later(seconds, setattr, process, "paused", False)

    def cut(self, end: End) -> None:
        """Break one of `network.connections()`."""
        self.loop.note("cut", sorted(end.fds))
        end.cut()
        end.other.cut()

    def _kill_one(self) -> None:
        if self.workers:
            self.kill(self.rng.choice(self.workers))

    def _cut_one(self) -> None:
        connections = self.network.connections()
        if connections:
            self.cut(self.rng.choice(connections))

    def _pause_one(self) -> None:
        process = self.rng.choice([*self.workers, self.controller])
        for_long = process is not self.controller and self.rng.random() < 0.1
        self.pause(process, 45.0 if for_long else self.rng.expovariate(10))

    # What is simulated.

    def _env(self) -> Env:
        return Env(
            monotonic=self.loop.time,
            random=self.rng,
            token=self.rng.randbytes,
            # Errors tell of these, and would differ in length between machines.
            hostname=lambda: "here",
            pid=lambda: FIRST_PID,
            sockets=self.network,
            thread=SimulatedThread,
            launcher=self._launcher,
        )

    def _launcher(self, loop: SimulatedLoop, **options: Any) -> SimulatedLauncher:
        self._launchers.append(SimulatedLauncher(self.network, self._env, loop, **options))
        return self._launchers[-1]

    def _bury(self) -> None:
        for peer, _ in self.peers:
            closed(peer.process)
            peer.store.close()
        self._launchers.clear()
        self._runtimes.clear()
        self.loop.bury()
        self.network.bury()


@contextmanager
def _without_collector() -> Generator[None, None, None]:
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def _errors_to(logged: list[str]) -> Generator[None, None, None]:
    """Errors that the runtime logs go to a list only."""

    def note(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            error = record.exc_info[1] if record.exc_info else None
            logged.append(f"{record.getMessage()}: {error!r}")
        return False

    logger = logging.getLogger("aiodaft")
    logger.addFilter(note)
    try:
        yield
    finally:
        logger.removeFilter(note)
