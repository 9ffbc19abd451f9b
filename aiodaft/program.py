"""Runtimes of programs that do not open one by `async with`: `run` for scripts, `start` and `stop` for notebooks."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiodaft._runtime.forks import leave_signals, no_more, when_forked
from aiodaft.runtime import Runtime, has_uvloop

__all__ = ["run", "start", "stop"]

T = TypeVar("T")

_started: Runtime | None = None


async def start(**options: Any) -> Runtime:
    """Open a runtime that stays open between notebook cells; one that was open is closed first.

    Takes the arguments of `Runtime`. An error of a ref that nobody holds is logged when it happens, and raised by
    `stop`, because there is no block that it could end.
    """
    global _started  # noqa: PLW0603 - a notebook has no better place
    await stop()
    runtime = Runtime(**options)
    await runtime.__aenter__()
    # The task is a cell's, which ends; there is nothing to cancel when something fails later.
    runtime.detach()
    _started = runtime
    return runtime


async def stop() -> None:
    """Close the runtime that `start` opened; nothing if there is none.

    Raises:
        RuntimeError: It was opened on a loop that runs in another thread.
        BaseExceptionGroup: Errors that nobody looked at.
    """
    global _started  # noqa: PLW0603 - as above
    runtime = _started
    if runtime is None:
        return
    if runtime.is_stranded:
        # A kernel, or `asyncio.run`, replaced the loop under it.
        _started = None
        runtime.abandon()
        return
    runtime.check_loop("the started runtime cannot be stopped")
    _started = None
    await runtime.aclose()


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """Run a coroutine on uvloop where it is installed, as `asyncio.run` does.

    The first Ctrl-C cancels `main`, so that scopes close; a second one ends at once. So do the first SIGTERM (with exit
    code 143) and a second one, unless the program handles them. None of them leaves a process.
    """
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
        terminated = True
        # The second one ends the process.
        loop.remove_signal_handler(signal.SIGTERM)
        task.cancel()

    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        loop.add_signal_handler(signal.SIGTERM, terminate)
        when_forked(leave_signals)
    try:
        return await main
    except asyncio.CancelledError:
        if terminated:
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        no_more(leave_signals)
