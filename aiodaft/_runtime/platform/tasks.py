"""Tasks with an owner, those of calls, and their terms: a deadline, a trace. Here is the only raw create_task."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import traceback
from asyncio.tasks import _enter_task, _leave_task
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context, ContextVar, copy_context
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from aiodaft._protocol.connections.messages import SentTerms
from aiodaft._protocol.diagnostics.printing import cut
from aiodaft._protocol.diagnostics.trace import Event, TraceContext
from aiodaft.exceptions import DaftError, DeadlineExceeded, RemoteProtocolError


class Recorder:
    """The first events of a process, as many as there is room for. Safe in any thread.

    Args:
        limit: Later events are only counted.
        before: Another recorder, which goes on meanwhile.
    """

    def __init__(self, now: Callable[[], float], limit: int, before: Recorder | None = None) -> None:
        self.now = now
        self.events: list[Event] = []
        self.dropped = 0
        self.before = before
        self._limit = limit

    def add(self, event: Event) -> None:
        if self.before is not None:
            self.before.add(event)
        if len(self.events) < self._limit:
            self.events.append(event)
        else:
            self.dropped += 1


_MICROSECONDS: Final = 1e6


class Terms(NamedTuple):
    deadline: float | None = None
    trace: TraceContext | None = None


# Without terms (None) a call pays nothing.
current_terms: ContextVar[Terms | None] = ContextVar("aiodaft_current_terms", default=None)


class under:  # noqa: N801 - reads as a word of the language: `with under(terms)`
    __slots__ = ("_terms", "_token")

    def __init__(self, terms: Terms | None) -> None:
        self._terms = terms

    def __enter__(self) -> None:
        self._token = current_terms.set(self._terms)

    def __exit__(self, *error: object) -> None:
        current_terms.reset(self._token)


def terms_of(deadline: float | None, trace: TraceContext | None) -> Terms | None:
    return None if deadline is None and trace is None else Terms(deadline, trace)


def deadline_of(terms: Terms | None) -> float | None:
    return None if terms is None else terms.deadline


def trace_of(terms: Terms | None) -> TraceContext | None:
    return None if terms is None else terms.trace


def exceeded(late: str, error: TimeoutError) -> DeadlineExceeded:
    call = None if error.__context__ is None else error.__context__.__cause__
    if isinstance(call, DaftError):
        return DeadlineExceeded(f"{late}: {call}", executed=call.executed)
    return DeadlineExceeded(late)


def sent_terms(terms: Terms, clock: Callable[[], float]) -> SentTerms:
    """The terms in a message. The time is rounded up, so that a deadline passes first where it was set."""
    deadline, trace = terms
    left = None if deadline is None else max(0, math.ceil((deadline - clock()) * _MICROSECONDS))
    return left if trace is None else (left, *trace)


def received_terms(sent: int | tuple[Any, ...], clock: Callable[[], float]) -> Terms:
    if not isinstance(sent, tuple):
        return Terms(clock() + sent / _MICROSECONDS)
    match sent:
        case (int() | None as left, str() as traceparent, str() as tracestate, str() as baggage):
            deadline = None if left is None else clock() + left / _MICROSECONDS
            return Terms(deadline, TraceContext(traceparent, tracestate, baggage))
    raise RemoteProtocolError("a call came with a trace that is none")


logger = logging.getLogger("aiodaft")

T = TypeVar("T")

# Called for every call and item. Before 3.12 it is Python code, which takes three times as long as its table.
current_task: Final[Callable[[asyncio.AbstractEventLoop], asyncio.Task[Any] | None]] = (
    asyncio.current_task if sys.version_info >= (3, 12) else asyncio.tasks._current_tasks.get  # type: ignore[attr-defined]  # private
)


def may_step(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether tasks may take steps in other callbacks than their own.

    Not in debug mode, where the loop logs slow callbacks. Nor with nest_asyncio (in notebooks), where a task may run
    the loop inside of a callback, which then could not be called again.
    """
    return not (loop.get_debug() or hasattr(loop, "_nest_patched"))


class TaskOwner:
    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: set[asyncio.Task[Any]] = set()

    def create_task(self, coro: Coroutine[Any, Any, T], /, *, name: str) -> asyncio.Task[T]:
        """Start a task that ends at the latest with its owner; its error is logged."""
        task = self.start(coro, name=name)
        task.add_done_callback(self._report)
        return task

    def start(self, coro: Coroutine[Any, Any, T], /, *, name: str) -> asyncio.Task[T]:
        """Start a task for a caller that takes its result or error.

        The caller's deadline and trace are not those of the task, which also works for others, or cleans up.
        """
        context = copy_context()
        context.run(current_terms.set, None)
        task = asyncio.get_running_loop().create_task(coro, name=f"{self._name}: {name}", context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def start_ahead(self, coro: Coroutine[Any, Any, T], /, *, name: str) -> asyncio.Task[T]:
        """The result may never be taken; its error is then dropped."""
        task = self.start(coro, name=name)
        task.add_done_callback(_look_at_error)
        return task

    def _report(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log_error(f"{task.get_name()} failed", error)

    async def aclose(self) -> None:
        """May block while a task cleans up."""
        current = asyncio.current_task()
        while tasks := [task for task in self._tasks if task is not current]:
            try:
                # A task that is cancelled before its first step does not clean up.
                await asyncio.sleep(0)
            finally:
                for task in tasks:
                    task.cancel()
            await asyncio.wait(tasks)


def _look_at_error(task: asyncio.Task[Any]) -> None:
    # asyncio logs errors that no code has retrieved.
    if not task.cancelled():
        task.exception()


def shield_from_anyio() -> AbstractContextManager[object]:
    """A scope in which an enclosing anyio scope does not cancel again and again.

    anyio cancels by level: it cancels each await inside a cancelled scope, so that a cleanup could never wait. Without
    anyio in the process there is no such scope.
    """
    anyio = sys.modules.get("anyio")
    return nullcontext() if anyio is None else anyio.CancelScope(shield=True)


async def wait_through(
    future: asyncio.Future[Any], hasten: Callable[[], object] = lambda: None
) -> asyncio.CancelledError | None:
    """Wait for a future that must not be cancelled; returns the last cancellation."""
    cancelled: asyncio.CancelledError | None = None
    with shield_from_anyio():
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                if cancelled is None:
                    hasten()
                cancelled = error
    return cancelled


async def see_through(future: asyncio.Future[T], hasten: Callable[[], object] = lambda: None) -> T:
    cancelled = await wait_through(future, hasten)
    if cancelled is not None:
        if not future.cancelled():
            # Its error is not said to be unseen: its waiter was told to stop waiting.
            future.exception()
        raise cancelled
    return future.result()


def run_through(coro: Coroutine[Any, Any, T] | Generator[Any, Any, T]) -> T:
    try:
        coro.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a step that must not suspend did")


def wait_shielded(future: asyncio.Future[Any]) -> Generator[Any, None, None]:
    """Wait for a future after a cancellation; another cancellation ends the waiting."""
    with shield_from_anyio():
        yield from future.__await__()


_MAX_TEXT: Final = 4 << 10
# Begins each line of a text but the first, so that none of them looks like a line of the log.
_MARGIN: Final = "  | "


def log_error(what: str, error: BaseException, level: int = logging.ERROR) -> None:
    if not logger.isEnabledFor(level):
        return
    file, line, function, _ = logger.findCaller(stacklevel=2)
    info = (type(error), error, error.__traceback__)
    record = logger.makeRecord(logger.name, level, file, line, "%s", (what,), info, function)
    # Formatters use this text instead of their own.
    record.exc_text = _MARGIN + printable(text_of(error))
    logger.handle(record)


def text_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception as problem:  # noqa: BLE001 - a user's __str__ may raise anything
        return f"<its traceback cannot be had: {type(problem).__name__}>"


def printable(text: str) -> str:
    """A text of another process for the log: without control characters, indented, and cut in the middle."""
    return f"\n{_MARGIN}".join(map(_escape, cut(text, _MAX_TEXT).rstrip("\n").split("\n")))


def _escape(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)


def private(path: str, flags: int) -> int:
    """The `opener` of a file that only this user can read, if it makes it."""
    return os.open(path, flags, 0o600)


@contextmanager
def private_file(name: str, content: bytes) -> Generator[str]:
    """The path of a file that only this user can read, for as long as the block lasts.

    It lies in memory, without a name in any folder, if the system has such files; else it is a temporary file.
    """
    if hasattr(os, "memfd_create"):
        fd, path = os.memfd_create(name, os.MFD_CLOEXEC), ""
        os.fchmod(fd, 0o600)
    else:
        import tempfile  # noqa: PLC0415 - takes long to import

        fd, path = tempfile.mkstemp(prefix=f"{name}-")
    try:
        with open(fd, "wb", buffering=0) as file:
            file.write(content)
            yield path or f"/proc/{os.getpid()}/fd/{fd}"
    finally:
        if path:
            os.unlink(path)


# Wakes tasks that await refs in the turn of the loop in which the values come, right after the messages: a plain future
# would wake them in the next turn, and a turn takes longer than the handling of a small answer.


class Wakeup(asyncio.Future[None]):
    """The future of one `await` of a ref. It has one waiting task, which `Wakeups` continues."""

    # The task's wakeup, removed when it is called, because the task refers to this future.
    _callback: Callable[[Any], object] | None = None
    _context: Context | None = None

    def __init__(self, wakeups: Wakeups) -> None:
        super().__init__(loop=wakeups.loop)
        self._wakeups = wakeups

    def wake(self) -> None:
        if not self.done():
            self.set_result(None)
            self._wakeups.add(self)

    def go_on(self) -> None:
        callback, context = self._callback, self._context
        if callback is not None and context is not None:
            self._callback = None
            context.run(callback, self)

    def go_on_soon(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            self._wakeups.loop.call_soon(callback, self, context=self._context)

    def set_exception(self, error: type | BaseException, /) -> None:
        super().set_exception(error)
        self.go_on_soon()

    def cancel(self, msg: Any = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled:
            self.go_on_soon()
        return cancelled

    def add_done_callback(self, callback: Callable[[Any], object], /, *, context: Context | None = None) -> None:
        self._callback = callback
        # Not `or`: an empty context is false.
        self._context = copy_context() if context is None else context
        if self.done():
            self.go_on_soon()

    def remove_done_callback(self, callback: Callable[[Any], object], /) -> int:
        if self._callback != callback:
            return 0
        self._callback = None
        return 1


class Wakeups:
    """The tasks of one process that are to be woken.

    Attributes:
        collecting: Set by a callback of the loop that calls `run` after it has handled messages.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.collecting = False
        self.due: deque[Wakeup] = deque()

    def add(self, wakeup: Wakeup) -> None:
        if self.collecting and may_step(self.loop):
            self.due.append(wakeup)
        else:
            wakeup.go_on_soon()

    def run(self) -> None:
        due = self.due
        try:
            while due:
                due.popleft().go_on()
        finally:
            if due:
                # SystemExit or KeyboardInterrupt passes, and may be caught outside.
                self.loop.call_soon(self.run)


# Starts calls at once: a coroutine that never waits ends without a task of its own, which would often cost more.
# A parked task is kept ready. It is the current task while a coroutine takes its first step. If the coroutine waits,
# the task goes on with it. (With eager tasks of Python 3.12, each coroutine costs a task.)


class Started(Protocol):
    task: asyncio.Task[None] | None
    # Default: a copy of the starter's context.
    context: Context | None


class Starter:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._spare: Spare | None = None

    def start(self, call: Started, coro: Coroutine[Any, Any, None], *, at_once: bool = True) -> None:
        """Run the coroutine of a call until it waits for the first time, in a context of its own.

        With `at_once` False, or inside of a task, which must not be interrupted, it starts in its turn like any task.
        """
        loop = self._loop
        if not (at_once and may_step(loop)) or current_task(loop) is not None:
            call.task = loop.create_task(coro, context=call.context)
            return
        spare = self._spare
        if spare is None or spare.is_spoilt:
            spare = self._spare = Spare(loop)
        # Not `or`: an empty context is false.
        context = copy_context() if call.context is None else call.context
        task = call.task = spare.task
        _enter_task(loop, task)
        try:
            awaited = context.run(coro.send, None)
        except StopIteration:
            return
        finally:
            _leave_task(loop, task)
        self._spare = None
        spare.runs.go_on(coro, context, awaited)

    def close(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.task.cancel()


class Spare:
    """A parked task and its coroutine, without a cycle."""

    __slots__ = ("runs", "task")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.runs = Deferred(loop)
        self.task: asyncio.Task[None] = loop.create_task(self.runs, name="aiodaft call")

    @property
    def is_spoilt(self) -> bool:
        """Cancelled with all tasks of the loop, or by an earlier call that had it."""
        # No public method says that a task will be cancelled before its first step.
        task: Any = self.task
        return bool(task._must_cancel) or self.runs.parked.done()


class Deferred(Coroutine[Any, Any, None]):
    """The coroutine of a parked task: waits until it gets a coroutine that has started, and continues that."""

    __slots__ = ("_awaited", "_context", "_fresh", "coro", "parked")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.coro: Coroutine[Any, Any, None] | None = None
        self._context: Context
        # The first future that the coroutine waits for.
        self._awaited: asyncio.Future[Any] | None = None
        self._fresh = False
        self.parked: asyncio.Future[None] = loop.create_future()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.coro, name)

    def go_on(self, coro: Coroutine[Any, Any, None], context: Context, awaited: asyncio.Future[Any] | None) -> None:
        """None: it waits for the next turn of the loop."""
        if asyncio.isfuture(awaited):
            # As tasks do, because other tasks may wait for it before this one gets it.
            awaited._asyncio_future_blocking = False
        self.coro, self._context, self._awaited, self._fresh = coro, context, awaited, True
        if not self.parked.done():
            self.parked.set_result(None)

    def send(self, value: None) -> Any:
        if self.coro is None:
            return next(self.parked.__await__())
        if self._fresh:
            awaited = self._take_awaited()
            if awaited is not None:
                return awaited
        return self._context.run(self.coro.send, value)

    def throw(self, kind: Any, error: BaseException | object = None, traceback: TracebackType | None = None, /) -> Any:
        thrown = kind if isinstance(kind, BaseException) else kind() if error is None else error
        assert isinstance(thrown, BaseException)
        if self.coro is None:
            self.parked.cancel()
            raise thrown
        awaited = self._take_awaited()
        # As tasks do: cancel the future, which then raises the same message here.
        if asyncio.isfuture(awaited) and isinstance(thrown, asyncio.CancelledError) and awaited.cancel(*thrown.args):
            return awaited
        try:
            return self._context.run(self.coro.throw, thrown)
        finally:
            # Breaks a cycle: the error's frames lead here.
            del kind, error, thrown

    def _take_awaited(self) -> Any:
        awaited, self._awaited, self._fresh = self._awaited, None, False
        if asyncio.isfuture(awaited):
            awaited._asyncio_future_blocking = True
        return awaited

    def close(self) -> None:
        if self.coro is not None:
            self.coro.close()

    def __await__(self) -> Any:
        raise TypeError("only a task runs this")
