"""The operating system's services for transports, substitutes where these are missing, and folders of a process."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Final

_ONE: Final = (1).to_bytes(8, "little")
_READ_SIZE: Final = 4096


def shares_memory() -> bool:
    """Processes can pass memory without a name, and no process can shrink the other's."""
    return hasattr(os, "memfd_create") and hasattr(os, "eventfd") and hasattr(fcntl, "F_ADD_SEALS")


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_thread(target: Callable[..., object], *args: object, name: str) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from error
    return thread


class Doorbell:
    """Wakes a thread that waits for descriptors. Owns its own: one where there are eventfds, else a pipe."""

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self.fd = self._button = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        else:
            self.fd, self._button = os.pipe()
            os.set_blocking(self.fd, False)
            os.set_blocking(self._button, False)

    def ring(self) -> None:
        # A pipe may be full: then it is readable.
        with suppress(BlockingIOError):
            os.write(self._button, _ONE)

    def heard(self) -> None:
        os.read(self.fd, _READ_SIZE)

    def close(self) -> None:
        for fd in {self.fd, self._button}:
            os.close(fd)


# A forked child has the mappings of its parent, and the kernel does not copy the pages of a file. If a reader forks,
# the memory that it has mapped must not be written again, because the child may read it.


class ForkCount:
    """Children that run no Python code before exec (`subprocess`) do not count."""

    value = 0

    def __init__(self) -> None:
        # Twice: another thread can map or unmap memory between the first hook and the fork itself.
        os.register_at_fork(before=self._add, after_in_parent=self._add)

    def _add(self) -> None:
        self.value += 1


@cache
def fork_count() -> ForkCount:
    # Hooks cannot be removed, so there is one per process.
    return ForkCount()


# Folders of one process each, which later processes remove if it was killed. A process locks its folder while it lives:
# the kernel releases the lock at its end, also in another PID namespace. UCX unlinks its files in one after a few
# milliseconds, unless its process is killed before.

SHARED_MEMORY: Final = "/dev/shm"
_PREFIX: Final = "aiodaft-"


@contextmanager
def folder(nbytes: int = 0, room: Callable[[], int] | None = None) -> Generator[str]:
    """Make a folder in shared memory with room for `nbytes` bytes, and remove it afterwards with its files.

    Raises:
        OSError: There is no room. UCX would not report that: it would use no shared memory, and reach no peer.
    """
    sweep_folders(SHARED_MEMORY, _PREFIX)
    free = (room or _room)()
    if free < nbytes:
        raise OSError(errno.ENOSPC, f"UCX needs {nbytes:,} bytes in {SHARED_MEMORY}, and {free:,} are free there")
    path, lock = make_folder(SHARED_MEMORY, _PREFIX)
    try:
        yield path
    finally:
        remove_folder(path)
        os.close(lock)


def sweep_folders(base: str = SHARED_MEMORY, prefix: str = _PREFIX) -> None:
    names: list[str] = []
    with suppress(OSError):
        names = [name for name in os.listdir(base) if name.startswith(prefix)]
    for name in names:
        path = f"{base}/{name}"
        # It is in use, belongs to another user, is a link, or was removed by another process.
        with suppress(OSError):
            lock = _lock(path, fcntl.LOCK_NB)
            remove_folder(path)
            os.close(lock)


def _room() -> int:
    found = os.statvfs(SHARED_MEMORY)
    # Without a limit on its size, it has no blocks.
    return found.f_bavail * found.f_frsize if found.f_blocks else sys.maxsize


def make_folder(base: str, prefix: str) -> tuple[str, int]:
    """Only this user can read it. Returns its path, and the descriptor that locks it."""
    while True:
        path = f"{base}/{prefix}{os.urandom(8).hex()}"
        os.mkdir(path, mode=0o700)
        try:
            lock = _lock(path)
        except FileNotFoundError:
            # Until it is locked, it looks like the folder of a process that has ended, and may be removed.
            continue
        except BaseException:
            remove_folder(path)
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


def remove_folder(path: str) -> None:
    # Without descriptors, nothing can be imported either.
    with suppress(OSError, ImportError):
        from shutil import rmtree  # noqa: PLC0415 - takes long to import

        rmtree(path, ignore_errors=True)
