"""Threads that wait for refs: `ref.result()` in a `def` method, or in any thread that runs no event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import Any

from aiodaft._runtime.actors.hosted_actor import InboundCall, current_call
from aiodaft._runtime.process import Process
from aiodaft.ref import Ref


def block_on(process: Process, ref: Ref[Any]) -> Any:
    """Block this thread until the value is here.

    Raises:
        RuntimeError: The thread runs an event loop.
        asyncio.CancelledError: The call that the thread runs was cancelled, or its actor is stopped.
        BaseException: What awaiting the ref raises.
    """
    if process.is_here or asyncio._get_running_loop() is not None:
        raise RuntimeError(f"{ref!r}: result() would block the event loop of this thread: use `await`")
    process.check_open(f"{ref!r} cannot be waited for")
    call = current_call.get()
    if call is not None and call.hosted.thread.ident != threading.get_ident():
        # A thread that an async method has started: the call's task is the method's own.
        call = None
    # How a search for deadlocks knows what the thread waits for.
    waiting = asyncio.run_coroutine_threadsafe(_wait(ref, call), process.loop)
    try:
        return waiting.result()
    except concurrent.futures.CancelledError:
        raise asyncio.CancelledError(f"the wait for {ref!r} was cancelled") from None


async def _wait(ref: Ref[Any], call: InboundCall | None) -> Any:
    if call is None:
        return await ref
    if call.given_up:
        raise asyncio.CancelledError
    # Ending the call cancels this task.
    call.task = asyncio.current_task()
    try:
        return await ref
    finally:
        call.task = None
