"""The stack of one process, for `rt.stack()`."""

from __future__ import annotations

import asyncio
import linecache
import sys
import threading
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeVar, cast

from aiodaft._protocol.calls.call import FETCHING
from aiodaft._protocol.ids import FIRST_USER_ACTOR
from aiodaft._runtime.actors.hosted_actor import InboundCall
from aiodaft._runtime.diagnostics.await_chains import Frames, frames_of, is_ours, stack_of, users_line, wait_of_task
from aiodaft._runtime.diagnostics.wait_graph import WaitGraph, frames_on_thread
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft.ref import Ref
from aiodaft.stack import CallStack, Frame, ProcessStack, TaskStack, ThreadStack

T = TypeVar("T")


def stack_here(waits: WaitGraph) -> ProcessStack:
    calls = [call for call in waits.host.calls() if call.hosted.id >= FIRST_USER_ACTOR]
    calls.sort(key=lambda call: not call.begun)
    of_calls = {task for call in calls for task in (call.task, call.wait)}
    tasks = [task for task in asyncio.all_tasks(waits.process.loop) if task not in of_calls]
    return ProcessStack(
        id=waits.process.id,
        pid=waits.process.pid,
        actors=tuple(hosted.name for hosted in waits.host.actors.values() if hosted.id >= FIRST_USER_ACTOR),
        calls=tuple(_call(waits, call) for call in calls),
        threads=tuple(_threads()),
        tasks=tuple(_task(waits, task) for task in sorted(tasks, key=asyncio.Task.get_name) if _is_users(task)),
    )


def _call(waits: WaitGraph, call: InboundCall) -> CallStack:
    state = "running" if call.begun else "needs arguments" if call.stage is FETCHING else "queued"
    seconds = waits.process.env.monotonic() - call.since if call.begun else None
    on_thread = call.task is None or call.rules.on_thread or call.step is not None
    frames = frames_on_thread(call) if on_thread else frames_of(cast("asyncio.Task[Any]", call.task).get_coro())
    waits_for = tuple(waits.name_of(at) for at in waits.wait_of(call).calls)
    return CallStack(call.hosted.name, call.label, call.caller, state, seconds, waits_for, _frames(frames))


def _task(waits: WaitGraph, task: asyncio.Task[object]) -> TaskStack:
    waits_for = tuple(waits.name_of(at) for at in wait_of_task(task).calls)
    return TaskStack(task.get_name(), waits_for, _frames(frames_of(task.get_coro())))


def _threads() -> list[ThreadStack]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    # This thread makes the list; its tasks are listed by themselves.
    own = threading.get_ident()
    stacks = {ident: stack_of(frame) for ident, frame in sys._current_frames().items() if ident != own}
    return [
        ThreadStack(names.get(ident, str(ident)), _frames(frames))
        for ident, frames in stacks.items()
        if users_line(frames) or not any(map(is_ours, frames))
    ]


def _is_users(task: asyncio.Task[object]) -> bool:
    return bool(users_line(frames_of(task.get_coro())))


def _frames(frames: Frames) -> tuple[Frame, ...]:
    """As data, without the runtime's frames unless there are no others."""
    shown = [frame for frame in frames if not is_ours(frame)] or frames
    found = [(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in shown]
    return tuple(Frame(file, line, name, linecache.getline(file, line).strip()) for file, line, name in found)


async def answer_to(question: Awaitable[T], patience: float) -> T:
    """The answer of another process to a question, which is a ref: the handles of the runtime's own actors make refs.

    Raises:
        DaftError: The process has ended.
        TimeoutError: There is no answer in time.

    Cancellation: the question is cancelled.
    """
    if not await is_answered(cast("Ref[T]", question), patience):
        raise TimeoutError
    # A large answer is fetched now.
    async with asyncio.timeout(patience):
        return await question


async def is_answered(question: Ref[Any], patience: float) -> bool:
    """Wait for an answer; True if there is one, or an error. A question without an answer in time is cancelled.

    Cancellation: the question is cancelled, and its error counts as seen.
    """
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                # Awaiting the ref itself would wait for the cleanup after a cancellation.
                await question.ready()
        return question.done()
    finally:
        state_of(question).mark_seen()
        question.cancel()
