"""The suspended frames of tasks and threads, and the calls that they wait for.

Nothing is recorded while the program runs: a request reads the coroutines. What cannot be read counts as unknown.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast

from aiodaft._protocol.deadlock import CallAt
from aiodaft._runtime.objects.ref_state import RefState
from aiodaft._runtime.objects.streams import StreamState
from aiodaft._runtime.objects.transfer import Transfer
from aiodaft._runtime.platform.eager_start import Deferred
from aiodaft.ref import Ref

_ASYNC_GENERATOR_STEPS: Final = frozenset({"async_generator_asend", "async_generator_athrow", "coroutine_wrapper"})
_OURS: Final = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_PYTHONS: Final = os.path.dirname(os.__file__) + os.sep

Frames: TypeAlias = list[types.FrameType]


@dataclass(slots=True)
class Wait:
    """What a task waits for.

    Attributes:
        known: Whether it waits, and only for calls.
        calls: The calls; the end of one lets it go on.
        futures: The futures that wake it: the same futures later mean that it did not wake in between.
        line: The line of user code in which it waits.
    """

    known: bool = True
    calls: list[CallAt] = field(default_factory=list)
    futures: list[asyncio.Future[Any]] = field(default_factory=list)
    line: str = ""


class _UnknownError(Exception):
    """The task waits for something that is not known to end with a call."""


def frames_of(awaitable: object) -> Frames:
    """The suspended frames of a coroutine or generator, outermost first."""
    frames: Frames = []
    while awaitable is not None:
        frame, awaitable = _look_into(awaitable)
        if frame is not None:
            frames.append(frame)
    return frames


def _look_into(awaitable: object) -> tuple[types.FrameType | None, object]:
    if isinstance(awaitable, types.CoroutineType):
        return awaitable.cr_frame, awaitable.cr_await
    if isinstance(awaitable, Deferred):
        return None, awaitable.coro
    if isinstance(awaitable, types.GeneratorType):
        return awaitable.gi_frame, awaitable.gi_yieldfrom
    if isinstance(awaitable, types.AsyncGeneratorType):
        return awaitable.ag_frame, awaitable.ag_await
    if type(awaitable).__name__ in _ASYNC_GENERATOR_STEPS:
        # Only the garbage collector knows what they step through.
        inside = gc.get_referents(awaitable)
        return None, next(
            (one for one in inside if isinstance(one, types.CoroutineType | types.AsyncGeneratorType)), None
        )
    return None, None


def stack_of(frame: types.FrameType | None) -> Frames:
    """The frames of a running thread, outermost first."""
    frames: Frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def thread_stack(ident: int | None) -> Frames:
    """The frames of another thread, outermost first; none if it does not run."""
    return stack_of(sys._current_frames().get(ident or 0))


def is_ours(frame: types.FrameType) -> bool:
    """Whether a frame is the runtime's."""
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
    """What a task waits for."""
    wait = Wait(line=users_line(frames_of(task.get_coro())))
    _Collector(wait).task(task)
    return wait


def wait_of_thread(frames: Frames) -> Wait:
    """What a thread waits for by `asyncio.run_coroutine_threadsafe(...).result()`."""
    blocked = next((frame for frame in frames if frame.f_code is concurrent.futures.Future.result.__code__), None)
    if blocked is None or blocked.f_locals["timeout"] is not None:
        # A wait with a timeout is not a deadlock.
        return Wait(known=False)
    future = blocked.f_locals["self"]
    tasks = [_enclosed(callback, "_call_check_cancel", "source") for callback in future._done_callbacks]
    task = next((task for task in tasks if isinstance(task, asyncio.Task)), None)
    wait = Wait(known=False) if task is None else wait_of_task(task)
    wait.line = users_line(frames)
    return wait


class _Collector:
    """Gathers what a task waits for, and the tasks that it waits for."""

    def __init__(self, wait: Wait) -> None:
        self._wait = wait
        self._visited: set[object] = set()

    def task(self, task: asyncio.Task[Any]) -> None:
        if task in self._visited:
            return
        self._visited.add(task)
        waker: asyncio.Future[Any] | None = getattr(task, "_fut_waiter", None)
        if waker is None or waker.done():
            self._wait.known = False
            return
        frames = frames_of(task.get_coro())
        known = _KNOWN.get(frames[-1].f_code) if frames else None
        if known is None:
            self.future(waker)
            return
        self._wait.futures.append(waker)
        try:
            for found in known(frames):
                self.future(found)
        except _UnknownError:
            self._wait.known = False

    def future(self, future: Any) -> None:
        if isinstance(future, CallAt):
            self._wait.calls.append(future)
        elif isinstance(future, Ref):
            self.all(_calls_behind(future._state))
        elif isinstance(future, asyncio.Task):
            self.task(future)
        elif isinstance(future, asyncio.tasks._GatheringFuture):  # type: ignore[attr-defined]  # private
            self._wait.futures.append(future)
            self.all(child for child in future._children if not child.done())
        elif isinstance(future, asyncio.Future) and (inner := _shielded(future)) is not None:
            self._wait.futures.append(future)
            self.future(inner)
        else:
            self._wait.known = False

    def all(self, futures: Iterable[object]) -> None:
        for future in futures:
            self.future(future)


Found: TypeAlias = Iterable["CallAt | asyncio.Future[Any]"]


def _calls_behind(state: Any) -> list[CallAt]:
    """The calls that a ref waits for."""
    if not isinstance(state, RefState) or state.settled:
        # The value is on its way.
        raise _UnknownError
    parts = state.parts()
    if parts is None:
        return [CallAt(state.producer, state.owner, state.number)]
    return [call for part in parts if not part.done() for call in _calls_behind(part._state)]


def _at_ref(frames: Frames) -> Found:
    return _calls_behind(frames[-1].f_locals["self"])


def _at_question(frames: Frames) -> Found:
    pulls = [frame.f_locals for frame in frames if frame.f_code is Transfer.pull.__code__]
    return [CallAt(pull["producer"], pull["owner"], pull["number"]) for pull in pulls]


def _at_stream(frames: Frames) -> Found:
    if len(frames) < 2 or frames[-2].f_code is not StreamState.next_item.__code__:
        # It waits for the end of a cancelled call, which has a time limit.
        raise _UnknownError
    stream: StreamState = frames[-1].f_locals["self"]
    if stream.consumption.opening:
        # It waits for another task to take an item.
        raise _UnknownError
    return [
        CallAt(
            stream.process.id if stream.connection is None else stream.connection.remote,
            stream.process.id,
            stream.number,
        )
    ]


def _at_task_group(frames: Frames) -> Found:
    return [task for task in frames[-1].f_locals["self"]._tasks if not task.done()]


def _at_wait(frames: Frames) -> Found:
    if frames[-1].f_locals["timeout"] is not None:
        # A wait with a timeout is not a deadlock.
        raise _UnknownError
    return [future for future in frames[-1].f_locals["fs"] if not future.done()]


def _at_wait_for(frames: Frames) -> Found:
    return [frames[-1].f_locals["fut"]]


def _at_queue(frames: Frames) -> Found:
    """The tasks that `as_completed` waits for; for another queue, the putter is not known."""
    caller = frames[-2] if len(frames) > 1 else None
    if caller is None or caller.f_code.co_name != "_wait_for_one" or not _is_pythons(caller):
        raise _UnknownError
    known = caller.f_locals
    if "self" in known:
        # Python 3.13 made an object of it.
        todo, timer = known["self"]._todo, known["self"]._timeout_handle
    else:
        added = _callback_into(known["done"])
        todo = cast("set[asyncio.Future[Any]]", _enclosed(added, "_on_completion", "todo"))
        timer = _enclosed(added, "_on_completion", "timeout_handle")
    if timer is not None:
        # As in `_at_wait`.
        raise _UnknownError
    return list(todo or ())


def _callback_into(queue: object) -> object:
    """What `as_completed` has a task do when that ends."""
    callbacks = (callback for task in asyncio.all_tasks() for callback, _ in getattr(task, "_callbacks", None) or ())
    return next((one for one in callbacks if _enclosed(one, "_on_completion", "done") is queue), None)


def _code(function: Any) -> types.CodeType:
    code: types.CodeType = function.__code__
    return code


# How to find what a task waits for, by the innermost of its frames.
_KNOWN: Final[dict[types.CodeType, Callable[[Frames], Found]]] = {
    _code(RefState.wait): _at_ref,
    _code(RefState.wait_settled): _at_ref,
    _code(Transfer._question): _at_question,
    _code(Transfer._locate_here): _at_question,
    _code(StreamState._wait_change): _at_stream,
    # Python 3.13 moved the body of `__aexit__`; 3.12 rewrote `wait_for` so that it waits as any coroutine does.
    _code(getattr(asyncio.TaskGroup, "_aexit", asyncio.TaskGroup.__aexit__)): _at_task_group,
    _code(asyncio.Queue.get): _at_queue,
    _code(asyncio.tasks._wait): _at_wait,  # type: ignore[attr-defined]  # private
    **({_code(asyncio.wait_for): _at_wait_for} if sys.version_info < (3, 12) else {}),
}


def _shielded(future: asyncio.Future[Any]) -> asyncio.Future[Any] | None:
    """What `asyncio.shield` shields, behind the future that it gave."""
    callbacks = [callback for callback, _ in getattr(future, "_callbacks", None) or ()]
    found = [_enclosed(callback, "_outer_done_callback", "inner") for callback in callbacks]
    return next((one for one in found if isinstance(one, asyncio.Future)), None)


def _enclosed(callback: Any, name: str, variable: str) -> object:
    """A variable of the function around one of asyncio's own callbacks."""
    code = getattr(callback, "__code__", None)
    if code is None or code.co_name != name or not code.co_filename.startswith(_PYTHONS):
        return None
    actors = dict(zip(code.co_freevars, callback.__closure__ or (), strict=True))
    try:
        return actors[variable].cell_contents
    except (KeyError, ValueError):
        return None
