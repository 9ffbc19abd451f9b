"""The one thread on which an actor's `def` methods run, in order; its constructor too."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


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
