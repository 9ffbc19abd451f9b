"""One helper thread per process: copies, encodings and page faults that would stall the loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from aiodaft._runtime.platform.tasks import see_through

T = TypeVar("T")


# A warm copy of this size takes about 50 us; more goes to the thread.
SYNC_COPY: Final = 1 << 20


class HelperThread:
    """Runs functions one after the other in a thread, and gives their results to the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._loop = loop
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job` in the thread.

        Cancellation: the job still runs to its end, because it may be writing to memory; its result is dropped.
        """
        return await self._begin(job)

    async def run_to_end(self, job: Callable[[], T]) -> T:
        """The same for a job that writes to memory of the caller's.

        Cancellation: raised once the job has ended.
        """
        return await see_through(self._begin(job))

    def _begin(self, job: Callable[[], T]) -> asyncio.Future[T]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((future, job))
        return future

    async def aclose(self) -> None:
        """End the thread after the jobs it has. Blocks until the last copy is done."""
        thread, self._thread = self._thread, None
        if thread is not None:
            ended = self._loop.create_future()
            self._jobs.put((ended, lambda: None))
            self._jobs.put(None)
            await ended
            thread.join()

    def abandon(self) -> None:
        """End the thread where the loop does not run any more."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            future, job = item
            try:
                result, error = job(), None
            except BaseException as caught:  # noqa: BLE001 - whatever it is belongs to the waiting task
                result, error = None, caught
            self._deliver(future, result, error)
            del item, job, result, error

    def _deliver(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        def settle() -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        try:
            self._loop.call_soon_threadsafe(settle)
        except RuntimeError:
            # The loop was closed; nobody is waiting any more.
            return


class ActorThread:
    """Runs jobs one after the other. Started with the first one."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self._name = name
        self._loop = loop
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def ident(self) -> int | None:
        """The thread, once it has begun."""
        return None if self._thread is None else self._thread.ident

    @property
    def backlog(self) -> int:
        """Jobs that wait for the one under way."""
        return self._jobs.qsize()

    def submit(self, job: Callable[[], object]) -> None:
        """Run `job` after those submitted before; it must not raise."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    async def run(self, function: Callable[[], Any]) -> Any:
        """Run a function and wait for its result.

        Cancellation: the function goes on; its result is dropped.
        """
        done: asyncio.Future[Any] = self._loop.create_future()

        def job() -> None:
            try:
                result, error = function(), None
            except BaseException as caught:  # noqa: BLE001 - whatever it is belongs to the waiting task
                result, error = None, caught
            self.to_loop(lambda: _settle(done, result, error))

        self.submit(job)
        return await done

    def to_loop(self, callback: Callable[[], object]) -> None:
        """From the thread: run something on the loop."""
        # The loop may be closed already: then nobody waits.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def close(self) -> None:
        """End the thread after its last job. Does not wait: a method cannot be interrupted."""
        if self._thread is not None:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job


def _settle(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if isinstance(error, StopIteration):
        wrapped = RuntimeError("the function raised StopIteration")
        wrapped.__cause__ = error
        error = wrapped
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)
