"""Looks once a second whether the loop of the program turns, and reports the code that keeps it from that."""

from __future__ import annotations

import asyncio
import faulthandler
import fcntl
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from aiodaft._protocol.node.liveness import Stalls
from aiodaft._runtime.diagnostics.await_chains import thread_stack, users_line
from aiodaft._runtime.platform.linux import exhausted
from aiodaft._runtime.platform.tasks import logger
from aiodaft._runtime.process import Process
from aiodaft_transport.system import start_thread

# The stacks of a process with a blocked loop, or with C code that holds the GIL: by a signal.
#
# `faulthandler` writes them in the signal's handler, without the interpreter, into a memory file that the process made
# at its start; the node, or a command of the same user, reads the file through /proc.

# A signal that programs do not use, unlike SIGUSR1 and SIGUSR2.
DUMP: Final = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
_NAME: Final = "aiodaft stacks"
_STDERR: Final = 2
# The number of looks whether the dump is complete, and the seconds between two.
_LOOKS: Final = 50
_INTERVAL: Final = 0.02


class _Offers:
    """The file for the stacks of this process, kept while a part of it needs one."""

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
    """Undo `offer_dump`; the process stays prepared as long as others in it need it."""
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
        # It has ended meanwhile.
        return ""
    try:
        os.ftruncate(fd, 0)
        send(DUMP)
        size = 0
        for _ in range(_LOOKS):
            # It is complete when its size does not change.
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
