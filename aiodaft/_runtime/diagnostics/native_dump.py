"""The stacks of a process with a blocked loop, or with C code that holds the GIL: by a signal.

`faulthandler` writes them in the signal's handler, without the interpreter, into a memory file that the process made at
its start; the node reads the file through /proc.
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

# A signal that programs do not use, unlike SIGUSR1 and SIGUSR2.
DUMP: Final = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
_NAME: Final = "aiodaft stacks"
# The number of looks whether the dump is complete, and the seconds between two.
_LOOKS: Final = 50
_INTERVAL: Final = 0.02


def offer_dump() -> None:
    """Prepare this process for `take_dump`."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(_NAME)
        # The reader truncates it, and the next dump must begin at the start.
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
        faulthandler.register(DUMP, file=fd, all_threads=True)


async def take_dump(pid: int, send: Callable[[int], object]) -> str:
    """The stacks of a process that has called `offer_dump`; "" if it is stopped or has ended.

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
            # It is complete when its size does not change.
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
