"""The launcher: starts the fork server, has it start and kill workers, and reports their ends."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, Final, NamedTuple

from aiodaft._protocol.codec import pack, unpack
from aiodaft._runtime.node import orders as order
from aiodaft._runtime.node.environment import WorkerEnvironment
from aiodaft._runtime.node.forkserver_watch import ForkServerWatch
from aiodaft._runtime.node.heartbeat import HeartbeatWatch
from aiodaft._runtime.node.worker_logs import LogPump, WorkerOutput
from aiodaft._runtime.platform.env import Timeouts
from aiodaft._runtime.platform.exhaustion import refusal
from aiodaft._runtime.platform.linux import (
    UNKNOWN,
    fresh_python,
    is_stopped,
    kill,
    kill_tree,
    process_tree,
    status_of,
)
from aiodaft._runtime.platform.tasks import TaskOwner, logger
from aiodaft.exceptions import SpawnFailed

# Modules that the fork server imports for all workers if this process has them: slow to import, safe to fork.
_PRELOADED: Final = ("numpy", "torch")

# Seconds that the fork server usually needs to report an end.
_REPORT_TIME: Final = 0.1


class Ending(NamedTuple):
    """How a worker ended; exit code and signal are None if unknown."""

    pid: int
    exit_code: int | None
    signal: str | None


class ChildProcess:
    """One worker process."""

    def __init__(
        self, number: int, output: WorkerOutput, heartbeat: HeartbeatWatch, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.number = number
        self.output = output
        self.heartbeat = heartbeat
        # 0 until it has started.
        self.pid = 0
        self.started: asyncio.Future[int] = loop.create_future()
        self.ended: asyncio.Future[Ending] = loop.create_future()

    def fail(self, error: SpawnFailed) -> None:
        """Fail `started`: the worker did not start."""
        self.heartbeat.close()
        if not self.started.done():
            self.started.set_exception(error)
            # asyncio logs errors that no task retrieves.
            self.started.exception()


class WorkerLauncher:
    """Starts and ends the workers of this node."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        fork: bool,
        preload: tuple[str, ...] | None,
        prefix: tuple[str, ...] = (),
        timeouts: Timeouts,
    ) -> None:
        self._loop = loop
        # The command that isolates the fork server; see pid_namespace.py.
        self._prefix = prefix
        self._fork = fork
        self._preload = preload
        self._timeouts = timeouts
        self._logs = LogPump()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._tasks = TaskOwner("aiodaft launcher")
        self._starting: asyncio.Task[None] | None = None
        self._children: dict[int, ChildProcess] = {}
        self._last_number = 0
        self._lost: str | None = None
        self._watch = ForkServerWatch(loop, self._server_pid, self._worker_pids, self._give_up, timeouts)
        # Whether the fork server has carried out an order, so that its first imports are done.
        self._heard = False
        self._sending = asyncio.Lock()
        # The environment of the fork server.
        self._environment: dict[str, str] = {}
        self._writable = asyncio.Event()
        self.on_ended: Callable[[ChildProcess, Ending], object] = lambda child, ending: None
        # Called when `aiodaft stack` asks for the stacks, with the pid of the fork server outside its PID namespace.
        self.on_stack_request: Callable[[int], object] = lambda pid: None

    @property
    def pid(self) -> int | None:
        """The pid of the fork server, once it has started."""
        return None if self._process is None else self._process.pid

    async def spawn(
        self, settings: bytes, worker_environment: WorkerEnvironment, environment: dict[str, str], name: str
    ) -> tuple[ChildProcess, socket.socket]:
        """Start a worker.

        Args:
            settings: Its settings, packed.
            worker_environment: The environment that it inherits from the controller.
            environment: Variables for this worker alone.
            name: Its name in the log.

        Returns:
            The worker, and this process's end of the socket to it. Its `started` gives the pid.

        Raises:
            SpawnFailed: The fork server cannot be started, does not answer, or is gone, or there are no descriptors
                for the worker. `started` raises it, too.
        """
        await self._ensure_started()
        self._check_server()
        if self._lost is not None or self._socket is None:
            raise SpawnFailed(f"the fork server is gone: {self._lost}")
        self._last_number += 1
        with ExitStack() as opened:
            child, ours, theirs = self._open_child(name, opened)
            self._children[child.number] = child
            self._watch.expect()
            changes = worker_environment.changes(self._environment)
            common = [worker_environment.directory, worker_environment.path, changes]
            message = pack([order.SPAWN, child.number, *common, self._modules(), environment, settings])
            try:
                await self._send(message, theirs)
            except BaseException as error:
                self._children.pop(child.number, None)
                if not self._is_awaited():
                    self._watch.close()
                child.heartbeat.close()
                ours.close()
                if isinstance(error, OSError):
                    raise SpawnFailed(f"the fork server is gone: {error}") from error
                raise
        return child, ours

    def _open_child(self, name: str, opened: ExitStack) -> tuple[ChildProcess, socket.socket, list[int]]:
        """A worker, this end of the socket to it, and the worker's descriptors, which `opened` closes."""
        try:
            output, *ends = self._logs.open()
            for end in ends:
                opened.callback(os.close, end)
            ours, theirs = socket.socketpair()
            opened.enter_context(theirs)
            try:
                watched, answering = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            except OSError:
                ours.close()
                raise
            opened.enter_context(answering)
        except OSError as error:
            raise SpawnFailed(refusal(error, f"{name} cannot be started")) from error
        output.name = name
        child = ChildProcess(self._last_number, output, HeartbeatWatch(watched, self._loop, is_stopped), self._loop)
        return child, ours, [theirs.fileno(), *ends, answering.fileno()]

    def __contains__(self, number: int) -> bool:
        return number in self._children

    def kill(self, child: ChildProcess, number: int = signal.SIGKILL) -> None:
        """Send a signal to a worker that has not ended."""
        if self._socket is not None and not child.ended.done():
            # The fork server kills it: only the parent knows that the pid still belongs to the worker.
            with suppress(OSError):
                self._socket.send(pack([order.KILL, child.number, int(number)]))

    async def end(self, child: ChildProcess) -> None:
        """Kill a worker and wait until it has ended, even if the fork server is stopped or imports a module."""
        self.kill(child)
        # If the fork server has carried out no order, no worker has started.
        if not await self.wait_end(child, self._timeouts.kill if self._heard else 0.0):
            if child.pid:
                # The fork server has not reaped it, so the pid still belongs to it.
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
            self._forget(child, Ending(child.pid, None, "SIGKILL"))

    async def wait_end(self, child: ChildProcess, seconds: float) -> bool:
        """Wait for the end of a worker; False if it has not ended after `seconds`.

        A stopped or busy fork server does not report the end: then this asks the kernel.
        """
        for patience in (min(_REPORT_TIME, seconds), max(0.0, seconds - _REPORT_TIME)):
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await asyncio.shield(child.ended)
                return True
            status = status_of(child.pid) if child.pid else None
            if status not in {None, UNKNOWN}:
                break
        if status is None:
            return False
        self._forget(child, Ending(child.pid, *status))
        return True

    def _forget(self, child: ChildProcess, ending: Ending) -> None:
        """Note the end of a worker, and ignore later reports of it."""
        self._children.pop(child.number, None)
        child.heartbeat.close()
        if not child.ended.done():
            child.ended.set_result(ending)
        self.on_ended(child, ending)

    async def aclose(self) -> None:
        """End the fork server and the remaining workers, and wait until they are gone."""
        if self._socket is not None:
            self._drop_socket()
        await self._tasks.aclose()
        process, self._process = self._process, None
        if process is not None:
            # It ends when its socket is closed, after its last worker.
            self._hasten(process)
            await self._wait_end(process)
        for child in self._children.values():
            child.heartbeat.close()
            child.ended.cancel()
            child.started.cancel()
        self._logs.close()

    def _hasten(self, process: subprocess.Popen[bytes]) -> None:
        """Make a fork server end that is stopped, or busy with a long import.

        A fork server that has not reported any start is killed. A worker that it has just started ends with it.
        """
        if self._heard:
            kill(self._server_pid(process), signal.SIGCONT)
        else:
            process.kill()

    async def _wait_end(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is not None:
            return
        try:
            fd = os.pidfd_open(process.pid)
        except (AttributeError, OSError):
            # The system has no pidfd, or no descriptor left.
            await asyncio.to_thread(_end, process, self._timeouts.fork_server_end)
            return
        # Not in a thread, which the executor of the user's loop would keep.
        ended = asyncio.Event()
        self._loop.add_reader(fd, ended.set)
        try:
            async with asyncio.timeout(self._timeouts.fork_server_end):
                await ended.wait()
        except TimeoutError:
            kill_tree(process.pid)
            await ended.wait()
        finally:
            self._loop.remove_reader(fd)
            os.close(fd)
        process.wait()

    def leave(self) -> None:
        """Close this process's ends of all sockets; needs no running loop."""
        self._watch.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        for child in self._children.values():
            child.heartbeat.close()

    def stay_behind(self) -> None:
        """In a forked child: leave the fork server to the parent."""
        self.leave()
        if self._process is not None:
            # Only the parent can wait for it.
            self._process.returncode = 0

    def abandon(self) -> None:
        """Like `aclose`, without a running loop."""
        self.leave()
        if self._process is not None:
            self._hasten(self._process)
            _end(self._process, self._timeouts.fork_server_end)
            self._process = None
        self._logs.close()

    async def _ensure_started(self) -> None:
        if self._starting is None or _has_failed(self._starting):
            self._starting = self._tasks.start(self._start(), name="start the fork server")
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise SpawnFailed(refusal(error, "the fork server cannot be started")) from error
        with theirs:
            # An isolated fork server cannot see this process.
            parent = (0, 0) if self._prefix else (os.getpid(), threading.get_native_id())
            command = fresh_python("aiodaft._runtime.node.forkserver", theirs.fileno(), *parent, int(self._fork))
            self._environment = dict(os.environ)
            try:
                # In the loop's thread (1 or 2 ms): the fork server ends with the thread that starts it.
                self._process = subprocess.Popen(  # noqa: ASYNC220 - see above
                    [*self._prefix, *command],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    env=self._environment,
                )
            except OSError as error:
                ours.close()
                raise SpawnFailed(refusal(error, "the fork server cannot be started")) from error
        ours.setblocking(False)
        self._socket = ours
        self._loop.add_reader(ours.fileno(), self._readable)

    def _modules(self) -> list[str]:
        """The modules that the fork server imports for all workers."""
        if self._preload is not None:
            return list(self._preload)
        return [name for name in _PRELOADED if name in sys.modules]

    async def _send(self, message: bytes, fds: list[int]) -> None:
        # One at a time, because the loop has one writer per descriptor.
        async with self._sending:
            while True:
                if self._socket is None:
                    raise BrokenPipeError(self._lost or "it was closed")
                self._check_server()
                try:
                    socket.send_fds(self._socket, [message], fds)
                except BlockingIOError:
                    await self._room()
                except OSError as error:
                    if error.errno == errno.EMSGSIZE:
                        what = f"{len(message):,} bytes (sys.path, the environment) are too many"
                        raise SpawnFailed(f"the order for a worker is too long for the fork server: {what}") from error
                    raise
                else:
                    return

    async def _room(self) -> None:
        """Wait until the fork server has read an order, is given up, or is gone."""
        assert self._socket is not None
        self._writable.clear()
        fd = self._socket.fileno()
        self._loop.add_writer(fd, self._writable.set)
        try:
            await self._writable.wait()
        finally:
            if self._socket is not None:
                self._loop.remove_writer(fd)

    def _drop_socket(self) -> None:
        assert self._socket is not None
        self._watch.close()
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._socket = None
        self._writable.set()

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError as error:
            self._server_lost(str(error))
            return
        if not data:
            self._server_lost("its connection ended")
            return
        kind, number, *rest = unpack(data)
        self._watch.importing = rest[0] if kind == order.IMPORTING else ""
        self._heard = self._heard or kind != order.IMPORTING
        if kind == order.STACK_REQUESTED:
            self.on_stack_request(rest[0])
        child = self._children.get(number)
        if child is not None:
            self._reported(child, kind, rest)
        self._watch.heard(more=self._is_awaited())

    def _reported(self, child: ChildProcess, kind: int, rest: list[Any]) -> None:
        if kind == order.SPAWNED:
            child.pid = rest[0]
            if not child.started.done():
                child.started.set_result(child.pid)
        elif kind == order.FAILED:
            del self._children[child.number]
            child.fail(SpawnFailed(f"the worker did not start:\n{rest[0]}"))
        elif kind == order.EXITED:
            self._forget(child, Ending(*rest))

    # Whether the fork server makes progress.

    def _server_pid(self, process: subprocess.Popen[bytes] | None = None) -> int:
        process = process or self._process
        assert process is not None
        # An isolated fork server is the child of the command that isolates it.
        return process_tree(process.pid)[:2][-1] if self._prefix else process.pid

    def _worker_pids(self) -> set[int]:
        return {child.pid for child in self._children.values() if child.pid}

    def _is_awaited(self) -> bool:
        """Whether the fork server has not yet reported the start of a worker."""
        return any(not child.started.done() for child in self._children.values())

    def _check_server(self) -> None:
        if self._watch.problem is not None:
            raise SpawnFailed(self._watch.problem)

    def _give_up(self, problem: str) -> None:
        """Fail the spawns that wait for a stuck fork server. Workers that it starts later end by themselves."""
        logger.error("%s", problem)
        for child in self._children.values():
            if not child.started.done():
                child.fail(SpawnFailed(problem))
        self._writable.set()

    def _server_lost(self, why: str) -> None:
        self._lost = why
        if self._socket is not None:
            self._drop_socket()
        # The workers die with it.
        for child in list(self._children.values()):
            child.fail(SpawnFailed(f"the fork server is gone: {why}"))
            self._forget(child, Ending(0, None, "SIGKILL"))


def _has_failed(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None


def _end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for the fork server; kill it, after its descendants, if it is stuck."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        process.wait()
