"""An event loop with a virtual clock: when every task waits, time jumps to the next timer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

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
