"""Entry points: `run` for scripts, `start` and `stop` for notebooks."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from aiodaft._runtime.platform.linux import fill_standard_streams, leave_signals, no_more, when_forked
from aiodaft.runtime import Runtime, check_asyncio_runs, has_uvloop

__all__ = ["run", "start", "stop"]

T = TypeVar("T")

# Seconds in which a SIGTERM is the same as the one before.
_SAME_SIGNAL: Final = 1.0

_started: Runtime | None = None
_options: dict[str, Any] = {}


def start(**options: Any) -> Coroutine[Any, Any, Runtime]:
    """Open a runtime that stays open between the cells of a notebook, or return the open one.

    An error that no code has seen is logged when it happens. It cancels no cell, and `stop` does not raise it.

    Args:
        options: The options of `Runtime`. `unhandled` is "log" by default.

    Raises:
        RuntimeError: The open runtime was started with other options, or on a loop in another thread; or no event loop
            of asyncio runs here.
    """
    return _Starting(_start(options))


class _Starting(Coroutine[Any, Any, Runtime]):
    """The coroutine of `start`, which says so where it is used as a runtime."""

    def __init__(self, coro: Coroutine[Any, Any, Runtime]) -> None:
        self._coro = coro

    def send(self, value: Any, /) -> Any:
        return self._coro.send(value)

    def throw(self, error: Any, value: Any = None, traceback: TracebackType | None = None, /) -> Any:
        return self._coro.throw(error, value, traceback)

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Generator[Any, Any, Runtime]:
        return self._coro.__await__()

    def __repr__(self) -> str:
        return "<aiodaft.start(), not awaited yet: `rt = await aiodaft.start()`>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"{self!r} has no attribute {name!r}")


async def _start(options: dict[str, Any]) -> Runtime:
    global _started, _options
    check_asyncio_runs()
    runtime = _started
    if runtime is not None and runtime._opened.is_stranded:
        runtime._opened.abandon()
    if runtime is None or runtime._opened.is_closed:
        runtime = Runtime(**{"unhandled": "log", **options})
        await runtime.__aenter__()
        _started, _options = runtime, options
        if threading.current_thread() is threading.main_thread():
            runtime._opened.process.tasks.create_task(_wake_at_signals(), name="wake at signals")
    runtime._opened.check_loop("the started runtime cannot be used")
    if options and options != _options:
        raise RuntimeError(
            f"a runtime is open already, started with {_listed(_options)}, not with {_listed(options)}: "
            "`await aiodaft.stop()` first, which ends its actors"
        )
    return runtime


async def _wake_at_signals() -> None:
    """Let signals wake the loop: without this, a kernel notices an interrupt when its loop turns for another reason."""
    reading, writing = socket.socketpair()
    with reading, writing:
        reading.setblocking(False)
        writing.setblocking(False)
        before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        try:
            # If there was one before, its loop is woken by signals already.
            while before == -1:
                await asyncio.get_running_loop().sock_recv(reading, 4096)
        finally:
            now = signal.set_wakeup_fd(before)
            if now != writing.fileno():
                # The loop has begun to handle signals meanwhile.
                signal.set_wakeup_fd(now)


def _listed(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r:.80}" for name, value in options.items()) or "no options"


async def stop() -> None:
    """Close the runtime that `start` opened, if there is one.

    Raises:
        RuntimeError: It was opened on a loop that runs in another thread.
        BaseExceptionGroup: Errors that no code has seen, if it was started with `unhandled="raise"`.
    """
    global _started  # noqa: PLW0603 - as above
    runtime = _started
    if runtime is None:
        return
    if runtime._opened.is_stranded:
        # The notebook's kernel, or `asyncio.run`, has replaced the loop.
        _started = None
        runtime._opened.abandon()
        return
    runtime._opened.check_loop("the started runtime cannot be stopped")
    _started = None
    await runtime.aclose()


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """Run a coroutine on uvloop where it is installed, as `asyncio.run` does.

    The first Ctrl-C cancels `main`, so that scopes close; the second ends the process at once. The first and second
    SIGTERM do the same (exit code 143), unless the program handles the signal; another one within a second of the first
    counts as the first, since engines may send it twice. No actor's process survives either.

    Raises:
        RuntimeError: An event loop runs here already, as in a notebook.
        TypeError: `main` is not a coroutine.
    """
    if not asyncio.iscoroutine(main):
        raise TypeError(f"aiodaft.run takes a coroutine, as in `aiodaft.run(main())`, not {main!r:.80}")
    if asyncio._get_running_loop() is not None:
        main.close()
        raise RuntimeError("an event loop runs here already: `await main()` in place of `aiodaft.run(main())`")
    fill_standard_streams()
    factory = None
    if has_uvloop():
        import uvloop  # noqa: PLC0415 - optional

        factory = uvloop.new_event_loop
    with asyncio.Runner(debug=debug, loop_factory=factory) as runner:
        return runner.run(_until_terminated(main))


async def _until_terminated(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; SIGTERM cancels it, as SIGINT does."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    terminated = False

    def terminate() -> None:
        nonlocal terminated
        # The loop hears of it also when the program, such as a server in it, has since set a handler of its own.
        if not terminated and signal.getsignal(signal.SIGTERM) is of_loop:
            terminated = True
            # Then the next one ends the process.
            loop.call_later(_SAME_SIGNAL, loop.remove_signal_handler, signal.SIGTERM)
            task.cancel()

    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        loop.add_signal_handler(signal.SIGTERM, terminate)
        of_loop = signal.getsignal(signal.SIGTERM)
        when_forked(leave_signals)
    try:
        return await main
    except asyncio.CancelledError:
        if terminated:
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        no_more(leave_signals)
