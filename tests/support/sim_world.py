"""A machine that is simulated: the real runtime, node and workers, on virtual time, sockets, threads and processes."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Final
from unittest import mock

from sim_loop import Process, SimLoop
from sim_net import End, Network, SimSocket, Weather

import aiodaft
from aiodaft._protocol.ids import NODE
from aiodaft._runtime import process as current
from aiodaft._runtime.node.environment import WorkerEnvironment
from aiodaft._runtime.node.heartbeat import Heartbeat, HeartbeatWatch
from aiodaft._runtime.node.launcher import ChildProcess, Ending
from aiodaft._runtime.node.worker_main import Worker, WorkerSettings
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.platform.env import Env
from aiodaft.exceptions import SpawnFailed

# Pids from here on belong to no process of this machine.
_NO_PID: Final = 10_000_000


class SimThread:
    """An actor's thread: each job takes its time, and happens at one moment of it."""

    ident = None

    def __init__(self, name: str, loop: SimLoop) -> None:
        self._loop = loop
        self._jobs: deque[Callable[[], object]] = deque()
        self._busy = False

    @property
    def backlog(self) -> int:
        return len(self._jobs)

    def submit(self, job: Callable[[], object]) -> None:
        self._jobs.append(job)
        if not self._busy:
            self._busy = True
            self._loop.call_later(self._loop.rng.random() * 0.002, self._work)

    def _work(self) -> None:
        self._jobs.popleft()()
        self._busy = bool(self._jobs)
        if self._busy:
            self._loop.call_later(self._loop.rng.random() * 0.01, self._work)

    async def run(self, function: Callable[[], Any]) -> Any:
        done: asyncio.Future[Any] = self._loop.create_future()

        def job() -> None:
            try:
                done.set_result(function())
            except Exception as error:  # noqa: BLE001 - whatever it is belongs to the waiting task
                done.set_exception(error)

        self.submit(job)
        return await done

    def to_loop(self, callback: Callable[[], object]) -> None:
        self._loop.call_later(self._loop.rng.random() * 0.001, callback)

    def close(self) -> None:
        """Nothing is left of it."""


class SimOffload:
    """The helper thread, on virtual time."""

    def __init__(self, name: str, loop: SimLoop) -> None:
        self._loop = loop

    async def run(self, job: Callable[[], Any]) -> Any:
        await asyncio.sleep(self._loop.rng.random() * 0.002)
        return job()

    run_to_end = run

    async def aclose(self) -> None:
        """Nothing is left of it."""

    def abandon(self) -> None:
        """Nothing is left of it."""


class SimWorker(Worker):
    """A worker that ends without ending the test."""

    process: Process
    launcher: SimNursery

    def _exit_requested(self, error: BaseException) -> None:
        code = error.code if isinstance(error, SystemExit) else 130
        self.launcher.ended(self.process, int(code or 0), None)


class Output:
    """What it would have printed."""

    name = ""
    last_lines = ()


class PulseLine:
    """What questions and answers about a worker's life travel over: the node's end of it."""

    def __init__(self, loop: SimLoop, process: Process) -> None:
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
            raise BrokenPipeError("nobody is there")
        self._loop.later(self._loop.rng.random() * 0.01, self._loop.within, self._process, self._asked)

    def _asked(self) -> None:
        self._loop.later(self._loop.rng.random() * 0.01, self._answers.append, self.answer())

    def recv(self, size: int) -> bytes:
        if not self._answers:
            raise BlockingIOError
        return self._answers.popleft()

    def close(self) -> None:
        self._open = False


class SimPulse(Heartbeat):
    """The worker's end, without a thread."""

    def start(self) -> None:
        line: Any = self._connection
        line.answer = lambda: self._answer(self._peer.process.env.monotonic())


class SimChild(ChildProcess):
    """One worker, as the node sees it."""

    def __init__(self, number: int, process: Process, loop: SimLoop) -> None:
        output: Any = Output()
        line: Any = PulseLine(loop, process)
        super().__init__(number, output, HeartbeatWatch(line, loop), loop)
        self.line = line
        self.process = process
        self.pid = _NO_PID + number


class SimNursery:
    """Makes workers out of nothing but tasks."""

    pid = None

    def __init__(self, loop: SimLoop, **_: object) -> None:
        self._loop = loop
        self._world = World.of[loop]
        self._home = loop.current
        self._children: dict[int, SimChild] = {}
        self._last_number = 0
        self.on_ended: Callable[[Any, Ending], object] = lambda child, ending: None
        self.on_rung: Callable[[int], object] = lambda pid: None

    async def spawn(
        self, settings: bytes, worker_environment: WorkerEnvironment, environment: dict[str, str], name: str
    ) -> tuple[SimChild, SimSocket]:
        await asyncio.sleep(self._loop.rng.random() * 0.001)
        self._last_number += 1
        process = self._loop.new_process(f"worker{self._last_number}")
        child = self._children[self._last_number] = SimChild(self._last_number, process, self._loop)
        ours, theirs = self._world.net.pair(self._home, process)
        self._loop.later(self._loop.rng.random() * 0.01, self._begin, child, settings, theirs)
        return child, ours

    def _begin(self, child: SimChild, settings: bytes, connection: SimSocket) -> None:
        if not child.process.alive:
            return
        worker = SimWorker(WorkerSettings.unpacked(settings), connection, child.line)  # type: ignore[arg-type]  # it does what links need
        worker.process, worker.launcher = child.process, self

        async def live() -> None:
            status = await worker.run()
            self.ended(child.process, status, None)

        self._loop.start(child.process, live())
        self._loop.within(self._home, _settle, child.started, child.pid)

    def __contains__(self, number: int) -> bool:
        return number in self._children

    def kill(self, child: SimChild, number: int = signal.SIGKILL) -> None:
        """Send a signal, which takes a while."""
        self._loop.later(self._loop.rng.random() * 0.005, self.ended, child.process, None, "SIGKILL")

    async def end(self, child: SimChild) -> None:
        self.kill(child)
        await asyncio.shield(child.ended)

    async def wait_end(self, child: SimChild, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.shield(child.ended)
        return child.ended.done()

    def ended(self, process: Process, code: int | None, signal_name: str | None) -> None:
        """A process ends now; the node hears of it later."""
        if process.alive:
            self._loop.kill(process)
            child = next(child for child in self._children.values() if child.process is process)
            report = partial(self._report, child, Ending(child.pid, code, signal_name))
            self._loop.later(self._loop.rng.random() * 0.02, self._loop.within, self._home, report)

    def _report(self, child: SimChild, ending: Ending) -> None:
        if self._children.pop(child.number, None) is None:
            return
        child.fail(SpawnFailed("the worker did not start"))
        _settle(child.ended, ending)
        self.on_ended(child, ending)

    async def aclose(self) -> None:
        children = list(self._children.values())
        for child in children:
            self.kill(child)
        await asyncio.gather(*(asyncio.shield(child.ended) for child in children))

    def abandon(self) -> None:
        """Nothing is left of it."""


def _settle(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


class World:
    """One simulation. Everything in it follows from the seed."""

    # By their loops, for those who are made without being told.
    of: ClassVar[dict[SimLoop, World]] = {}

    def __init__(self, seed: object) -> None:
        self.loop = SimLoop(seed)
        self.rng = self.loop.rng
        weather = Weather(
            delay=self.rng.choice([0.0001, 0.001, 0.02]),
            room=self.rng.choice([1000, 10_000, 1 << 20]),
            chop=self.rng.choice([0.0, 0.1, 0.9]),
        )
        self.net = Network(self.loop, weather)
        self.controller = self.loop.new_process("controller")
        self.peers: list[tuple[Peer, Process]] = []

    def env(self) -> Env:
        return Env(monotonic=self.loop.time, random=self.rng, token=self.rng.randbytes)

    def runtime(self, **options: Any) -> aiodaft.Runtime:
        """A runtime of this world."""
        return aiodaft.Runtime(
            cpus=100, gpus=0, transport="shm", preload=(), uvloop=False, fork=True, env=self.env(), **options
        )

    @property
    def workers(self) -> list[Process]:
        """Those that live."""
        return [one for one in self.loop.processes if one.name.startswith("worker") and one.alive]

    def kill(self, process: Process) -> None:
        """SIGKILL, from outside."""
        launcher = self.peers[0][0].actors[NODE].instance._launcher
        launcher.ended(process, None, "SIGKILL")

    def pause(self, process: Process, seconds: float) -> None:
        """SIGSTOP, and SIGCONT some time later."""
        self.loop.note("pause", process.name, seconds)
        process.paused = True
        self.loop.later(seconds, setattr, process, "paused", False)

    def is_stopped(self, pid: int) -> bool:
        """Whether a worker is stopped, as /proc would say."""
        return any(one.paused for one in self.workers if one.name == f"worker{pid - _NO_PID}")

    def cut(self, end: End) -> None:
        """Break a connection."""
        self.loop.note("cut", sorted(end.fds))
        self.net.cut(end)

    def run(self, main: Coroutine[Any, Any, Any]) -> None:
        """Run the controller's program to its end."""
        with self._in_place():
            self.loop.run_main(self.controller, main)

    @contextmanager
    def _in_place(self) -> Generator[None, None, None]:
        world = self

        class SimPeer(Peer):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                world.peers.append((self, world.loop.current))

        replaced = {
            "aiodaft.runtime.WorkerLauncher": SimNursery,
            "aiodaft.runtime.Peer": SimPeer,
            "aiodaft._runtime.node.worker_main.Peer": SimPeer,
            "aiodaft._runtime.node.worker_main.Env": self.env,
            "aiodaft._runtime.node.worker_main.Heartbeat": SimPulse,
            "aiodaft._runtime.node.worker_main.offer_dump": lambda: None,
            "aiodaft._runtime.node.heartbeat.is_stopped": self.is_stopped,
            "aiodaft._runtime.node.postmortem.is_stopped": self.is_stopped,
            "aiodaft._runtime.actors.hosted_actor.HelperThread": SimThread,
            "aiodaft._runtime.process.HelperThread": SimOffload,
            # Errors tell of these, and differ in length with the folder, the machine and how modules were loaded.
            "aiodaft._runtime.process.visible_pid": lambda: _NO_PID,
            "aiodaft.runtime.os.uname": lambda: SimpleNamespace(nodename="here"),
            "aiodaft._runtime.serialization.errors.text_of": lambda error: "",
            "aiodaft._runtime.serialization.pickling._reduce_traceback": lambda frames: (_no_frames, ()),
            "aiodaft._runtime.connections.connections.socket": self.net,
            "aiodaft._runtime.connections.connection.socket": self.net,
            "aiodaft._runtime.connections.connection.os": self.net,
            "aiodaft._runtime.connections.fd_passing.os": self.net,
        }
        logs = _Logs(self.loop.problems)
        logger = logging.getLogger("aiodaft")
        open_peers = dict(current._open)
        World.of[self.loop] = self
        collecting = gc.isenabled()
        # What is collected when would differ from run to run.
        gc.disable()
        with ExitStack() as stack:
            for name, stand_in in replaced.items():
                stack.enter_context(mock.patch(name, stand_in))
            stack.enter_context(mock.patch.object(logger, "propagate", False))
            logger.addHandler(logs)
            stack.callback(logger.removeHandler, logs)
            try:
                yield
            finally:
                current._open.clear()
                current._open.update(open_peers)
                del World.of[self.loop]
                self._bury()
                if collecting:
                    gc.enable()

    def _bury(self) -> None:
        for peer, _ in self.peers:
            peer.store.close()
        self.peers.clear()
        self.loop.bury()
        self.net.close_all()


def _no_frames() -> None:
    """What arrives of a traceback."""


# An error of a tell, of a ref that a random program drops, of dead actors, and of a stopped worker.
_EXPECTED: Final = (
    "called by tell()", "before any code saw the error", "no call was under way", "more often than its restart policy",
    "has not answered for",
)  # fmt: skip


class _Logs(logging.Handler):
    """What should never be logged is a problem."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._problems = problems

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if not any(expected in text for expected in _EXPECTED):
            error = record.exc_info[1] if record.exc_info else None
            self._problems.append(f"logged: {text}: {error!r}")
