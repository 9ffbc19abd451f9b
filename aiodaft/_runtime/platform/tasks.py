"""Tasks with an owner: the only raw create_task in the project, but for that of calls (`eager_start`)."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import traceback
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from typing import Any, Final, TypeVar

from aiodaft._protocol.diagnostics.printing import cut
from aiodaft._runtime.platform.context import current_terms

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
