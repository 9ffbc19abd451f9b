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
from typing import Final

from aiodaft._protocol.node.worker import Ending, Standstill, Verdict
from aiodaft._runtime.logs.console import Console
from aiodaft._runtime.node.worker import (
    Exited,
    Failed,
    Importing,
    Kill,
    NodeOptions,
    Spawn,
    Spawned,
    Unforkable,
    Visited,
    Worker,
    WorkerEnvironment,
    WorkerSettings,
    packed,
    unpacked,
)
from aiodaft._runtime.node.workers import Launcher
from aiodaft._runtime.platform.linux import (
    fresh_python,
    is_stopped,
    kill,
    kill_tree,
    refusal,
    signs_of_life,
)
from aiodaft._runtime.platform.tasks import logger
from aiodaft._runtime.process import Timeouts
from aiodaft.exceptions import SpawnFailed


class ForkServerWatch:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pid: Callable[[], int],
        workers: Callable[[], set[int]],
        on_lost: Callable[[str], object],
        timeouts: Timeouts,
    ) -> None:
        self._loop = loop
        # The pid of the fork server, and those of workers: their activity is not the fork server's.
        self._pid = pid
        self._workers = workers
        self._on_lost = on_lost
        self._timeouts = timeouts
        self._standstill = Standstill()
        self._timer: asyncio.TimerHandle | None = None
        self._reported = False
        # The module that it imports, as it has reported.
        self.importing = ""
        # Why it was given up; None again when it answers.
        self.problem: str | None = None

    def expect(self) -> None:
        if self._timer is None and self.problem is None:
            self._standstill = Standstill()
            self._timer = self._loop.call_later(self._timeouts.fork_server_look, self._look)

    def heard(self, *, more: bool) -> None:
        if self._reported:
            logger.warning("the fork server (pid %d) answers again", self._pid())
        self.close()
        self._reported, self.problem = False, None
        if more:
            self.expect()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        verdict = self._standstill.look(signs_of_life(self._pid(), self._workers()))
        if verdict is Verdict.GIVE_UP:
            self.problem = self._describe()
            self._on_lost(self.problem)
            return
        if verdict is Verdict.REPORT:
            self._reported = True
            logger.warning("actors wait for their processes: %s", self._describe())
        self._timer = self._loop.call_later(self._timeouts.fork_server_look, self._look)

    def _describe(self) -> str:
        pid, seconds = self._pid(), self._standstill.looks * self._timeouts.fork_server_look
        server = f"the fork server (pid {pid}), which starts actors, has not answered for {seconds:.0f} s"
        if is_stopped(pid):
            return f"{server}: it is stopped (SIGSTOP); continue it with `kill -CONT {pid}`"
        if self.importing:
            return (
                f"{server}: it imports {self.importing}; `py-spy dump --pid {pid}` shows where it is, and "
                "Runtime(preload=...) says which modules it imports for all actors"
            )
        return f"{server}; `py-spy dump --pid {pid}` shows where it is"


# Modules that the fork server imports for all workers if this process has them: slow to import, safe to fork.
_PRELOADED: Final = ("numpy", "torch")
_UNFORKABLE: Final = (
    "the import of %s initialises CUDA, which forked processes cannot use then: each actor starts a new interpreter, "
    "which takes longer. Do not name the module in Runtime(preload=...), or have it use CUDA after its import"
)


class WorkerLauncher(Launcher):
    def __init__(
        self, loop: asyncio.AbstractEventLoop, options: NodeOptions, timeouts: Timeouts, console: Console
    ) -> None:
        super().__init__(loop, timeouts, console)
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lost: str | None = None
        self._watch = ForkServerWatch(loop, self._server_pid, self._worker_pids, self._give_up, timeouts)
        # Whether the fork server has carried out an order, so that its first imports are done.
        self._heard = False
        self._sending = asyncio.Lock()
        self._environment: dict[str, str] = {}
        self._writable = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def spawn(
        self, settings: WorkerSettings, inherited: WorkerEnvironment, environment: dict[str, str], label: str
    ) -> tuple[Worker, socket.socket]:
        python = inherited.interpreter(settings.options.node)
        if self._process is None and self._lost is None:
            self._start()
        self._check_server()
        with ExitStack() as opened:
            worker, ours, theirs = self._open_worker(settings.options, label, opened)
            changes = inherited.changes(self._environment)
            where = inherited.directory, inherited.path, list(inherited.code)
            modules = [] if python else self._modules()
            order = Spawn(worker.id, *where, changes, modules, environment, settings.packed(), python)
            try:
                await self._send(packed(order), theirs)
            except BaseException:
                if not self._is_awaited():
                    self._watch.close()
                worker.heartbeat.close()
                ours.close()
                raise
        self.workers[worker.id] = worker
        return worker, ours

    def kill(self, worker: Worker, number: int = signal.SIGKILL) -> None:
        if self._socket is not None and not worker.ended.done():
            # The fork server kills it: only the parent knows that the pid still belongs to the worker.
            with suppress(OSError):
                self._socket.send(packed(Kill(worker.id, int(number))))

    async def end(self, worker: Worker) -> None:
        """Kill a worker and wait until it has ended, even if the fork server is stopped or imports a module."""
        self.kill(worker)
        # If the fork server has carried out no order, no worker has started.
        if not await self.wait_end(worker, self._timeouts.kill if self._heard else 0.0):
            # The fork server has not reaped it, so the pid still belongs to it.
            kill(worker.pid, signal.SIGKILL)
            self._forget(worker, Ending(None, "SIGKILL"))

    async def aclose(self) -> None:
        self._drop_socket("it was closed")
        if self._process is not None:
            self._hasten(self._process)
            await self._wait_end(self._process)
            self._process = None
        self._output.close()
        for worker in self.workers.values():
            worker.ended.cancel()
            worker.started.cancel()

    def abandon(self) -> None:
        self._leave()
        if self._process is not None:
            self._hasten(self._process)
            _end(self._process, self._timeouts.fork_server_end)
            self._process = None
        self._output.close()

    def _hasten(self, process: subprocess.Popen[bytes]) -> None:
        """Make a fork server end that is stopped, or busy with a long import.

        It ends when its socket is closed, after its last worker. One that has not reported any start is killed: a
        worker that it has just started ends with it.
        """
        if self._heard:
            kill(self._server_pid(), signal.SIGCONT)
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

    def stay_behind(self) -> None:
        self._leave()
        if self._process is not None:
            # Only the parent can wait for it.
            self._process.returncode = 0

    def _leave(self) -> None:
        """Close this process's ends of all sockets; needs no running loop."""
        self._watch.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        for worker in self.workers.values():
            worker.heartbeat.close()

    def _drop_socket(self, why: str) -> None:
        self._lost = why
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
        self._leave()
        self._writable.set()

    def _start(self) -> None:
        """Start the fork server, in the loop's thread (1 or 2 ms): it ends with the thread that starts it."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise SpawnFailed(refusal(error, "the fork server cannot be started")) from error
        with theirs:
            numbers = theirs.fileno(), os.getpid(), threading.get_native_id(), int(self._options.fork)
            self._environment = dict(os.environ)
            try:
                self._process = subprocess.Popen(
                    fresh_python("aiodaft._runtime.node.forkserver", *numbers),
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
        # The descriptor, not the socket: uvloop would keep that open in forked children.
        self._loop.add_reader(ours.fileno(), self._readable)

    def _modules(self) -> list[str]:
        if self._options.preload is not None:
            return list(self._options.preload)
        return [name for name in _PRELOADED if name in sys.modules]

    async def _send(self, message: bytes, fds: list[int]) -> None:
        # One at a time, because the loop has one writer per descriptor.
        async with self._sending:
            self._watch.expect()
            while True:
                self._check_server()
                assert self._socket is not None
                try:
                    socket.send_fds(self._socket, [message], fds)
                except BlockingIOError:
                    await self._room(self._socket.fileno())
                except OSError as error:
                    why = f"the fork server is gone: {error}"
                    if error.errno == errno.EMSGSIZE:
                        what = f"{len(message):,} bytes (sys.path, the environment) are too many"
                        why = f"the order for a worker is too long for the fork server: {what}"
                    raise SpawnFailed(why) from error
                else:
                    return

    async def _room(self, fd: int) -> None:
        """Wait until the fork server has read an order, is given up, or is gone."""
        self._writable.clear()
        self._loop.add_writer(fd, self._writable.set)
        try:
            await self._writable.wait()
        finally:
            if self._socket is not None:
                self._loop.remove_writer(fd)

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
        message = unpacked(data)
        self._watch.importing = message.module if isinstance(message, Importing) else ""
        self._heard = self._heard or not isinstance(message, Importing | Unforkable)
        if isinstance(message, Visited):
            self.on_visit(message.pid)
        elif isinstance(message, Unforkable):
            logger.warning(_UNFORKABLE, message.module)
        elif isinstance(message, Spawned | Failed | Exited) and (worker := self.workers.get(message.worker)):
            self._reported(worker, message)
        self._watch.heard(more=self._is_awaited())

    def _reported(self, worker: Worker, report: Spawned | Failed | Exited) -> None:
        match report:
            case Spawned(_, pid):
                worker.pid = pid
                if not worker.started.done():
                    worker.started.set_result(None)
            case Failed(_, why):
                del self.workers[worker.id]
                worker.fail(SpawnFailed(f"the worker did not start:\n{why}"))
            case Exited(_, exit_code, by):
                self._forget(worker, Ending(exit_code, by))

    def _server_pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _worker_pids(self) -> set[int]:
        return {worker.pid for worker in self.workers.values() if worker.pid}

    def _is_awaited(self) -> bool:
        return self._sending.locked() or any(not worker.started.done() for worker in self.workers.values())

    def _check_server(self) -> None:
        if self._lost is not None:
            raise SpawnFailed(f"the fork server is gone: {self._lost}")
        if self._watch.problem is not None:
            raise SpawnFailed(self._watch.problem)

    def _give_up(self, problem: str) -> None:
        """Fail the spawns that wait for a stuck fork server. Workers that it starts later end by themselves."""
        logger.error("%s", problem)
        for worker in self.workers.values():
            if not worker.started.done():
                worker.fail(SpawnFailed(problem))
        self._writable.set()

    def _server_lost(self, why: str) -> None:
        self._drop_socket(why)
        for worker in list(self.workers.values()):
            worker.fail(SpawnFailed(f"the fork server is gone: {why}"))
            self._forget(worker, Ending(None, "SIGKILL"))
        self.on_server_lost(why)


def _end(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        process.wait()
