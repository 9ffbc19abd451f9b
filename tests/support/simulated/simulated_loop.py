"""An event loop for many simulated processes: its clock jumps to the next timer, and a seed decides which one runs.

Callbacks of one process run in the order in which asyncio runs them, because code may rely on that. The seed decides
which process has the next turn, and how long anything between processes takes, so a run can be repeated.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import random
import socket
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager, suppress
from contextvars import Context, copy_context
from functools import partial
from typing import Any, TypeVar, TypeVarTuple
from unittest.mock import patch

from aiodaft.testing.in_process import AutojumpLoop, Hang

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class SimulatedProcess:
    """The code of one simulated process, which can be stopped or killed as a whole."""

    def __init__(self, name: str, host: str = "") -> None:
        self.name = name
        # The machine that it runs on, where there are several.
        self.host = host
        self.alive = True
        self.paused = False
        self.ready: deque[asyncio.Handle] = deque()
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        # Closed by the kernel when the process ends.
        self.on_death: list[Callable[[], object]] = []
        # Whether the loop has it among those that may run.
        self.queued = False

    @property
    def runnable(self) -> bool:
        return bool(self.ready) and self.alive and not self.paused


class SimulatedLoop(AutojumpLoop):
    """Runs all processes of a simulation in one thread."""

    # Set by `stop`.
    _stopping: bool

    def __init__(self, seed: object, hang_after: float) -> None:
        super().__init__()
        # Some timers are set again and again, so a hang never runs out of them.
        self._hang_after = hang_after
        self.rng = random.Random(f"{seed}")
        # Runs the code that belongs to no process: the kernel and the network.
        self.outside = SimulatedProcess("outside")
        self.processes = [self.outside]
        self.current = self.outside
        # At least those that can run.
        self._runnable: list[SimulatedProcess] = []
        # The events, in short: equal for equal seeds.
        self.trace: list[tuple[Any, ...]] = []
        self.problems: list[str] = []
        self._timers: list[tuple[float, int, SimulatedProcess, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        # Tasks of killed processes: nothing of them may run, also not because they are collected.
        self._graves: list[Any] = []
        self.readers: dict[int, Callable[[], object]] = {}
        self.writers: dict[int, Callable[[], object]] = {}
        # Called with each descriptor that a process begins to watch.
        self.on_watch: Callable[[int], object] = lambda fd: None

    # Processes.

    def new_process(self, name: str, host: str = "") -> SimulatedProcess:
        process = SimulatedProcess(name, host)
        self.processes.append(process)
        return process

    def start(self, process: SimulatedProcess, coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        before, self.current = self.current, process
        try:
            return self.create_task(coro, context=Context())
        finally:
            self.current = before

    def within(self, process: SimulatedProcess, callback: Callable[..., object], *args: Any) -> None:
        if process.alive:
            self._push(process, asyncio.Handle(callback, args, self, Context()))

    def _push(self, process: SimulatedProcess, handle: asyncio.Handle) -> None:
        process.ready.append(handle)
        if not process.queued:
            process.queued = True
            self._runnable.append(process)

    def later(self, seconds: float, callback: Callable[..., object], *args: Any) -> None:
        """Let something happen that is not part of any process."""
        self.at(self._now + seconds, callback, *args)

    def at(self, when: float, callback: Callable[..., object], *args: Any) -> None:
        """The same at a certain time."""
        self._schedule(self.outside, when, callback, args, Context())

    def kill(self, process: SimulatedProcess) -> None:
        """End a process as SIGKILL does: not one line of it runs any more."""
        if not process.alive:
            return
        self.note("kill", process.name)
        process.alive = False
        self._graves += [process.ready, *process.tasks]
        process.ready = deque()
        for callback in process.on_death:
            callback()

    def pause(self, process: SimulatedProcess, seconds: float) -> None:
        """Stop a process, as SIGSTOP does, and let it go on some time later."""
        self.note("pause", process.name, seconds)
        process.paused = True
        self.later(seconds, self._resume, process)

    def _resume(self, process: SimulatedProcess) -> None:
        process.paused = False
        if process.ready and not process.queued:
            process.queued = True
            self._runnable.append(process)

    def note(self, *what: Any) -> None:
        self.trace.append((round(self._now, 9), self.current.name, *what))

    # The parts of a loop.

    def create_task(self, coro: Any, *, name: object = None, context: Context | None = None) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=None if name is None else str(name), context=context)
        self.current.tasks.add(task)
        if not self.current.alive:
            # It has just ended itself; its further actions in this turn have no consequences.
            self._graves.append(task)
        return task

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if self.current.alive and not self.is_closed():
            self._push(self.current, handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self._schedule(self.current, self._now + delay, callback, args, context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self._schedule(self.current, when, callback, args, context)

    def _schedule(
        self, process: SimulatedProcess, when: float, callback: Any, args: Any, context: Any
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), process, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is skipped when its time comes."""

    def add_reader(self, fd: Any, callback: Callable[[*Ts], Any], *args: *Ts) -> None:
        # As in asyncio: the context of the caller.
        self.readers[fd] = partial(copy_context().run, callback, *args)
        self.on_watch(fd)

    def remove_reader(self, fd: Any) -> bool:
        return self.readers.pop(fd, None) is not None

    def add_writer(self, fd: Any, callback: Callable[[*Ts], Any], *args: *Ts) -> None:
        # As in asyncio: the context of the caller.
        self.writers[fd] = partial(copy_context().run, callback, *args)
        self.on_watch(fd)

    def remove_writer(self, fd: Any) -> bool:
        return self.writers.pop(fd, None) is not None

    async def sock_recv(self, sock: socket.socket, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        return bytes(buffer[: await self.sock_recv_into(sock, buffer)])

    async def sock_recv_into(self, sock: socket.socket, buf: Any) -> int:
        return await self._when_ready(sock, lambda: sock.recv_into(buf), self.add_reader, self.remove_reader)

    async def sock_sendall(self, sock: socket.socket, data: Any) -> None:
        left = memoryview(data).cast("B")
        while left:
            part = left
            sent = await self._when_ready(sock, lambda: sock.send(part), self.add_writer, self.remove_writer)  # noqa: B023 - it is called here only
            left = left[sent:]

    async def _when_ready(
        self,
        sock: socket.socket,
        step: Callable[[], T],
        watch: Callable[..., object],
        forget: Callable[[int], object],
    ) -> T:
        while True:
            try:
                return step()
            except BlockingIOError:
                fd, ready = sock.fileno(), self.create_future()
            watch(fd, settle, ready, None)
            try:
                await ready
            finally:
                forget(fd)

    def add_signal_handler(self, sig: int, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Signals are sent by other means."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.is_closed():
            self.problems.append(f"{context.get('message')}: {context.get('exception')!r}")

    # Running.

    def _run_once(self) -> None:
        process = self._choose()
        if process is None:
            self._jump()
            return
        self.current = process
        for _ in range(len(process.ready)):
            if not process.alive or self._stopping:
                break
            handle = process.ready.popleft()
            if not handle.cancelled():
                handle._run()
        self.current = self.outside

    def _choose(self) -> SimulatedProcess | None:
        """The process that has the next turn; None if none can run."""
        runnable = self._runnable
        while runnable:
            index = int(self.rng.random() * len(runnable)) if len(runnable) > 1 else 0
            process = runnable[index]
            if process.runnable:
                return process
            process.queued = False
            runnable[index] = runnable[-1]
            runnable.pop()
        return None

    def _jump(self) -> None:
        while self._timers:
            when, _, process, handle = heapq.heappop(self._timers)
            if handle.cancelled():
                continue
            if when > self._hang_after:
                break
            if process.alive:
                self._now = max(self._now, when)
                self._push(process, handle)
                return
            self._graves.append(handle)
        raise Hang("a task waits, and nothing will ever wake it")

    def run_main(self, process: SimulatedProcess, coro: Coroutine[Any, Any, T]) -> T:
        """Run until the main task of a process is over.

        Raises:
            Hang: It never will be.
        """
        return self.run_until_complete(self.start(process, coro))

    def bury(self) -> None:
        """Drop everything. Collected tasks run their `finally` blocks now, without effect on the simulation."""
        self.close()
        # Nothing else refers to some of the tasks.
        left = self._unfinished()
        self._graves.clear()
        self._timers.clear()
        self.readers.clear()
        self.writers.clear()
        for process in self.processes:
            process.ready.clear()
            process.on_death.clear()
        with quiet():
            # Their last steps need no loop of their own.
            asyncio._set_running_loop(self)
            closed: set[asyncio.Task[Any]] = set()
            while left:
                # Their last steps may start others.
                for task in left:
                    closed.add(task)
                    # A scope of anyio lets go of its task only if it ends in it.
                    asyncio._enter_task(self, task)
                    with suppress(BaseException):
                        task.get_coro().close()
                    asyncio._leave_task(self, task)
                left = self._unfinished() - closed
            asyncio._set_running_loop(None)
        # Tasks that end leave something to be collected as well.
        collect()
        collect()

    def _unfinished(self) -> set[asyncio.Task[Any]]:
        return {task for process in self.processes for task in process.tasks if not task.done()}


def settle(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


@contextmanager
def quiet() -> Generator[None, None, None]:
    """Suppress warnings and errors of processes that ended long ago."""
    with patch.object(sys, "unraisablehook", lambda _: None), warnings.catch_warnings(action="ignore"):
        yield


def collect() -> None:
    with quiet():
        gc.collect()
