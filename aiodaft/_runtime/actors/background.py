"""Background tasks of an actor: they end with it, and it ends with the error of one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from aiodaft._runtime.actors.hosted_actor import HostedActor
from aiodaft._runtime.platform.error_log import log_error, text_of

T = TypeVar("T")


def start(hosted: HostedActor, coro: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    task = hosted._process.tasks.start(coro, name=name)
    hosted.background.add(task)
    task.add_done_callback(partial(_over, hosted, name))
    return task


def _over(hosted: HostedActor, name: str, task: asyncio.Task[Any]) -> None:
    hosted.background.discard(task)
    error: BaseException | None
    if not task.cancelled():
        error = task.exception()
    else:
        # Cancelled by itself: the task that it awaited was.
        error = None if task.cancelling() else asyncio.CancelledError("what it awaited was cancelled")
    # asyncio lets those end the process.
    if error is None or isinstance(error, SystemExit | KeyboardInterrupt):
        return
    what = f"the background task {name!r} of {hosted.where} failed"
    if hosted.stopping is None and hosted._process.closed is None:
        hosted._shared.on_exit(SystemExit(f"{text_of(error).rstrip()}\n{what}: {error!r}"))
    else:
        log_error(what, error)


async def end(hosted: HostedActor) -> None:
    """Cancel the tasks of an actor that has been left. One that goes on is cancelled again when the process ends."""
    tasks = list(hosted.background)
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=hosted._process.grace)
