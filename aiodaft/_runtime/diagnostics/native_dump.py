"""The stacks of a process with a blocked loop, or with C code that holds the GIL: by a signal.

`faulthandler` writes them in the signal's handler, without the interpreter, into a memory file that the process made at
its start; the node, or a command of the same user, reads the file through /proc.
"""

from __future__ import annotations

import asyncio
import faulthandler
import fcntl
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

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
    """The stacks of a process that has called `offer_dump`; "" if it has not, is stopped, or has ended.

    Args:
        pid: The process.
        send: Sends it a signal.
    """
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
