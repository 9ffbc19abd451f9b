"""The helper thread, and the effect of a cancellation on a job that writes to memory of the user."""

from __future__ import annotations

import asyncio
import threading

import anyio

from aiodaft._runtime.platform.threads import HelperThread


async def test_a_job_that_writes_to_memory_of_the_caller_has_ended_before_its_cancellation_is_raised() -> None:
    loop = asyncio.get_running_loop()
    helper_thread = HelperThread("copies", loop)
    entered, leave = asyncio.Event(), threading.Event()
    written: list[int] = []

    def write() -> None:
        loop.call_soon_threadsafe(entered.set)
        leave.wait()
        written.append(1)

    task = loop.create_task(helper_thread.run_to_end(write))
    await entered.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not task.done()
    leave.set()
    await asyncio.wait([task])
    assert task.cancelled()
    assert written == [1]
    # anyio cancels by level.
    leave.clear()
    entered.clear()
    async with anyio.create_task_group() as group:
        group.start_soon(helper_thread.run_to_end, write)
        await entered.wait()
        group.cancel_scope.cancel()
        loop.call_later(0, leave.set)
    assert written == [1, 1]
    await helper_thread.aclose()
