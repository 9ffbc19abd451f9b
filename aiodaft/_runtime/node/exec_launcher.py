"""The launcher where the system has no fork server: it starts each worker by exec, and waits for it in a thread.

A worker ends with its launcher, by a pipe that ends with this process, and takes along its process group.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
from contextlib import ExitStack, suppress
from functools import partial
from typing import Final, NamedTuple

from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.node.worker import Ending
from aiodaft._runtime.logs.console import Console
from aiodaft._runtime.node.environment import Spawn, WorkerEnvironment, WorkerSettings, start_fresh
from aiodaft._runtime.node.worker import NodeOptions, Worker
from aiodaft._runtime.node.workers import Launcher
from aiodaft._runtime.platform.env import Timeouts
from aiodaft._runtime.platform.linux import describe_exit, kill_group, refusal
from aiodaft.exceptions import SpawnFailed
from aiodaft_transport.system import start_thread

# Seconds that workers have to end by themselves when the node closes.
_LAST_GRACE: Final = 0.3


class _Child(NamedTuple):
    """A worker's process, and the thread that waits for it."""

    process: subprocess.Popen[bytes]
    waiter: threading.Thread


class ExecLauncher(Launcher):
    def __init__(
        self, loop: asyncio.AbstractEventLoop, options: NodeOptions, timeouts: Timeouts, console: Console
    ) -> None:
        """Each process imports its modules itself; `preload` has no effect.

        Raises:
            SpawnFailed: An option needs a fork server.
        """
        for asked, option in ((options.fork, "fork=True"), (options.isolation, "isolation")):
            if asked:
                raise SpawnFailed(f"{option} needs a fork server, which this system does not have: leave it out")
        super().__init__(loop, timeouts, console)
        self._children: dict[PeerId, _Child] = {}
        # The ends of the pipe with which the workers end; there once one was started.
        self._lifeline: tuple[int, int] | None = None
        self._closed = False

    async def spawn(
        self, settings: WorkerSettings, inherited: WorkerEnvironment, environment: dict[str, str], label: str
    ) -> tuple[Worker, socket.socket]:
        if self._closed:
            raise SpawnFailed("the launcher is closed")
        with ExitStack() as opened:
            worker, ours, theirs = self._open_worker(settings.options, label, opened)
            where = inherited.directory, inherited.path, list(inherited.code)
            order = Spawn(worker.id, *where, {}, [], environment, settings.packed())
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
                # It has just reported the end.
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
            # Only the parent can wait for it.
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
        # The children that it has left.
        kill_group(process.pid)
        with suppress(RuntimeError):
            # The loop is closed.
            self._loop.call_soon_threadsafe(partial(self._ended, worker, Ending(*describe_exit(code))))

    def _ended(self, worker: Worker, ending: Ending) -> None:
        self._children.pop(worker.id, None)
        self._forget(worker, ending)


def _refusal(error: OSError, directory: str, label: str) -> str:
    if error.filename == directory:
        return f"the working directory that the controller had when it spawned the actor cannot be entered: {error}"
    return refusal(error, f"{label} cannot be started")
