"""Threads that wait for the loop: `ref.result()` in a `def` method, or in any thread that runs no event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable
from typing import TypeVar

from aiodaft._runtime.actors.hosted_actor import InboundCall, current_call
from aiodaft._runtime.process import Process

T = TypeVar("T")


def block_on(process: Process, awaited: Awaitable[T], what: str) -> T:
    """Block this thread until the value of a ref, or the result of a coroutine, is here.

    Args:
        process: This process.
        awaited: What its loop waits for.
        what: What errors call it.

    Raises:
        RuntimeError: The thread runs an event loop.
        asyncio.CancelledError: The call that the thread runs was cancelled, or its actor is stopped.
        BaseException: What awaiting it raises.
    """
    try:
        if process.is_here or asyncio._get_running_loop() is not None:
            raise RuntimeError(f"{what} would block the event loop of this thread: use `await`")
        process.check_open(f"{what} cannot wait")
    except Exception:
        _leave(awaited)
        raise
    call = current_call.get()
    if call is not None and call.hosted.thread.ident != threading.get_ident():
        # A thread that an async method has started: the call's task is the method's own.
        call = None
    # How a search for deadlocks knows what the thread waits for.
    waiting = asyncio.run_coroutine_threadsafe(_wait(awaited, call), process.loop)
    try:
        return waiting.result()
    except concurrent.futures.CancelledError:
        raise asyncio.CancelledError(f"{what} was cancelled") from None


async def _wait(awaited: Awaitable[T], call: InboundCall | None) -> T:
    if call is None:
        return await awaited
    if call.given_up:
        _leave(awaited)
        raise asyncio.CancelledError
    # Ending the call cancels this task.
    call.task = asyncio.current_task()
    try:
        return await awaited
    finally:
        call.task = None


def _leave(awaited: Awaitable[object]) -> None:
    """Nothing awaits this: Python warns of a coroutine that has not begun."""
    if asyncio.iscoroutine(awaited):
        awaited.close()
