"""Worker processes of a simulation: the real worker code, started as tasks of the simulated loop."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from aiodaft._runtime.node.environment import WorkerEnvironment, WorkerSettings
from aiodaft._runtime.node.heartbeat import Heartbeat, HeartbeatWatch
from aiodaft._runtime.node.launcher import ChildProcess, Ending
from aiodaft._runtime.node.worker_main import Worker
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.platform.env import Env
from aiodaft.exceptions import SpawnFailed
from aiodaft.testing.network import SimulatedNetwork
from aiodaft.testing.simulated_loop import SimulatedLoop, SimulatedProcess

# Pids from here on belong to no process of the machine.
FIRST_PID: Final = 10_000_000


class SimulatedWorker(Worker):
    """A worker that ends without ending the test."""

    process: SimulatedProcess
    launcher: SimulatedLauncher

    @property
    def peer(self) -> Peer | None:
        """What it runs, once it has begun."""
        return getattr(self, "_peer", None)

    def _exit_requested(self, error: BaseException) -> None:
        code = error.code if isinstance(error, SystemExit) else 130
        self.launcher.ended(self.process, int(code or 0), None)

    def _start_heartbeat(self, peer: Peer) -> None:
        SimulatedHeartbeat(self._heartbeat, peer.host).start()


class SimulatedOutput:
    """What a worker has printed: nothing, because it prints where the test prints."""

    name = ""
    last_lines = ()


class HeartbeatLine:
    """What questions and answers about a worker's life travel over: the node's end of it."""

    def __init__(self, loop: SimulatedLoop, process: SimulatedProcess) -> None:
        self._loop = loop
        self._process = process
        self._answers: deque[bytes] = deque()
        self._open = True
        self.answer: Callable[[], bytes] = bytes

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def fileno(self) -> int:
        return 0 if self._open else -1

    def send(self, question: bytes) -> None:
        if not self._process.alive:
            raise BrokenPipeError("the process has ended")
        self._loop.later(self._loop.rng.random() * 0.01, self._loop.within, self._process, self._asked)

    def _asked(self) -> None:
        self._loop.later(self._loop.rng.random() * 0.01, self._answers.append, self.answer())

    def recv(self, size: int) -> bytes:
        """An answer that has come."""
        if not self._answers:
            raise BlockingIOError
        return self._answers.popleft()

    def close(self) -> None:
        self._open = False


class SimulatedHeartbeat(Heartbeat):
    """The worker's end, without a thread."""

    def start(self) -> None:
        line: Any = self._connection
        line.answer = lambda: self._answer(self._process.env.monotonic())


class SimulatedChild(ChildProcess):
    """One worker, as the node sees it."""

    def __init__(self, number: int, process: SimulatedProcess, loop: SimulatedLoop) -> None:
        output: Any = SimulatedOutput()
        line: Any = HeartbeatLine(loop, process)
        super().__init__(number, output, HeartbeatWatch(line, loop, lambda pid: process.paused), loop)
        self.line = line
        self.process = process
        self.pid = FIRST_PID + number


class SimulatedLauncher:
    """Does what `WorkerLauncher` does, with tasks of the loop in place of processes."""

    pid = None

    def __init__(self, network: SimulatedNetwork, env: Callable[[], Env], loop: SimulatedLoop, **_: object) -> None:
        self._network = network
        self._env = env
        self._loop = loop
        self._home = loop.current
        self._children: dict[int, SimulatedChild] = {}
        self._last_number = 0
        # All started workers, also ended ones.
        self.workers: list[SimulatedWorker] = []
        self.on_ended: Callable[[Any, Ending], object] = lambda child, ending: None
        self.on_stack_request: Callable[[int], object] = lambda pid: None

    async def spawn(
        self, settings: bytes, worker_environment: WorkerEnvironment, environment: dict[str, str], name: str
    ) -> tuple[SimulatedChild, socket.socket]:
        """Start a worker; see `WorkerLauncher.spawn`."""
        await asyncio.sleep(self._loop.rng.random() * 0.001)
        self._last_number += 1
        process = self._loop.new_process(f"worker{self._last_number}")
        child = self._children[self._last_number] = SimulatedChild(self._last_number, process, self._loop)
        ours, theirs = self._network.connect(self._home, process)
        self._loop.later(self._loop.rng.random() * 0.01, self._begin, child, settings, theirs)
        return child, ours

    def _begin(self, child: SimulatedChild, settings: bytes, connection: socket.socket) -> None:
        if not child.process.alive:
            return
        worker = SimulatedWorker(WorkerSettings.unpacked(settings), connection, child.line, self._env())
        worker.process, worker.launcher = child.process, self
        self.workers.append(worker)

        async def live() -> None:
            status = await worker.run()
            self.ended(child.process, status, None)

        self._loop.start(child.process, live())
        self._loop.within(self._home, _settle, child.started, child.pid)

    def __contains__(self, number: int) -> bool:
        return number in self._children

    def kill(self, child: SimulatedChild, number: int = signal.SIGKILL) -> None:
        """Send a signal, which takes a while."""
        self._loop.later(self._loop.rng.random() * 0.005, self.ended, child.process, None, "SIGKILL")

    async def end(self, child: SimulatedChild) -> None:
        self.kill(child)
        await asyncio.shield(child.ended)

    async def wait_end(self, child: SimulatedChild, seconds: float) -> bool:
        """Wait until a worker has ended, but no longer than that; False if it has not."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.shield(child.ended)
        return child.ended.done()

    def ended(self, process: SimulatedProcess, code: int | None, signal_name: str | None) -> None:
        """A process ends now; the node hears of it later."""
        if process.alive:
            self._loop.kill(process)
            child = next(child for child in self._children.values() if child.process is process)
            report = partial(self._report, child, Ending(child.pid, code, signal_name))
            self._loop.later(self._loop.rng.random() * 0.02, self._loop.within, self._home, report)

    def _report(self, child: SimulatedChild, ending: Ending) -> None:
        if self._children.pop(child.number, None) is None:
            return
        child.fail(SpawnFailed("the worker did not start"))
        _settle(child.ended, ending)
        self.on_ended(child, ending)

    async def aclose(self) -> None:
        """Kill every worker and wait until they have ended."""
        children = list(self._children.values())
        for child in children:
            self.kill(child)
        await asyncio.gather(*(asyncio.shield(child.ended) for child in children))

    def abandon(self) -> None:
        """There is nothing to end."""


def _settle(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)
