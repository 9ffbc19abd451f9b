"""The stacks of a process whose loop does not turn, or whose interpreter is held by C code: by a signal.

`faulthandler` writes them from inside the signal's handler, without the interpreter, into memory that the process has
set up for that; the node reads it through /proc. Nothing is written before somebody asks, and nothing is left.
"""

from __future__ import annotations

import asyncio
import faulthandler
import fcntl
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Final

# One of the signals that nobody else uses: programs have plans for SIGUSR1 and SIGUSR2.
DUMP: Final = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
_NAME: Final = "aiodaft stacks"
# How often, and at what interval in seconds, to look whether the dump is complete.
_LOOKS: Final = 50
_INTERVAL: Final = 0.02


def offer_dump() -> None:
    """Let the node ask this process for its stacks at any time."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(_NAME)
        # The reader empties it: what is written then has to go to the beginning.
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
        faulthandler.register(DUMP, file=fd, all_threads=True)


async def take_dump(pid: int, send: Callable[[int], object]) -> str:
    """The stacks of a process that has offered them; "" if it is stopped, or gone.

    Args:
        pid: The process.
        send: Sends it a signal.
    """
    fd = _open(pid)
    if fd is None:
        return ""
    try:
        os.ftruncate(fd, 0)
        send(DUMP)
        size = 0
        for _ in range(_LOOKS):
            # Nobody says when it is complete: it is when nothing more comes.
            await asyncio.sleep(_INTERVAL)
            before, size = size, os.fstat(fd).st_size
            if size and size == before:
                break
        return os.pread(fd, size, 0).decode("utf-8", "replace")
    finally:
        os.close(fd)


def _open(pid: int) -> int | None:
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for name in os.listdir(folder):
            if os.readlink(f"{folder}/{name}").startswith(f"/memfd:{_NAME}"):
                return os.open(f"{folder}/{name}", os.O_RDWR | os.O_CLOEXEC)
    return None
