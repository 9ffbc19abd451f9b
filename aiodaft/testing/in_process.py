"""Tests without processes and waiting, and faults: workers as tasks of the test's loop, and a virtual clock."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import Context
from itertools import count
from typing import Any, Final, TypeVar, TypeVarTuple, cast
from unittest.mock import patch

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.messages import Message
from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.node.worker import Ending
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.connections.connection import Connection, Handler
from aiodaft._runtime.node.nodes import LocalNode
from aiodaft._runtime.node.worker import HeartbeatWatch, Worker, WorkerEnvironment, WorkerSettings
from aiodaft._runtime.node.worker_main import Heartbeat, WorkerMain
from aiodaft._runtime.peer import Peer
from aiodaft._runtime.platform.linux import SEES_PROCESSES, is_stopped, status_of
from aiodaft._runtime.platform.tasks import TaskOwner
from aiodaft._runtime.process import Env, closed, current_process
from aiodaft.actor import Actor, handle_of, target_of
from aiodaft.exceptions import ActorDied, DaftError, PeerLost, SpawnFailed
from aiodaft.methods import method
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
        self._in_threads = 0
        self._called_back = threading.Event()
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
_NEEDS_PROCESSES: Final = {"address", "env", "key_file"}


def in_process(**options: Any) -> Runtime:
    """A runtime whose actors live in this process, to be used as `async with`: it starts no process.

    The code is that of a runtime with processes: values are encoded and copied, `def` methods run on a thread per
    actor, calls are ordered, cancelled, restarted and failed in the same way. The differences: actors share the
    modules, the environment variables and the output of this process; a blocked event loop blocks all of them; a killed
    actor is cancelled, so that its `finally` blocks run, and a `def` method that runs goes on to its end.

    Args:
        options: Those of `aiodaft.Runtime`, without `address`, `key_file` and `env`.

    Raises:
        ValueError: An option needs processes.
    """
    unfit = sorted(_NEEDS_PROCESSES & options.keys())
    if unfit:
        raise ValueError(f"{', '.join(unfit)}: the actors of this runtime have no processes of their own")
    fixed: dict[str, Any] = {"cpus": 64, "gpus": 0, "transport": default_name(), "preload": (), "uvloop": False}
    with patch.dict(os.environ):
        os.environ.pop("AIODAFT_ADDRESS", None)
        return Runtime(**{**fixed, **options}, env=Env(launcher=InProcessLauncher))


class NoOutput:
    last_lines = ()

    def rename(self, names: str, pid: int) -> None:
        """Do nothing: no line is shown with these names."""


class Pulse:
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
    def start(self) -> None:
        pulse: Any = self._connection
        pulse.answer = lambda: self._answer(self._process.env.monotonic())


class EnclosedMain(WorkerMain):
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
    def cut_off(self, reason: str) -> None:
        """End all connections without a word, as the kernel does with those of a dead process."""
        if self.peer is not None:
            for connection in list(self.peer.connections.values()):
                connection.close(PeerLost(reason))
        self._end(1)


class EnclosedLauncher:
    """Base class of launchers whose workers are not OS processes."""

    pid = None

    async def wait_end(self, worker: Worker, seconds: float) -> bool:
        """Returns False if the worker has not ended by then."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.shield(worker.ended)
        return worker.ended.done()


class InProcessLauncher(EnclosedLauncher):
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
        # The context of the test has the test's process in it.
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


# Calls, and messages about a call that is under way. Messages with descriptors are not among them.
_DELAYED: Final = (m.CALL, m.TELL, m.APPLY, m.SEND, m.FORWARD, m.CANCEL, m.CREDIT)


class Faults:
    """Makes faults of actors that the program of the test owns. Each method returns when the fault has happened.

    Args:
        nodes: The pids of the nodes of a cluster, for `kill_node`.
    """

    def __init__(self, nodes: Mapping[str, int] | None = None) -> None:
        self._nodes = nodes or {}
        self._stopped: set[int] = set()

    async def kill(self, actor: object) -> None:
        """Kill the process of an actor, as SIGKILL does: its calls under way have failed when this returns.

        The runtime takes it for an accident, so that the actor is restarted if it has a policy.

        Raises:
            ActorDied: It has no process.
        """
        runtime, target = _of(actor)
        remote = target.remote
        pid = await _pid_of(runtime, target)
        launcher = _launcher(runtime)
        if launcher is None:
            os.kill(pid, signal.SIGKILL)
        else:
            launcher.kill(launcher.workers[remote])
        self._stopped.discard(pid)
        await runtime._controller.nodes.of(remote).wait_end(remote)
        with suppress(DaftError):
            await runtime._controller.agent_of(remote).answer()

    async def stop(self, actor: object) -> None:
        """Stop the process of an actor, as SIGSTOP does: it takes calls, and answers none, until `resume`.

        Raises:
            ActorDied: It has no process.
            RuntimeError: It lives in the process of the test, which cannot be stopped.
        """
        runtime, target = _of(actor)
        if _launcher(runtime) is not None:
            raise RuntimeError(f"{target.label} lives in the process of the test: only one of `daft_cluster` can stop")
        pid = await _pid_of(runtime, target)
        self._stopped.add(pid)
        os.kill(pid, signal.SIGSTOP)
        while SEES_PROCESSES and not is_stopped(pid) and status_of(pid) is None:  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0)

    async def resume(self, actor: object) -> None:
        """Let a stopped process go on.

        Raises:
            ActorDied: It has no process any more.
        """
        self._resume(await _pid_of(*_of(actor)))

    def resume_all(self) -> None:
        """Let all processes go on that this has stopped. Idempotent."""
        for pid in list(self._stopped):
            self._resume(pid)

    def _resume(self, pid: int) -> None:
        self._stopped.discard(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    async def delay(self, actor: object, seconds: float) -> None:
        """Have calls, and cancellations, reach the process of an actor so many seconds later, in order.

        Actors that share the process have the same delay. 0 ends it.

        Raises:
            ActorDied: The actor is gone.
            SpawnFailed: Another actor has spawned it.
        """
        await self._inside(actor, "delay", seconds)

    async def cut(self, actor: object, other: object | None = None) -> None:
        """Break the connection of an actor's process to that of another actor, or to the test.

        Calls that are under way over it fail with `PeerLost`. Between two machines a new connection is made for the
        next call; on one machine the connection stays cut, and a process that loses its controller ends.

        Raises:
            ActorDied: The actor is gone.
            SpawnFailed: Another actor has spawned it.
            ValueError: They are not connected: no call was made yet from one to the other.
        """
        runtime, target = _of(actor)
        if other is None:
            await _cut(runtime._controller.peer, target.remote)
        else:
            await self._inside(actor, "cut", _of(other)[1].remote)

    async def kill_node(self, name: str) -> None:
        """Kill a node of `daft_cluster`, with its actors.

        Raises:
            ValueError: There is none with this name.
        """
        if name not in self._nodes:
            has = f"it has {', '.join(self._nodes)}" if self._nodes else "mark the test with `daft(nodes=2)`"
            raise ValueError(f"`daft_cluster` has no node {name!r}: {has}")
        os.kill(self._nodes[name], signal.SIGKILL)

    async def _inside(self, actor: object, what: str, *args: object) -> None:
        """By an actor that lives in the process meanwhile."""
        runtime, _ = _of(actor)
        async with runtime.on(with_=actor).spawn(_Inside) as inside:
            await getattr(inside, what)(*args)


class _Inside(Actor):
    @method
    async def delay(self, seconds: float) -> None:
        peer = current_process().part(Peer)
        delay = peer.process.find(_Delay)
        if delay is None:
            delay = _Delay(peer)
            peer.process.provide(_Delay, delay)
        delay.seconds = seconds

    @method
    async def cut(self, remote: str) -> None:
        await _cut(current_process().part(Peer), PeerId(remote))


class _Delay:
    """Hands calls to a process on some time after they have come."""

    def __init__(self, peer: Peer) -> None:
        self.seconds = 0.0
        self._loop = peer.process.loop
        self._held: deque[tuple[Handler, Connection, Message]] = deque()
        handlers = peer.connections.handlers
        for kind in _DELAYED:
            handlers[kind] = self._holding(handlers[kind])

    def _holding(self, handler: Handler) -> Handler:
        def hold(connection: Connection, message: Message) -> None:
            if not self.seconds and not self._held:
                handler(connection, message)
                return
            self._held.append((handler, connection, message))
            self._loop.call_later(self.seconds, self._hand_on)

        return hold

    def _hand_on(self) -> None:
        handler, connection, message = self._held.popleft()
        if connection.lost is None:
            handler(connection, message)


async def _cut(peer: Peer, remote: PeerId) -> None:
    connection = peer.connections.get(remote)
    if connection is None or connection._socket is None:
        raise ValueError(f"{peer.process.id} and {remote} are not connected")
    with socket.socket(fileno=os.dup(connection._socket.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)
    while connection.lost is None:  # noqa: ASYNC110 - the loop is about to read the end of it
        await asyncio.sleep(0)


def _of(actor: object) -> tuple[Runtime, Target]:
    target = cast("Target", target_of(handle_of(actor)))
    return target.caller.process.part(Runtime), target


def _launcher(runtime: Runtime) -> InProcessLauncher | None:
    site = runtime._opened.site
    launcher: Any = site.launcher if isinstance(site, LocalNode) else None
    return launcher if isinstance(launcher, InProcessLauncher) else None


async def _pid_of(runtime: Runtime, target: Target) -> int:
    process = await runtime._controller.nodes.of(target.remote).process_of(target.remote)
    if process is None or process.pid is None:
        raise ActorDied(f"{target.label} has no process any more", executed=False)
    return process.pid
