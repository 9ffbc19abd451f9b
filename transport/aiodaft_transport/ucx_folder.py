"""Where UCX makes its shared memory. Each file has a name for a few milliseconds, and is left behind if its maker is
killed in these; so it is made in a folder of its own, which whoever comes by removes once its maker is gone.

A lock says whether it is: the kernel drops it with the process, whatever ends that, and in whatever namespace it is.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Final

SHARED_MEMORY: Final = "/dev/shm"
_PREFIX: Final = "aiodaft-"


@contextmanager
def folder() -> Generator[str]:
    """A new folder in shared memory; afterwards it is gone, with all that is in it."""
    sweep()
    path, lock = _make()
    try:
        yield path
    finally:
        _remove(path)
        os.close(lock)


def sweep() -> None:
    """Remove the folders of processes that are gone."""
    names: list[str] = []
    with suppress(OSError):
        names = [name for name in os.listdir(SHARED_MEMORY) if name.startswith(_PREFIX)]
    for name in names:
        path = f"{SHARED_MEMORY}/{name}"
        # Its maker lives, it is another user's, or somebody was quicker.
        with suppress(OSError):
            lock = _lock(path, fcntl.LOCK_NB)
            _remove(path)
            os.close(lock)


def _make() -> tuple[str, int]:
    while True:
        path = f"{SHARED_MEMORY}/{_PREFIX}{os.urandom(8).hex()}"
        os.mkdir(path, mode=0o700)
        # Until it is locked it looks like one that was left.
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
