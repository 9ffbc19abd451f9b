"""The workers of a node, however they are started: their ends, reports of these, their connections, and the drain."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Final, NamedTuple

from aiodaft._protocol.ids import FIRST_USER_ACTOR, PeerId, can_share_memory, is_worker, node_of
from aiodaft._protocol.node.resources import Resources
from aiodaft._protocol.node.worker import (
    Activity,
    Drain,
    DrainState,
    Ending,
    OomKills,
    WorkerState,
    condition,
    describe,
    how_it_ended,
    oom_counters,
    oom_kills,
)
from aiodaft._runtime.calls.call import CallState, PendingCall
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.logs.console import Console, Relay
from aiodaft._runtime.logs.options import Source
from aiodaft._runtime.logs.worker_output import OutputReader
from aiodaft._runtime.node.worker import (
    HeartbeatWatch,
    NodeOptions,
    Spawn,
    Tenant,
    Worker,
    WorkerEnvironment,
    WorkerSettings,
    start_fresh,
)
from aiodaft._runtime.peer import Addresses
from aiodaft._runtime.platform.capabilities import message_pair
from aiodaft._runtime.platform.linux import (
    UNKNOWN,
    describe_exit,
    exhausted,
    is_stopped,
    kill_group,
    refusal,
    status_of,
)
from aiodaft._runtime.platform.tasks import logger
from aiodaft._runtime.process import Process, ProcessOptions, Timeouts
from aiodaft.exceptions import ActorDied, DaftError, OutcomeUnknown, PeerLost, SpawnFailed
from aiodaft_transport.system import start_thread

_REPORT_TIME: Final = 0.1


class Launcher(ABC):
    def __init__(self, loop: asyncio.AbstractEventLoop, timeouts: Timeouts, console: Console) -> None:
        self._loop = loop
        self._timeouts = timeouts
        self._output = OutputReader(console)
        self.workers: dict[PeerId, Worker] = {}
        self.on_ended: Callable[[Worker, Ending], object] = lambda worker, ending: None
        # Called with the reason when there is no fork server any more, and so never a worker again.
        self.on_server_lost: Callable[[str], object] = lambda why: None
        # Takes output to the program on another machine that shows it; None if this process does.
        self.relay_to: Callable[[PeerId], Relay | None] = lambda program: None
        self.on_visit: Callable[[int], object] = lambda pid: None

    @abstractmethod
    async def spawn(
        self, settings: WorkerSettings, inherited: WorkerEnvironment, environment: dict[str, str], label: str
    ) -> tuple[Worker, socket.socket]:
        """Start a worker.

        Returns:
            The worker, and this process's end of the socket to it. Once its `started` is done, it has a pid.

        Raises:
            SpawnFailed: The worker cannot be started, or there are no descriptors for it. `started` raises it, too.
        """

    @abstractmethod
    def kill(self, worker: Worker, number: int = signal.SIGKILL) -> None: ...

    @abstractmethod
    async def end(self, worker: Worker) -> None: ...

    @abstractmethod
    async def aclose(self) -> None: ...

    @abstractmethod
    def abandon(self) -> None: ...

    @abstractmethod
    def stay_behind(self) -> None: ...

    def _open_worker(
        self, options: ProcessOptions, label: str, opened: ExitStack
    ) -> tuple[Worker, socket.socket, list[int]]:
        """A worker, this end of the socket to it, and the worker's descriptors, which `opened` closes."""
        owner = options.owner if is_worker(options.owner) else ""
        source, relay = Source(options.id, label, node=options.node, owner=owner), self.relay_to(options.program)
        try:
            output, *ends = self._output.open(source, relay)
            for end in ends:
                opened.callback(os.close, end)
            ours, theirs = socket.socketpair()
            opened.enter_context(theirs)
            try:
                watched, answering = message_pair()
            except OSError:
                ours.close()
                raise
            opened.enter_context(answering)
        except OSError as error:
            raise SpawnFailed(refusal(error, f"{label} cannot be started")) from error
        worker = Worker(options.id, label, output, HeartbeatWatch(watched, self._loop, is_stopped))
        worker.relay = relay
        return worker, ours, [theirs.fileno(), *ends, answering.fileno()]

    async def wait_end(self, worker: Worker, seconds: float) -> bool:
        """Wait for the end of a worker; False if it has not ended after `seconds`.

        If nothing reports the end, because a fork server is stopped or busy, this asks the kernel.
        """
        for patience in (min(_REPORT_TIME, seconds), max(0.0, seconds - _REPORT_TIME)):
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await asyncio.shield(worker.ended)
                return True
            status = status_of(worker.pid) if worker.pid else None
            if status not in {None, UNKNOWN}:
                break
        if status is None:
            return False
        self._forget(worker, Ending(*status))
        return True

    def _forget(self, worker: Worker, ending: Ending) -> None:
        if self.workers.pop(worker.id, None) is not None:
            worker.heartbeat.close()
            # The owner of its actors hears of it before callers, which then find them being restarted.
            self.on_ended(worker, ending)
            worker.ended.set_result(ending)


def activity(worker: Worker, connection: Connection) -> Activity:
    """The oldest call from this process to the worker, or else the one that its last heartbeat names."""
    last = worker.heartbeat.last()
    called = next((state.label for state in connection.session.under_way() if is_of_a_user(state)), last.last_method)
    return Activity(called, last.last_method_for if called and called == last.last_method else None)


def is_of_a_user(state: PendingCall) -> bool:
    # The call that makes an actor goes to the agent, and is labelled with the class alone.
    return not isinstance(state, CallState) or state.target.actor >= FIRST_USER_ACTOR or "." not in state.label


def died(worker: Worker, ending: Ending, doing: Activity, *, oom: bool) -> ActorDied:
    wanted = worker.state is WorkerState.STOPPING
    how = f"was stopped: {worker.stop_reason}" if wanted else how_it_ended(ending.exit_code, ending.signal, oom=oom)
    error = ActorDied(f"{worker} {how}" + (f"; {doing}" if doing.method and not wanted else ""))
    error.actor = worker.names
    if not wanted:
        error.exit_code, error.signal, error.oom = ending.exit_code, ending.signal, oom
        _add_evidence(error, worker, doing)
    return error


def silence(worker: Worker, doing: Activity) -> str:
    heartbeat = worker.heartbeat
    warning = f"{worker} has not answered for {heartbeat.last().silent_for:.1f} s: {condition_of(worker.pid)}; {doing}"
    if heartbeat.liveness.patience.give_up is not None or heartbeat.is_stopped(worker.pid):
        return warning
    return f"{warning}. Its calls wait for it; Patience(give_up=seconds) kills such a process after that time"


def given_up(worker: Worker, doing: Activity) -> PeerLost:
    heartbeat = worker.heartbeat
    error = PeerLost(
        f"{worker} has not answered for {heartbeat.last().silent_for:.1f} s and was killed, as "
        f"Patience({heartbeat.liveness.limit}) demands: {condition_of(worker.pid)}; {doing}"
    )
    _add_evidence(error, worker, doing)
    return error


def _add_evidence(error: OutcomeUnknown, worker: Worker, doing: Activity) -> None:
    error.actor = worker.names
    error.last_method, error.last_method_for = doing.method, doing.seconds
    error.last_lines = worker.output.last_lines
    if error.last_lines:
        error.add_note("its last lines on standard error:\n" + "\n".join(f"  {line}" for line in error.last_lines))


def condition_of(pid: int) -> str:
    states: set[str] = set()
    threads = f"/proc/{pid}/task"
    with suppress(OSError):
        for thread in os.listdir(threads):
            # The name in brackets may contain any character. The thread may have ended.
            states.update(_read(f"{threads}/{thread}/stat").rpartition(")")[2].split()[:1])
    return condition(states)


def watch_oom_kills(kills: OomKills, pid: int) -> str | None:
    counter = next((path for path in oom_counters(_read(f"/proc/{pid}/cgroup")) if os.path.exists(path)), None)
    if counter is not None:
        kills.watch(counter, oom_kills(_read(counter)))
    return counter


def was_oom_kill(kills: OomKills, counter: str | None) -> bool:
    return counter is not None and kills.take(counter, oom_kills(_read(counter)))


def _read(path: str) -> str:
    """The content of a file of the kernel; "" if it is gone, as with the last process of a control group."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def report_stall(worker: Worker, culprit: str, line: str, seconds: float) -> None:
    logger.warning(
        "%s (pid %d) has kept the event loop of its process from turning for %.1f s: %s. Other calls, streams and "
        "cancellations wait for it. Make it a `def` method, which runs on a thread, or await asyncio.to_thread(...)",
        culprit or f"a task or callback of {worker.names}",
        worker.pid,
        seconds,
        line,
    )


# The launcher where the system has no fork server: it starts each worker by exec, and waits for it in a thread.
#
# A worker ends with its launcher, by a pipe that ends with this process, and takes along its process group.

# Seconds that workers have to end by themselves when the node closes.
_LAST_GRACE: Final = 0.3


class _Child(NamedTuple):
    process: subprocess.Popen[bytes]
    waiter: threading.Thread


class ExecLauncher(Launcher):
    def __init__(
        self, loop: asyncio.AbstractEventLoop, options: NodeOptions, timeouts: Timeouts, console: Console
    ) -> None:
        """Each process imports its modules itself; `preload` has no effect.

        Raises:
            SpawnFailed: `fork=True` needs a fork server.
        """
        if options.fork:
            raise SpawnFailed("fork=True needs a fork server, which this system does not have: leave it out")
        super().__init__(loop, timeouts, console)
        self._children: dict[PeerId, _Child] = {}
        self._lifeline: tuple[int, int] | None = None
        self._closed = False

    async def spawn(
        self, settings: WorkerSettings, inherited: WorkerEnvironment, environment: dict[str, str], label: str
    ) -> tuple[Worker, socket.socket]:
        if self._closed:
            raise SpawnFailed("the launcher is closed")
        python = inherited.interpreter(settings.options.node)
        with ExitStack() as opened:
            worker, ours, theirs = self._open_worker(settings.options, label, opened)
            where = inherited.directory, inherited.path, list(inherited.code)
            order = Spawn(worker.id, *where, {}, [], environment, settings.packed(), python)
            try:
                process = start_fresh(order, inherited.environment, theirs, self._pipe()[0])
                try:
                    waiter = start_thread(self._wait, worker, process, name="aiodaft waitpid")
                except OSError:
                    process.kill()
                    process.wait()
                    raise
            except OSError as error:
                worker.heartbeat.close()
                ours.close()
                raise SpawnFailed(_refusal(error, order.directory, label)) from error
        worker.pid = process.pid
        worker.started.set_result(None)
        self.workers[worker.id] = worker
        self._children[worker.id] = _Child(process, waiter)
        return worker, ours

    def kill(self, worker: Worker, number: int = signal.SIGKILL) -> None:
        child = self._children.get(worker.id)
        if child is not None and not worker.ended.done():
            child.process.send_signal(number)

    async def end(self, worker: Worker) -> None:
        self.kill(worker)
        if not await self.wait_end(worker, self._timeouts.kill):
            self._forget(worker, Ending(None, "SIGKILL"))

    async def aclose(self) -> None:
        self._drop()
        children, ends = list(self._children.values()), [worker.ended for worker in self.workers.values()]
        if ends:
            await asyncio.wait(ends, timeout=_LAST_GRACE)
            for child in children:
                child.process.kill()
            await asyncio.wait(ends, timeout=self._timeouts.fork_server_end)
        for child in children:
            if child.process.returncode is not None:
                child.waiter.join()
        self._output.close()
        for worker in self.workers.values():
            worker.ended.cancel()
        self.workers.clear()

    def abandon(self) -> None:
        self._drop()
        for child in self._children.values():
            child.process.kill()
            child.waiter.join()
        self._output.close()

    def stay_behind(self) -> None:
        self._drop()
        for child in self._children.values():
            child.process.returncode = 0

    def _drop(self) -> None:
        """Let go of the workers, which end with that unless a parent has them as well."""
        self._closed = True
        for worker in self.workers.values():
            worker.heartbeat.close()
        for end in self._lifeline or ():
            os.close(end)
        self._lifeline = None

    def _pipe(self) -> tuple[int, int]:
        if self._lifeline is None:
            self._lifeline = os.pipe()
        return self._lifeline

    def _wait(self, worker: Worker, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        kill_group(process.pid)
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(partial(self._ended, worker, Ending(*describe_exit(code))))

    def _ended(self, worker: Worker, ending: Ending) -> None:
        self._children.pop(worker.id, None)
        self._forget(worker, ending)


def _refusal(error: OSError, directory: str, label: str) -> str:
    if error.filename == directory:
        return f"the working directory that the controller had when it spawned the actor cannot be entered: {error}"
    return refusal(error, f"{label} cannot be started")


class Draining:
    """Drains one node.

    Args:
        restartable: Its actors that may be restarted, also those without a process.
        tell: Tells an owner that the node is being drained, and how many seconds its actors have.
    """

    def __init__(
        self,
        process: Process,
        resources: Resources[Tenant],
        workers: Mapping[PeerId, Worker],
        restartable: Iterable[Tenant],
        end: Callable[[Worker, str], Awaitable[object]],
        tell: Callable[[PeerId, float], object],
    ) -> None:
        self._process = process
        self._clock = process.env.monotonic
        self._resources = resources
        self._workers = workers
        self._restartable = restartable
        self._end = end
        self._tell = tell
        self._drain = Drain()
        self._changed = asyncio.Event()
        self.over = asyncio.Event()
        # Waits until the values of a process are not needed any more. Raises DaftError if it ends.
        self.unneeded: Callable[[PeerId], Awaitable[object]]
        self.on_over: Callable[[], object] = lambda: None

    @property
    def begun(self) -> bool:
        return self._drain.begun

    @property
    def _name(self) -> str:
        return node_of(self._process.id)

    def begin(self, grace: float) -> None:
        first = not self.begun
        self._drain.begin(grace, self._clock())
        self.note()
        if first:
            logger.info("node %s is being drained, within %g s", self._name, grace)
            self._resources.refusal = f"node {self._name!r} is being drained"
            self._process.tasks.create_task(self._run(), name="drain the node")
        for owner in {worker.owner for worker in self._workers.values()} | {one.owner for one in self._restartable}:
            self._tell(owner, grace)

    def note(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def left(self) -> tuple[str, ...]:
        return tuple(
            describe(list(worker.actors.values()), worker.names, worker.pid, worker.owner)
            for worker in self._workers.values()
        )

    async def wait_other(self, known: Iterable[str]) -> tuple[str, ...]:
        seen = tuple(known)
        while (left := self.left()) == seen:
            await self._changed.wait()
        return left

    async def wait_unneeded(self, worker: PeerId) -> None:
        with suppress(TimeoutError, DaftError):
            async with asyncio.timeout(self._drain.left(self._clock())):
                await self.unneeded(worker)

    async def _run(self) -> None:
        while (state := self._drain.step(len(self._workers), self._clock())) is not DrainState.OVER:
            changed = self._changed
            if state is DrainState.EVICTING:
                await asyncio.gather(*(self._evict(worker) for worker in list(self._workers.values())))
                # Its owners and callers ask why, before the node is gone.
                await asyncio.sleep(2 * self._process.env.timeouts.blame)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(self._drain.left(self._clock())):
                    await changed.wait()
        logger.info("node %s is drained", self._name)
        self.over.set()
        # Callers that wait for that have their answer first.
        await asyncio.sleep(self._process.env.timeouts.blame)
        self.on_over()

    async def _evict(self, worker: Worker) -> None:
        reason = f"its node {self._name!r} was drained, and the grace was over"
        if worker.state is not WorkerState.STOPPING:
            worker.given_up = ActorDied(f"{worker} was ended: {reason}")
            worker.given_up.actor = worker.names
        await self._end(worker, reason)


class Introductions:
    def __init__(
        self,
        here: PeerId,
        connections: Connections,
        nodes: Addresses,
        workers: Container[PeerId],
        why_ended: Callable[[PeerId], DaftError],
    ) -> None:
        self._here = here
        self._connections = connections
        self._nodes = nodes
        self._workers = workers
        self._why_ended = why_ended
        self._connected: Counter[frozenset[PeerId]] = Counter()

    def introduce(self, first: PeerId, second: PeerId, known: int) -> str:
        """Connect the first process with the second; `known`: the introductions of the second that it has got.

        Returns:
            The address to connect to; "" if a socket comes instead, because both processes are on this machine.

        Raises:
            ActorDied: The second process is gone.
            ResourceExhausted: There is no descriptor for the connection.
        """
        if node_of(second) != node_of(self._here):
            return self._nodes.address_of(second)
        if not (second in self._workers or self.is_attached(second)):
            raise self._why_ended(second)
        if self.is_attached(first) or self.is_attached(second):
            return self._nodes.address_of(second)
        pair = frozenset((first, second))
        # Both processes may ask at the same time: they get one connection, and another one when they have lost it.
        if known >= self._connected[pair]:
            try:
                self._connections.to(first).introduce(self._connections.to(second))
            except OSError as error:
                raise exhausted(error, f"{first} and {second} cannot be connected") from error
            self._connected[pair] += 1
        return ""

    def is_attached(self, peer: PeerId) -> bool:
        connection = self._connections.get(peer)
        return connection is not None and connection.far and connection.lost is None

    def open_stream(self, first: PeerId, second: PeerId, number: int) -> str:
        """Give the first process, under a number, and the second one the ends of a stream for payload.

        Returns:
            The address to connect to; "" if a socket comes instead, because both processes are on this machine.

        Raises:
            ActorDied: The second process is gone.
            ResourceExhausted: There is no descriptor for it.
        """
        if not can_share_memory(first, second) or not can_share_memory(second, self._here):
            return self._nodes.address_of(second)
        if second not in self._workers and second != self._here:
            raise self._why_ended(second)
        try:
            self._connections.join_by_stream(first, second, number)
        except OSError as error:
            raise exhausted(error, f"there is no stream from {first} to {second}") from error
        return ""

    def forget(self, peer: PeerId) -> None:
        for pair in [pair for pair in self._connected if peer in pair]:
            del self._connected[pair]
