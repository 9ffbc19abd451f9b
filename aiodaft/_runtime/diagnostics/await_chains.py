"""The suspended frames of tasks and threads, and the calls that they wait for.

Nothing is recorded while the program runs: a request reads the coroutines. Frames that cannot be read count as unknown.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from aiodaft._protocol.diagnostics.deadlock import CallAt
from aiodaft._runtime.objects.ref_state import RefState
from aiodaft._runtime.objects.streams import StreamState
from aiodaft._runtime.objects.transfer import Transfer
from aiodaft._runtime.platform.wakeup import Deferred
from aiodaft.ref import Awaiting, Ref

# For each type of awaitable, the attributes with its frame and with the object that it awaits.
_INSIDE: Final[dict[type, tuple[str, str]]] = {
    types.CoroutineType: ("cr_frame", "cr_await"),
    types.GeneratorType: ("gi_frame", "gi_yieldfrom"),
    types.AsyncGeneratorType: ("ag_frame", "ag_await"),
    # These have no frame of their own.
    Deferred: ("", "coro"),
    Awaiting: ("", "coro"),
}
_ASYNC_GENERATOR_STEPS: Final = frozenset({"async_generator_asend", "async_generator_athrow", "coroutine_wrapper"})
_OURS: Final = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_PYTHONS: Final = os.path.dirname(os.__file__) + os.sep

Frames: TypeAlias = list[types.FrameType]


@dataclass(slots=True)
class Wait:
    """The calls and futures that a task waits for.

    Attributes:
        known: Whether it waits, and only for calls.
        futures: The futures that wake it: the same futures later mean that it did not wake in between.
    """

    known: bool = True
    calls: list[CallAt] = field(default_factory=list)
    futures: list[asyncio.Future[Any]] = field(default_factory=list)
    line: str = ""


def frames_of(awaitable: object) -> Frames:
    frames: Frames = []
    while awaitable is not None:
        frame, awaitable = _look_into(awaitable)
        if frame is not None:
            frames.append(frame)
    return frames


def _look_into(awaitable: object) -> tuple[types.FrameType | None, object]:
    if type(awaitable) in _INSIDE:
        frame, inner = _INSIDE[type(awaitable)]
        return getattr(awaitable, frame, None), getattr(awaitable, inner)
    if type(awaitable).__name__ in _ASYNC_GENERATOR_STEPS:
        # Only the garbage collector knows what they step through.
        return None, next((one for one in gc.get_referents(awaitable) if type(one) in _INSIDE), None)
    return None, None


def stack_of(frame: types.FrameType | None) -> Frames:
    frames: Frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def thread_stack(ident: int | None) -> Frames:
    return stack_of(sys._current_frames().get(ident or 0))


def is_ours(frame: types.FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OURS)


def _is_pythons(frame: types.FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith((_PYTHONS, "<frozen")) and "site-packages" not in name


def users_line(frames: Frames) -> str:
    """The innermost line of user code, as "file:line in function"."""
    for frame in reversed(frames):
        if not (is_ours(frame) or _is_pythons(frame)):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return ""


def wait_of_task(task: asyncio.Task[Any]) -> Wait:
    wait = Wait(line=users_line(frames_of(task.get_coro())))
    visited: set[object] = set()
    ahead: list[object] = [task]
    while ahead:
        one = ahead.pop()
        if isinstance(one, CallAt):
            wait.calls.append(one)
        elif one not in visited:
            visited.add(one)
            try:
                waker, behind = _look_behind(one)
            except Exception:  # noqa: BLE001 - a wait that this version of Python does not show is unknown
                wait.known = False
            else:
                wait.futures += [] if waker is None else [waker]
                ahead += reversed(behind)
    return wait


def wait_of_thread(frames: Frames) -> Wait:
    try:
        wait = wait_of_task(_blocked_on(frames))
    except Exception:  # noqa: BLE001 - the same
        wait = Wait(known=False)
    wait.line = users_line(frames)
    return wait


# A rule may raise anything: then the wait is unknown.

Behind: TypeAlias = Sequence[object]


def _look_behind(one: Any) -> tuple[asyncio.Future[Any] | None, Behind]:
    """The calls that end before a task, future or ref does, and the future that then wakes the task."""
    if isinstance(one, Ref):
        return None, _calls_behind(one._state)
    if isinstance(one, asyncio.Task):
        waker: Any = one._fut_waiter  # type: ignore[attr-defined]  # private
        if waker.done():
            raise LookupError("it is about to go on")
        frames = frames_of(one.get_coro())
        rule = _RULES.get(_name(frames[-1])) if frames else None
        return (None, [waker]) if rule is None else (waker, rule(frames))
    if type(one).__name__ == "_GatheringFuture":
        return one, _undone(one._children)
    # A future of `asyncio.shield`.
    callbacks = [callback for callback, _ in one._callbacks]
    (around,) = _around(callbacks, "asyncio.tasks.shield.<locals>._outer_done_callback")
    return one, [around["inner"]]


def _calls_behind(state: Any) -> Behind:
    if not isinstance(state, RefState) or state.settled:
        raise LookupError("the value is on its way")
    parts = state.parts()
    if parts is None:
        return [CallAt(state.producer, state.owner, state.number)]
    return [call for part in _undone(parts) for call in _calls_behind(part._state)]


def _blocked_on(frames: Frames) -> asyncio.Task[Any]:
    inside = next(frame.f_locals for frame in frames if _name(frame) == "concurrent.futures._base.Future.result")
    if inside["timeout"] is not None:
        raise LookupError("a wait with a timeout is not a deadlock")
    (around,) = _around(inside["self"]._done_callbacks, "asyncio.futures._chain_future.<locals>._call_check_cancel")
    task: asyncio.Task[Any] = around["source"]
    return task


def _at_question(frames: Frames) -> Behind:
    pulls = [frame.f_locals for frame in frames if frame.f_code is Transfer.pull.__code__]
    return [CallAt(pull["producer"], pull["owner"], pull["number"]) for pull in pulls]


def _at_stream(frames: Frames) -> Behind:
    stream: StreamState = frames[-1].f_locals["self"]
    if frames[-2].f_code is not StreamState.next_item.__code__ or stream.consumption.opening:
        raise LookupError("it waits for a cancelled call, which has a time limit, or for another task to take an item")
    host = stream.process.id if stream.connection is None else stream.connection.remote
    return [CallAt(host, stream.process.id, stream.number)]


def _at_wait(frames: Frames) -> Behind:
    inside = frames[-1].f_locals
    return _untimed(inside["timeout"], inside["fs"])


def _at_queue(frames: Frames) -> Behind:
    """The tasks that `as_completed` waits for; the producers of any other queue are unknown."""
    inside = frames[-2].f_locals
    if _name(frames[-2]) == "asyncio.tasks._AsCompletedIterator._wait_for_one":
        return _untimed(inside["self"]._timeout_handle, inside["self"]._todo)
    # Before Python 3.13 there was no such object: read the callbacks of all tasks.
    callbacks = [callback for task in asyncio.all_tasks() for callback, _ in task._callbacks or ()]
    found = _around(callbacks, "asyncio.tasks.as_completed.<locals>._on_completion")
    around = next(one for one in found if one["done"] is inside["done"])
    return _untimed(around["timeout_handle"], around["todo"])


def _untimed(timeout: object, futures: Iterable[Any]) -> Behind:
    if timeout is not None:
        raise LookupError("a wait with a timeout is not a deadlock")
    return _undone(futures)


def _undone(futures: Iterable[Any]) -> list[Any]:
    return [future for future in futures if not future.done()]


def _around(callbacks: Iterable[Any], name: str) -> list[dict[str, Any]]:
    return [
        dict(zip(one.__code__.co_freevars, (cell.cell_contents for cell in one.__closure__), strict=True))
        for one in callbacks
        if _name_of(one) == name
    ]


def _name(frame: types.FrameType) -> str:
    return f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"


def _name_of(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"


def add_rule(function: Callable[..., Any], rule: Callable[[Frames], Behind]) -> None:
    """Give the rule for tasks whose innermost frame is of a function; LookupError from it: their wait is not known."""
    _RULES[_name_of(function)] = rule


def check_untimed(timeout: float | None) -> None:
    """Raise LookupError for a wait with a timeout: it is not a deadlock."""
    _untimed(timeout, ())


# By the name of the innermost frame of a task: the calls that the task waits for. A name that a version of Python
# does not have does no harm.
_RULES: Final[dict[str, Callable[[Frames], Behind]]] = {
    _name_of(RefState.wait): lambda frames: _calls_behind(frames[-1].f_locals["self"]),
    _name_of(RefState.wait_settled): lambda frames: _calls_behind(frames[-1].f_locals["self"]),
    _name_of(Transfer._question): _at_question,
    _name_of(Transfer._locate_here): _at_question,
    _name_of(StreamState._wait_change): _at_stream,
    # Every version.
    "asyncio.queues.Queue.get": _at_queue,
    "asyncio.tasks._wait": _at_wait,
    # 3.11. Later ones wait as any coroutine does.
    "asyncio.tasks.wait_for": lambda frames: [frames[-1].f_locals["fut"]],
    # 3.11 and 3.12.
    "asyncio.taskgroups.TaskGroup.__aexit__": lambda frames: _undone(frames[-1].f_locals["self"]._tasks),
    # From 3.13 on.
    "asyncio.taskgroups.TaskGroup._aexit": lambda frames: _undone(frames[-1].f_locals["self"]._tasks),
}
