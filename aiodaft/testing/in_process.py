"""Tests without processes and waiting: the code of workers as tasks of the test's loop, and a virtual clock."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import Context
from itertools import count
from typing import Any, Final, TypeVar, TypeVarTuple
from unittest.mock import patch

from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.node.worker import Ending
from aiodaft._runtime.node.environment import WorkerEnvironment, WorkerSettings
from aiodaft._runtime.node.worker import Heartbeat, HeartbeatWatch, Worker
from aiodaft._runtime.node.worker_main import WorkerMain
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.platform.env import Env
from aiodaft._runtime.platform.tasks import TaskOwner
from aiodaft._runtime.process import closed
from aiodaft.exceptions import PeerLost, SpawnFailed
from aiodaft.runtime import Runtime
from aiodaft_transport import default_name

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Hang(Exception):
    """A task waits, and nothing will ever wake it: no timer is set, and no thread is busy."""


class AutojumpLoop(asyncio.BaseEventLoop):
    """Runs tasks without waiting for time to pass: a test with a timeout of an hour takes a millisecond.

    It has no sockets, pipes, signals or child processes. The threads of `asyncio.to_thread` and `run_in_executor` are
    waited for: the clock stands still while they work.

    Raises:
        Hang: From the function that runs the loop, instead of waiting for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        # Jobs that threads work on, and whether a thread has called back.
        self._in_threads = 0
        self._called_back = threading.Event()
        # The selector that asyncio waits with.
        self._selector = self

    def time(self) -> float:
        """Seconds since the loop was made, all of them virtual."""
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """The loop's own selector: lets time pass until something happens."""
        if timeout == 0:
            return []
        if self._in_threads or self._called_back.is_set():
            self._called_back.wait()
            self._called_back.clear()
        elif timeout is None:
            raise Hang("every task waits, no timer is set, and no thread is busy")
        else:
            self._now += timeout
        return []

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Run a function in a thread, which takes no time on the virtual clock."""
        future = super().run_in_executor(executor, func, *args)
        self._in_threads += 1
        future.add_done_callback(self._thread_done)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Wait for the threads; a limit would be over at once on the virtual clock."""
        executor: Executor | None = getattr(self, "_default_executor", None)
        if executor is not None:
            executor.shutdown()

    def _thread_done(self, future: asyncio.Future[Any]) -> None:
        self._in_threads -= 1

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none: no descriptor is watched."""

    def _write_to_self(self) -> None:
        self._called_back.set()


# Pids from here on belong to no process of the machine: a signal to one reaches nothing.
FIRST_PID: Final = 10_000_000
# Options that need processes.
_NEEDS_PROCESSES: Final = {"address", "env", "isolation", "key_file"}


def in_process(**options: Any) -> Runtime:
    """A runtime whose actors live in this process, to be used as `async with`: it starts no process.

    The code is that of a runtime with processes: values are encoded and copied, `def` methods run on a thread per
    actor, calls are ordered, cancelled, restarted and failed in the same way. The differences: actors share the
    modules, the environment variables and the output of this process; a blocked event loop blocks all of them; a killed
    actor is cancelled, so that its `finally` blocks run, and a `def` method that runs goes on to its end.

    Args:
        options: Those of `aiodaft.Runtime`, without `address`, `key_file`, `isolation` and `env`.

    Raises:
        ValueError: An option needs processes.
    """
    unfit = sorted(_NEEDS_PROCESSES & options.keys())
    if unfit:
        raise ValueError(f"{', '.join(unfit)}: the actors of this runtime have no processes of their own")
    fixed: dict[str, Any] = {"cpus": 64, "gpus": 0, "transport": default_name(), "preload": (), "uvloop": False}
    with patch.dict(os.environ):
        # A node would start processes.
        os.environ.pop("AIODAFT_ADDRESS", None)
        return Runtime(**{**fixed, **options}, env=Env(launcher=InProcessLauncher))


class NoOutput:
    """The output of a worker: nothing, because it prints where the test prints."""

    last_lines = ()

    def rename(self, names: str, pid: int) -> None:
        """Do nothing: no line is shown with these names."""


class Pulse:
    """The node's end of the way of heartbeats: a question is answered at once."""

    def __init__(self) -> None:
        self._answers: deque[bytes] = deque()
        self._open = True
        self.answer: Callable[[], bytes] = bytes

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def fileno(self) -> int:
        return 0 if self._open else -1

    def send(self, question: bytes) -> None:
        self._answers.append(self.answer())

    def recv(self, size: int) -> bytes:
        if not self._answers:
            raise BlockingIOError
        return self._answers.popleft()

    def close(self) -> None:
        self._open = False


class _PulseHeartbeat(Heartbeat):
    """The worker's end, without a thread."""

    def start(self) -> None:
        pulse: Any = self._connection
        pulse.answer = lambda: self._answer(self._process.env.monotonic())


class EnclosedMain(WorkerMain):
    """A worker without a process: it ends without ending the test."""

    on_exit: Callable[[int], object]

    @property
    def peer(self) -> Peer | None:
        return getattr(self, "_peer", None)

    def _start_heartbeat(self, peer: Peer) -> None:
        _PulseHeartbeat(self._heartbeat, peer.host).start()

    def _seed(self, label: str, epoch: int) -> None:
        """The random numbers are those of the test."""

    def _exit_requested(self, error: BaseException) -> None:
        code = error.code if isinstance(error, SystemExit) else 130
        self.on_exit(code if isinstance(code, int) else int(code is not None))


class InProcessMain(EnclosedMain):
    """A worker whose loop is that of the test."""

    def cut_off(self, reason: str) -> None:
        """End all connections without a word, as the kernel does with those of a dead process; `run` then returns."""
        if self.peer is not None:
            for connection in list(self.peer.connections.values()):
                connection.close(PeerLost(reason))
        self._end(1)


class EnclosedLauncher:
    """Base class of launchers whose workers are not OS processes."""

    pid = None

    async def wait_end(self, worker: Worker, seconds: float) -> bool:
        """Wait until a worker has ended, but no longer than that; False if it has not."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.shield(worker.ended)
        return worker.ended.done()


class InProcessLauncher(EnclosedLauncher):
    """A `WorkerLauncher` with tasks in place of processes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *_: object) -> None:
        self._loop = loop
        self._tasks = TaskOwner("actors in this process")
        self._pids = count(FIRST_PID + 1)
        self._mains: dict[PeerId, InProcessMain] = {}
        self._living: set[asyncio.Task[None]] = set()
        self.workers: dict[PeerId, Worker] = {}
        self.on_ended: Callable[[Worker, Ending], object] = lambda worker, ending: None

    async def spawn(
        self, settings: WorkerSettings, inherited: WorkerEnvironment, environment: dict[str, str], label: str
    ) -> tuple[Worker, socket.socket]:
        pulse: Any = Pulse()
        output: Any = NoOutput()
        worker = Worker(settings.options.id, label, output, HeartbeatWatch(pulse, self._loop, lambda pid: False))
        pid = worker.pid = next(self._pids)
        ours, theirs = socket.socketpair()
        main = InProcessMain(WorkerSettings.unpacked(settings.packed()), theirs, pulse, Env(pid=lambda: pid))
        main.on_exit = lambda code: self._ended(worker, Ending(code, None))
        self._mains[worker.id], self.workers[worker.id] = main, worker
        # In a context of its own: that of the test has the test's process in it.
        task = Context().run(self._tasks.create_task, self._live(worker, main), name=label)
        self._living.add(task)
        task.add_done_callback(self._living.discard)
        worker.started.set_result(None)
        return worker, ours

    async def _live(self, worker: Worker, main: InProcessMain) -> None:
        status = await main.run()
        if main.peer is not None:
            closed(main.peer.process)
        self._ended(worker, Ending(status, None))

    def _ended(self, worker: Worker, ending: Ending) -> None:
        if self.workers.pop(worker.id, None) is None:
            return
        self._mains.pop(worker.id).cut_off(f"{worker} has ended")
        worker.fail(SpawnFailed("the worker did not start"))
        self.on_ended(worker, ending)
        worker.ended.set_result(ending)

    def kill(self, worker: Worker, number: int = signal.SIGKILL) -> None:
        self._ended(worker, Ending(None, signal.Signals(number).name))

    async def end(self, worker: Worker) -> None:
        self.kill(worker)

    async def aclose(self) -> None:
        for worker in list(self.workers.values()):
            self.kill(worker)
        if self._living:
            await asyncio.wait(self._living)

    def abandon(self) -> None:
        for main in self._mains.values():
            if main.peer is not None:
                closed(main.peer.process)
                main.peer.abandon("the event loop it was opened on is gone")

    def stay_behind(self) -> None:
        """In a forked child there is nothing to leave: actors were not forked with their loop."""
