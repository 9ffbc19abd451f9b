"""Machines that are simulated: the real runtime, nodes and workers, on virtual time, sockets, threads and processes."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar
from unittest.mock import patch

from aiodaft._runtime import agent
from aiodaft._runtime.coordination.coordinator import LEASE
from aiodaft._runtime.node.worker import WorkerEnvironment
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.process import Env, closed
from aiodaft.runtime import Runtime
from aiodaft.testing.in_process import FIRST_PID
from aiodaft_transport import Key
from simulated.hosts import SimulatedHost
from simulated.launcher import SimulatedLauncher
from simulated.network import End, NetworkConditions, SimulatedNetwork
from simulated.routes import HostNetwork, Routes
from simulated.simulated_loop import SimulatedLoop, SimulatedProcess
from simulated.threads import SimulatedThread

T = TypeVar("T")

# The machine of the program, which has no node, if there are hosts.
DESK: Final = "desk"
# Seconds that faults of the network and of hosts last; 10 is more than a lease, and 14 more than TCP waits.
_LASTING: Final = (0.2, 2.0, 8.0, 20.0)


class Simulation:
    """One run of a program with its actors in one thread. Everything in it follows from the seed.

    Every process of a runtime is simulated, with the framework's real code in it: messages take time and come in
    pieces, `def` methods take virtual time, and `disturb` has processes die, stop and lose connections.

    Not simulated: compiled graphs, GPUs, the operating system (files, subprocesses, sockets of your own). Modules are
    not loaded again for each process, so module globals are shared by all of them.

    Args:
        seed: Decides everything that happens: a number, or anything with a repr of its own.
        hosts: The names of machines that form a cluster, the one with the coordinator first; the program runs on
            another machine. Default: the program's machine alone.
        lease: Seconds of a lease of the cluster.
        hang_after: Virtual seconds after which a program that has not ended counts as hung.

    Attributes:
        rng: Makes the choices of the simulation; use it for your own choices, so that they follow from the seed, too.
        problems: Errors that the event loop reported because no code handled them.
        logged: Errors that the runtime logged.
        trace: The events, in short, each with its time and process; equal for equal seeds.
        hosts: The machines by name.
        routes: The network between them.
        calm_at: The virtual time at which all faults are over that have begun, and those that are to begin have begun.
    """

    def __init__(
        self, seed: object, *, hosts: Sequence[str] = (), lease: float = LEASE, hang_after: float = 300.0
    ) -> None:
        self.loop = SimulatedLoop(seed, hang_after)
        self.rng = self.loop.rng
        conditions = NetworkConditions(
            delay=self.rng.choice([0.0001, 0.001, 0.02]),
            room=self.rng.choice([1000, 10_000, 1 << 20]),
            chop=self.rng.choice([0.0, 0.1, 0.9]),
        )
        self.network = SimulatedNetwork(self.loop, conditions)
        self.routes = Routes(self.network, self.rng.choice([0.0005, 0.005, 0.05]) if hosts else 0.0)
        self._key = Key(self.rng.randbytes(32)) if hosts else None
        self.hosts = self._make_hosts(hosts, lease)
        self.controller = self.loop.new_process("controller", DESK if hosts else "")
        self.problems = self.loop.problems
        self.logged: list[str] = []
        self.trace = self.loop.trace
        self.calm_at = 0.0
        self._runtimes: list[tuple[Runtime, SimulatedProcess]] = []
        self._launchers: list[SimulatedLauncher] = []

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run the controller's program to its end, after all hosts have joined the cluster; a simulation runs once.

        Raises:
            Hang: A task waits, and nothing will ever wake it.
        """
        with _errors_to(self.logged, self.loop), _alike_everywhere():
            try:
                return self.loop.run_main(self.controller, self._run(main))
            finally:
                self._bury()

    async def _run(self, main: Coroutine[Any, Any, T]) -> T:
        for host in self.hosts.values():
            host.start()
        for host in self.hosts.values():
            await host.wait_joined()
        return await main

    def start(self, host: str, program: Coroutine[Any, Any, None]) -> SimulatedProcess:
        """Run another program, as a process on a host; it ends with the host, or when `kill` ends it."""
        process = self.loop.new_process(f"program{len(self.loop.processes)}@{host}", host)

        async def run() -> None:
            await program
            self.loop.kill(process)

        self.loop.start(process, run())
        return process

    def runtime(self, host: str | None = None, **options: Any) -> Runtime:
        """A runtime of this simulation, to be used as `async with`.

        Args:
            host: The host with the node that it is attached to; default: any.
            options: Those of `aiodaft.Runtime`.
        """
        process = self.loop.current
        fixed: dict[str, Any] = {"cpus": 100, "gpus": 0, "preload": (), "uvloop": False, "fork": True}
        if self.hosts:
            fixed["address"] = self.hosts[host or self.rng.choice([*self.hosts])].address
        else:
            fixed["transport"] = "shm"
        runtime = Runtime(**{**fixed, **options}, env=self._env(process.host))
        self._runtimes.append((runtime, process))
        return runtime

    @property
    def workers(self) -> list[SimulatedProcess]:
        return [one for one in self.loop.processes if one.name.startswith("worker") and one.alive]

    @property
    def peers(self) -> list[tuple[Peer, SimulatedProcess]]:
        workers = [main for launcher in self._launchers for main in launcher.mains]
        found: list[tuple[Peer | None, SimulatedProcess]] = []
        found += [(one._controller.peer, process) for one, process in self._runtimes if one._controller.name]
        found += [(worker.peer, worker.process) for worker in workers]
        found += [known for host in self.hosts.values() for known in host.peers]
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
                self._later(self.rng.expovariate(1 / within), happens)

    def disturb_hosts(
        self, *, partitions: int = 0, drops: int = 0, resets: int = 0, deaths: int = 0, within: float = 5.0
    ) -> None:
        """Have faults of hosts and of the network between them happen from now on, at times that the seed decides.

        Args:
            partitions: Hosts that reach no other one for a while.
            drops: Ways from one host to another that lose everything, in this direction, for a while.
            resets: Pairs of hosts whose connections are reset.
            deaths: Hosts that lose power, or whose node is killed, and are started again later.
            within: Seconds after which a fault happens, on average; at most five times as many.
        """
        faults = ((self._partition_one, partitions), (self._drop_one, drops))
        for happens, count in (*faults, (self._reset_one, resets), (self._end_one_host, deaths)):
            for _ in range(count):
                self._later(min(self.rng.expovariate(1 / within), 5 * within), happens)

    def _later(self, seconds: float, happens: Callable[[], object]) -> None:
        self.calm_at = max(self.calm_at, self.loop.time() + seconds)
        self.loop.later(seconds, happens)

    def kill(self, process: SimulatedProcess) -> None:
        """Kill a worker, or a program that `start` has started, as SIGKILL does."""
        for launcher in self._launchers:
            if any(worker.process is process for worker in launcher.workers.values()):
                launcher.ended(process, None, "SIGKILL")
        self.loop.kill(process)

    def pause(self, process: SimulatedProcess, seconds: float) -> None:
        """Stop a process, as SIGSTOP does, and let it go on some time later."""
        self.calm_at = max(self.calm_at, self.loop.time() + seconds)
        self.loop.pause(process, seconds)

    def cut(self, end: End) -> None:
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
        nodes = [host.process for host in self.hosts.values() if host.is_alive]
        process = self.rng.choice([*self.workers, *nodes, self.controller])
        for_long = process is not self.controller and self.rng.random() < 0.1
        self.pause(process, 45.0 if for_long else self.rng.expovariate(10))

    def _partition_one(self) -> None:
        host = self.rng.choice([*self.hosts])
        for other in (*self.hosts, DESK):
            if other != host:
                self.routes.drop(host, other)
                self.routes.drop(other, host)
        self._end_later(self.routes.heal)

    def _drop_one(self) -> None:
        self.routes.drop(*self.rng.sample([*self.hosts, DESK], 2))
        self._end_later(self.routes.heal)

    def _reset_one(self) -> None:
        self.routes.reset(*self.rng.sample([*self.hosts, DESK], 2))

    def _end_one_host(self) -> None:
        host = self.hosts[self.rng.choice([*self.hosts])]
        if self.rng.random() < 0.5:
            host.unplug()
        else:
            host.kill()
        self._end_later(host.start)

    def _end_later(self, end: Callable[[], object]) -> None:
        self._later(self.rng.choice(_LASTING) * self.rng.random(), end)

    # The simulated parts.

    def _make_hosts(self, names: Sequence[str], lease: float) -> dict[str, SimulatedHost]:
        hosts: dict[str, SimulatedHost] = {}
        stored = bool(names) and self.rng.random() < 0.5
        for name in names:
            first = hosts[names[0]] if hosts else None
            hosts[name] = SimulatedHost(name, first, self.loop, self.routes, self._env, lease=lease, stored=stored)
        return hosts

    def _env(self, host: str = "") -> Env:
        return Env(
            monotonic=self.loop.time,
            random=self.rng,
            token=self.rng.randbytes,
            # Errors tell of these, and would differ in length between machines.
            hostname=lambda: host or "here",
            pid=lambda: FIRST_PID,
            sockets=self.network,
            thread=SimulatedThread,
            launcher=partial(self._launcher, host),
            network=None if self._key is None else HostNetwork(self.routes, host, self._key),
        )

    def _launcher(self, host: str, loop: SimulatedLoop, *options: object) -> SimulatedLauncher:
        self._launchers.append(SimulatedLauncher(self.network, partial(self._env, host), loop, *options))
        return self._launchers[-1]

    def _bury(self) -> None:
        for peer, _ in self.peers:
            closed(peer.process)
            peer.store.close()
        self._launchers.clear()
        self._runtimes.clear()
        self.hosts.clear()
        self.loop.bury()
        self.network.bury()


@contextmanager
def _alike_everywhere() -> Generator[None, None, None]:
    """The payloads, and the moments of garbage collection, are the same in each run, on each machine."""
    nowhere = WorkerEnvironment({}, "/", [], [])
    collecting = gc.isenabled()
    gc.disable()
    try:
        with (
            # Paths in tracebacks.
            patch.object(sys, "tracebacklimit", 0, create=True),
            patch.object(WorkerEnvironment, "here", lambda *_: nowhere),
            patch.object(agent, "origin_of", lambda cls: None),
        ):
            yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def _errors_to(logged: list[str], loop: SimulatedLoop) -> Generator[None, None, None]:
    """Errors that the runtime logs go to a list only, until the simulation is over."""

    def note(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR and not loop.is_closed():
            error = record.exc_info[1] if record.exc_info else None
            logged.append(f"{record.getMessage()}: {error!r}")
        return False

    logger = logging.getLogger("aiodaft")
    logger.addFilter(note)
    try:
        yield
    finally:
        logger.removeFilter(note)
