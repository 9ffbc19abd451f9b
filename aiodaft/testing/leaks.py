"""The objects that a test has left when its runtime is closed: refs, tasks, processes, segments of shared memory."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Final

from aiodaft._protocol.ids import FIRST_USER_ACTOR
from aiodaft._runtime.calls.call import CallState
from aiodaft._runtime.diagnostics.await_chains import frames_of, users_line
from aiodaft._runtime.objects.ref_state import RefState, state_of
from aiodaft._runtime.platform.linux import process_tree
from aiodaft.ref import Ref
from aiodaft.runtime import Runtime

# The folder in which Linux shows the descriptors of a process.
_DESCRIPTORS: Final = "/proc/self/fd"
_SEGMENT: Final = "/memfd:aiodaft"
_ROUNDS: Final = 2


class Before:
    """The objects that exist before a test, so that they do not count as left."""

    def __init__(self) -> None:
        self._tasks = asyncio.all_tasks()
        self._processes = set(process_tree(os.getpid()))
        self._segments = _segments()

    def left(self) -> list[str]:
        """The objects that have come since and have not ended: a line for each."""
        tasks = asyncio.all_tasks() - self._tasks - {asyncio.current_task()}
        found = [_task(task) for task in sorted(tasks, key=asyncio.Task.get_name) if not _runs_tests(task)]
        found += [f"the process {_command(pid)} runs" for pid in set(process_tree(os.getpid())) - self._processes]
        more = len(_segments()) - len(self._segments)
        if more > 0:
            found.append(f"{more} segments of shared memory are open")
        return found


def held_refs(runtime: Runtime, fixtures: Collection[object]) -> list[str]:
    """The refs of an open runtime, without those that are values of fixtures: a line for each."""
    found = _refs(runtime, fixtures)
    # An error that was raised refers to frames, these to refs, and the state of a ref to its error: only the collector
    # frees such a circle, and the first time it reports the ref as dropped.
    for _ in range(_ROUNDS) if found else ():
        found.clear()
        gc.collect()
        runtime._opened.objects.drop_now()
        found = _refs(runtime, fixtures)
    return sorted(f"the ref of {state_of(ref).label} is held" for ref in found)


def _refs(runtime: Runtime, fixtures: Collection[object]) -> list[Ref[Any]]:
    process, kept = runtime._opened.process, {id(value) for value in fixtures}
    refs = [found for found in gc.get_objects() if type(found) is Ref and id(found) not in kept]
    return [ref for ref in refs if state_of(ref).process is process and _is_users(state_of(ref))]


def _is_users(state: RefState) -> bool:
    """Whether a ref is of an actor of the program, or of a value, and not of the runtime's own actors."""
    return not isinstance(state, CallState) or state.target.actor >= FIRST_USER_ACTOR


def _runs_tests(task: asyncio.Task[Any]) -> bool:
    """Whether a task is that in which anyio has the loop run a fixture."""
    return getattr(task.get_coro(), "__qualname__", "").startswith("TestRunner.")


def _task(task: asyncio.Task[Any]) -> str:
    line = users_line(frames_of(task.get_coro()))
    return f"the task {task.get_name()!r} runs" + (f", at {line}" if line else f": {task.get_coro()!r}")


def _command(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
        return f"{pid} ({file.read().replace(chr(0), ' ').strip():.100})"
    return str(pid)


def _segments() -> list[str]:
    found: list[str] = []
    for entry in os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else ():
        with suppress(OSError):
            target = os.readlink(f"{_DESCRIPTORS}/{entry}")
            if target.startswith(_SEGMENT):
                found.append(target)
    return found
