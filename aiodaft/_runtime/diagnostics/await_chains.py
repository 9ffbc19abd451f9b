"""The suspended frames of tasks and threads, the calls that they wait for, and code that keeps a loop from turning.

Nothing is recorded while the program runs: a request reads the coroutines. Frames that cannot be read count as unknown.
"""

from __future__ import annotations

import asyncio
import faulthandler
import fcntl
import gc
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from aiodaft._protocol.diagnostics.failures import CallAt
from aiodaft._protocol.node.worker import Stalls
from aiodaft._runtime.objects.ref_state import RefState
from aiodaft._runtime.objects.ref_table import StreamState
from aiodaft._runtime.objects.transfer import Transfer
from aiodaft._runtime.platform.linux import exhausted
from aiodaft._runtime.platform.tasks import Deferred, logger
from aiodaft._runtime.process import Process
from aiodaft.ref import Awaiting, Ref
from aiodaft_transport.system import start_thread

_INSIDE: Final[dict[type, tuple[str, str]]] = {
    types.CoroutineType: ("cr_frame", "cr_await"),
    types.GeneratorType: ("gi_frame", "gi_yieldfrom"),
    types.AsyncGeneratorType: ("ag_frame", "ag_await"),
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
    """Two answers: the calls that end before a task, future or ref does, and the future that then wakes the task."""
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


# By the name of the innermost frame of a task: the calls that the task waits for.
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


# The stacks of a process with a blocked loop, or with C code that holds the GIL: on a signal, `faulthandler` writes
# them, without the interpreter, into a memory file that the node, or a command of the same user, reads through /proc.

# A signal that programs do not use, unlike SIGUSR1 and SIGUSR2.
DUMP: Final = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
_NAME: Final = "aiodaft stacks"
_STDERR: Final = 2
_LOOKS: Final = 50
_INTERVAL: Final = 0.02


class _Offers:
    def __init__(self) -> None:
        self._count = 0
        self._fd = -1
        self._lock = threading.Lock()

    def add(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == 1 and hasattr(os, "memfd_create"):
                fd = self._fd = os.memfd_create(_NAME)
                # The reader truncates it, and the next dump must begin at the start.
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
                faulthandler.register(DUMP, file=fd, all_threads=True)

    def remove(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0 and self._fd >= 0:
                # Without a handler, a signal that is on its way would end this process.
                faulthandler.register(DUMP, file=_STDERR)
                os.close(self._fd)
                self._fd = -1


_offers: Final = _Offers()


def offer_dump() -> None:
    _offers.add()


def withdraw_dump() -> None:
    _offers.remove()


def offers_dump(pid: int) -> bool:
    return _find(pid) is not None


async def take_dump(pid: int, send: Callable[[int], object]) -> str:
    """The stacks of a process that has called `offer_dump`; "" if it has not, is stopped, or has ended."""
    path = _find(pid)
    if path is None:
        return ""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        os.ftruncate(fd, 0)
        send(DUMP)
        size = 0
        for _ in range(_LOOKS):
            await asyncio.sleep(_INTERVAL)
            before, size = size, os.fstat(fd).st_size
            if size and size == before:
                break
        return os.pread(fd, size, 0).decode("utf-8", "replace")
    finally:
        os.close(fd)


def _find(pid: int) -> str | None:
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for name in os.listdir(folder):
            if os.readlink(f"{folder}/{name}").startswith(f"/memfd:{_NAME}"):
                return f"{folder}/{name}"
    return None


_PERIOD: Final = 1.0


class LoopWatch:
    """Watches the loop of a process from a thread of its own; actors are watched by their nodes.

    Args:
        is_awaited: Whether a blocked loop delays calls of this process. Any thread.
        on_turn: Called once a second, on the loop.
    """

    def __init__(self, process: Process, is_awaited: Callable[[], bool], on_turn: Callable[[], object]) -> None:
        self._process = process
        self._is_awaited = is_awaited
        self._on_turn = on_turn
        self._loop_thread = threading.get_ident()
        self._asked: float | None = None
        self._stalls = Stalls()
        self._over = threading.Event()
        try:
            self._thread = start_thread(self._watch, name="aiodaft watch")
        except OSError as error:
            raise exhausted(error, "the event loop of this program cannot be watched") from error

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_PERIOD):
            now = self._process.env.monotonic()
            if self._asked is None:
                self._asked = now
                self._process.call_soon(self._turned)
            elif self._process.loop.is_running():
                self._look(now, now - self._asked)

    def _turned(self) -> None:
        self._asked = None
        self._on_turn()

    def _look(self, now: float, lag: float) -> None:
        # Cells of a notebook may compute; the loop is that of its kernel. A debugger stops it on purpose.
        frames = thread_stack(self._loop_thread)
        if _is_kernel() or any(frame.f_globals.get("__name__") == "bdb" for frame in frames):
            return
        # Raised if the loop changes its calls at this moment, and so is not blocked.
        with suppress(RuntimeError):
            line = users_line(frames)
            if line and self._is_awaited() and self._stalls.is_due("", lag, now):
                logger.warning(
                    "the event loop of this program has not turned for %.1f s: %s. Calls under way, their answers and "
                    "cancellations wait for it. Await what takes long, or run it by asyncio.to_thread(...)",
                    lag,
                    line,
                )


def _is_kernel() -> bool:
    kernel = sys.modules.get("ipykernel.kernelapp")
    return kernel is not None and bool(kernel.IPKernelApp.initialized())
