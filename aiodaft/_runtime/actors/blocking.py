"""Threads that wait for the loop: `ref.result()` in a `def` method, or in any thread that runs no event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable
from typing import Any, Generic, TypeVar

from aiodaft._runtime.actors.hosted_actor import InboundCall, current_call
from aiodaft._runtime.platform.context import current_terms, deadline_of, exceeded
from aiodaft._runtime.process import Process
from aiodaft.exceptions import DeadlineExceeded
from aiodaft.ref import Ref

T = TypeVar("T")


def block_on(process: Process, awaited: Awaitable[T], what: str, timeout: float | None = None) -> T:
    """Block this thread until the value of a ref, or the result of a coroutine, is here.

    Args:
        timeout: Seconds to wait for a ref. The call of the ref goes on after it.

    Raises:
        RuntimeError: The thread runs an event loop.
        TimeoutError: The time is over.
        asyncio.CancelledError: The call that the thread runs was cancelled, or its actor is stopped.
        BaseException: The error of `awaited`.
    """
    try:
        if process.is_here or asyncio._get_running_loop() is not None:
            raise RuntimeError(f"{what} would block the event loop of this thread: use `await`")
        process.check_open(f"{what} cannot wait")
    except Exception:
        _leave(awaited)
        raise
    call = current_call.get()
    if call is not None and (call.hosted.thread.ident != threading.get_ident() or call.closes):
        # A thread that an async method has started, or the cleanup of a generator: neither is cancelled with the call.
        call = None
    wait = _Wait(awaited, call)
    # A search for deadlocks reads here for which ref the thread waits.
    waiting = asyncio.run_coroutine_threadsafe(wait.run(), process.loop)
    try:
        return waiting.result(timeout)
    except concurrent.futures.CancelledError:
        if call is not None and call.step is not None:
            call.closes = True
        raise asyncio.CancelledError(f"{what} was cancelled") from None
    except TimeoutError:
        if timeout is None:
            raise
    if waiting.done():
        # The awaited call has raised this itself, or its result came at the last moment.
        return waiting.result()
    process.call_soon(wait.leave)
    raise TimeoutError(f"{what} gave nothing within {timeout:g} s; the call goes on, and `ref.cancel()` ends it")


class _Wait(Generic[T]):
    def __init__(self, awaited: Awaitable[T], call: InboundCall | None) -> None:
        self._awaited = awaited
        self._ref: Ref[Any] | None = awaited if isinstance(awaited, Ref) else None
        self._call = call
        self._task: asyncio.Task[Any] | None = None
        self._left = False

    async def run(self) -> T:
        call = self._call
        if self._left or (call is not None and call.given_up):
            _leave(self._awaited)
            raise asyncio.CancelledError
        self._task = asyncio.current_task()
        if call is not None:
            # Ending the call cancels this task.
            call.wait = self._task
        try:
            return await self._in_time()
        finally:
            if call is not None and call.wait is self._task:
                call.wait = None
            self._task = None
            if self._ref is not None:
                self._ref.remove_done_callback(self._keep_on)

    async def _in_time(self) -> T:
        """Await it no longer than a block of the thread has time. The deadline of its call cancels the task."""
        when = deadline_of(current_terms.get())
        whole = None if self._call is None else self._call.deadline
        if when is None or (whole is not None and when >= whole) or self._ref is None:
            return await self._awaited
        scope = asyncio.timeout_at(when)
        try:
            async with scope:
                return await self._awaited
        except TimeoutError as error:
            if not scope.expired() or isinstance(error, DeadlineExceeded):
                raise
            raise exceeded("the deadline has passed", error) from error

    def leave(self) -> None:
        self._left = True
        if self._task is not None and self._ref is not None:
            # Without this, the call would be cancelled with its only awaiter.
            self._ref.add_done_callback(self._keep_on)
            self._task.cancel()

    def _keep_on(self, _: object) -> None: ...


def _leave(awaited: Awaitable[object]) -> None:
    """Nothing awaits this: Python warns of a coroutine that has not begun."""
    if asyncio.iscoroutine(awaited):
        awaited.close()
