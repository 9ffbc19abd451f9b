"""Folders of one process each, which later processes remove if it was killed.

A process locks its folder while it lives: the kernel releases the lock at its end, also in another PID namespace. UCX
makes files of shared memory in one, and unlinks each after a few milliseconds, unless its process is killed before.
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
    sweep(SHARED_MEMORY, _PREFIX)
    free = (room or _room)()
    if free < nbytes:
        raise OSError(errno.ENOSPC, f"UCX needs {nbytes:,} bytes in {SHARED_MEMORY}, and {free:,} are free there")
    path, lock = make(SHARED_MEMORY, _PREFIX)
    try:
        yield path
    finally:
        remove(path)
        os.close(lock)


def sweep(base: str = SHARED_MEMORY, prefix: str = _PREFIX) -> None:
    """Remove the folders in `base` of processes that have ended; their names begin with `prefix`."""
    names: list[str] = []
    with suppress(OSError):
        names = [name for name in os.listdir(base) if name.startswith(prefix)]
    for name in names:
        path = f"{base}/{name}"
        # It is in use, belongs to another user, is a link, or was removed by another process.
        with suppress(OSError):
            lock = _lock(path, fcntl.LOCK_NB)
            remove(path)
            os.close(lock)


def _room() -> int:
    found = os.statvfs(SHARED_MEMORY)
    # Without a limit on its size, it has no blocks.
    return found.f_bavail * found.f_frsize if found.f_blocks else sys.maxsize


def make(base: str, prefix: str) -> tuple[str, int]:
    """Make a folder in `base` that only this user can read; returns its path, and the descriptor that locks it."""
    while True:
        path = f"{base}/{prefix}{os.urandom(8).hex()}"
        os.mkdir(path, mode=0o700)
        try:
            lock = _lock(path)
        except FileNotFoundError:
            # Until it is locked, it looks like the folder of a process that has ended, and may be removed.
            continue
        except BaseException:
            remove(path)
            raise
        if os.path.exists(path):
            return path, lock
        os.close(lock)


def _lock(path: str, how: int = 0) -> int:
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | how)
    except BaseException:
        os.close(lock)
        raise
    return lock


def remove(path: str) -> None:
    # Without descriptors, nothing can be imported either.
    with suppress(OSError, ImportError):
        from shutil import rmtree  # noqa: PLC0415 - takes long to import

        rmtree(path, ignore_errors=True)
