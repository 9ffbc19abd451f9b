"""Looks once a second whether the loop of the program turns, and reports the code that keeps it from that."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from aiodaft._protocol.node.liveness import Stalls
from aiodaft._runtime.diagnostics.await_chains import thread_stack, users_line
from aiodaft._runtime.platform.exhaustion import exhausted
from aiodaft._runtime.platform.tasks import logger
from aiodaft._runtime.process import Process
from aiodaft_transport.system import start_thread

_PERIOD: Final = 1.0


class LoopWatch:
    """Watches the loop of a process from a thread of its own; actors are watched by their nodes.

    Args:
        process: The process, in the thread of its loop.
        is_awaited: Whether calls of this process are under way, so that a blocked loop delays something. Any thread.
        on_turn: Called once a second, on the loop.

    Raises:
        ResourceExhausted: The system refuses the thread.
    """

    def __init__(self, process: Process, is_awaited: Callable[[], bool], on_turn: Callable[[], object]) -> None:
        self._process = process
        self._is_awaited = is_awaited
        self._on_turn = on_turn
        self._loop_thread = threading.get_ident()
        # When a callback was scheduled on the loop; None once it has run.
        self._asked: float | None = None
        self._stalls = Stalls()
        self._over = threading.Event()
        try:
            self._thread = start_thread(self._watch, name="aiodaft watch")
        except OSError as error:
            raise exhausted(error, "the event loop of this program cannot be watched") from error

    def close(self) -> None:
        """End the thread, and wait for that."""
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
    """Whether this process is the kernel of a notebook, and has not only imported it."""
    kernel = sys.modules.get("ipykernel.kernelapp")
    return kernel is not None and bool(kernel.IPKernelApp.initialized())
