"""The folders in which UCX makes files of shared memory. UCX unlinks each file after a few milliseconds; if its process
is killed before, the file stays. So each process has a folder of its own, and later processes remove it.

A process locks its folder while it lives: the kernel releases the lock at its end, also in another PID namespace.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Final

SHARED_MEMORY: Final = "/dev/shm"
_PREFIX: Final = "aiodaft-"


@contextmanager
def folder(nbytes: int = 0, room: Callable[[], int] | None = None) -> Generator[str]:
    """Make a folder in shared memory with room for `nbytes` bytes, and remove it afterwards with its files.

    Raises:
        OSError: There is no room. UCX would not report that: it would use no shared memory, and reach no peer.
    """
    sweep()
    free = (room or _room)()
    if free < nbytes:
        raise OSError(errno.ENOSPC, f"UCX needs {nbytes:,} bytes in {SHARED_MEMORY}, and {free:,} are free there")
    path, lock = _make()
    try:
        yield path
    finally:
        _remove(path)
        os.close(lock)


def sweep() -> None:
    """Remove the folders of processes that have ended."""
    names: list[str] = []
    with suppress(OSError):
        names = [name for name in os.listdir(SHARED_MEMORY) if name.startswith(_PREFIX)]
    for name in names:
        path = f"{SHARED_MEMORY}/{name}"
        # It is in use, belongs to another user, or was removed by another process.
        with suppress(OSError):
            lock = _lock(path, fcntl.LOCK_NB)
            _remove(path)
            os.close(lock)


def _room() -> int:
    """Bytes that are free in shared memory."""
    found = os.statvfs(SHARED_MEMORY)
    # Without a limit on its size, it has no blocks.
    return found.f_bavail * found.f_frsize if found.f_blocks else sys.maxsize


def _make() -> tuple[str, int]:
    while True:
        path = f"{SHARED_MEMORY}/{_PREFIX}{os.urandom(8).hex()}"
        os.mkdir(path, mode=0o700)
        # Until it is locked, it looks like the folder of a process that has ended.
        with suppress(FileNotFoundError):
            lock = _lock(path)
            if os.path.exists(path):
                return path, lock
            os.close(lock)


def _lock(path: str, how: int = 0) -> int:
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | how)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _remove(path: str) -> None:
    with suppress(OSError):
        for name in os.listdir(path):
            os.unlink(f"{path}/{name}")
        os.rmdir(path)
