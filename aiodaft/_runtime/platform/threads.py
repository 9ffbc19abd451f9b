"""Threads beside the loop: one per actor for its `def` methods, and one per process for copies and encodings."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from aiodaft._runtime.platform.exhaustion import exhausted
from aiodaft._runtime.platform.tasks import see_through
from aiodaft_transport.system import start_thread

T = TypeVar("T")


# A warm copy of this size takes about 50 us; larger copies go to the helper thread.
SYNC_COPY: Final = 1 << 20


class HelperThread:
    """Runs jobs one after another in a thread, which the first job starts."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self._name = name
        self._loop = loop
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def ident(self) -> int | None:
        return None if self._thread is None else self._thread.ident

    @property
    def backlog(self) -> int:
        return self._jobs.qsize()

    def submit(self, job: Callable[[], object]) -> None:
        """Run a job after the earlier ones; it must not raise.

        Raises:
            ResourceExhausted: The system refuses the thread. The next job tries again.
        """
        if self._thread is None:
            try:
                self._thread = start_thread(self._work, name=self._name)
            except OSError as error:
                refused = exhausted(error, f"the thread {self._name!r} cannot be started")
                raise refused.with_executed(False) from error
        self._jobs.put(job)

    def begin(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Submit a function; the future gives its result."""
        done: asyncio.Future[T] = self._loop.create_future()

        def job() -> None:
            try:
                settle: Callable[[], object] = partial(done.set_result, function())
            except StopIteration as stop:
                # A future refuses it.
                error = RuntimeError("the function raised StopIteration")
                error.__cause__ = stop
                settle = partial(done.set_exception, error)
            except BaseException as error:  # noqa: BLE001 - the waiting task gets every error
                settle = partial(done.set_exception, error)
            self.to_loop(lambda: done.done() or settle())

        self.submit(job)
        return done

    async def run(self, function: Callable[[], T]) -> T:
        """Run a function in the thread.

        Cancellation: the function runs to its end, and its result is dropped.
        """
        return await self.begin(function)

    async def run_to_end(self, function: Callable[[], T]) -> T:
        """Run a function that writes to memory of the caller.

        Cancellation: raised when the function has ended.
        """
        return await see_through(self.begin(function))

    def to_loop(self, callback: Callable[[], object]) -> None:
        """Run a callback on the loop; from the thread."""
        # A closed loop has no waiting tasks.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def close(self) -> None:
        """End the thread after its last job, without waiting: a method cannot be interrupted."""
        if self._thread is not None:
            self._jobs.put(None)

    def abandon(self) -> None:
        """End the thread and block until its last job is done, without the loop. Idempotent."""
        self.close()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    async def aclose(self) -> None:
        """End the thread after its last job. Idempotent."""
        if self._thread is not None:
            await self.run(lambda: None)
            self.abandon()

    async def close_within(self, seconds: float) -> None:
        """End the thread after its last job, and wait for this, but no longer than that."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.aclose()
        self.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job


# The code that a thread is in while it has no job.
IDLE: Final = HelperThread._work.__code__
