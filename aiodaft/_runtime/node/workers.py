"""The workers of a node, however they are started: their descriptors, their ends, and the reports of these."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Final

from aiodaft._protocol.ids import PeerId, is_worker
from aiodaft._protocol.node.worker import Ending
from aiodaft._runtime.logs.console import Console
from aiodaft._runtime.logs.entries import Source
from aiodaft._runtime.logs.relay import Relay
from aiodaft._runtime.logs.worker_output import OutputReader
from aiodaft._runtime.node.environment import WorkerEnvironment, WorkerSettings
from aiodaft._runtime.node.heartbeat import HeartbeatWatch
from aiodaft._runtime.node.worker import Worker
from aiodaft._runtime.platform.env import Timeouts
from aiodaft._runtime.platform.exhaustion import refusal
from aiodaft._runtime.platform.linux import UNKNOWN, is_stopped, status_of
from aiodaft._runtime.platform.sockets import message_pair
from aiodaft._runtime.process import ProcessOptions
from aiodaft.exceptions import SpawnFailed

# Seconds that the report of an end usually needs.
_REPORT_TIME: Final = 0.1


class Launcher(ABC):
    """Starts and ends the workers of this node."""

    def __init__(self, loop: asyncio.AbstractEventLoop, timeouts: Timeouts, console: Console) -> None:
        self._loop = loop
        self._timeouts = timeouts
        self._output = OutputReader(console)
        # The workers that were ordered and have not ended, as far as is known.
        self.workers: dict[PeerId, Worker] = {}
        self.on_ended: Callable[[Worker, Ending], object] = lambda worker, ending: None
        # Called with the reason when there is no fork server any more, and so never a worker again.
        self.on_server_lost: Callable[[str], object] = lambda why: None
        # Takes output to the program on another machine that shows it; None if this process does.
        self.relay_to: Callable[[PeerId], Relay | None] = lambda program: None
        # Called when a command wants to ask something, with the pid of the fork server outside its PID namespace.
        self.on_visit: Callable[[int], object] = lambda pid: None

    @abstractmethod
    async def spawn(
        self, settings: WorkerSettings, inherited: WorkerEnvironment, environment: dict[str, str], label: str
    ) -> tuple[Worker, socket.socket]:
        """Start a worker.

        Args:
            settings: Its settings.
            inherited: The environment that it inherits from the controller.
            environment: Variables for this worker alone.
            label: The actor it is started for.

        Returns:
            The worker, and this process's end of the socket to it. Once its `started` is done, it has a pid.

        Raises:
            SpawnFailed: The worker cannot be started, or there are no descriptors for it. `started` raises it, too.
        """

    @abstractmethod
    def kill(self, worker: Worker, number: int = signal.SIGKILL) -> None:
        """Send a signal to a worker that has not ended."""

    @abstractmethod
    async def end(self, worker: Worker) -> None:
        """Kill a worker and wait until it has ended."""

    @abstractmethod
    async def aclose(self) -> None:
        """End the remaining workers, and wait until they are gone."""

    @abstractmethod
    def abandon(self) -> None:
        """Like `aclose`, without a running loop. Blocks."""

    @abstractmethod
    def stay_behind(self) -> None:
        """In a forked child: leave the workers to the parent."""

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
