"""Where UCX makes its shared memory. Each file has a name for a few milliseconds, and is left behind if its maker is
killed in these; so it is made in a folder of its own, which whoever comes by removes once its maker is gone.

A lock says whether it is: the kernel drops it with the process, whatever ends that, and in whatever namespace it is.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

SHARED_MEMORY: Final = Path("/dev/shm")
_PREFIX: Final = "aiodaft-"


@contextmanager
def folder() -> Generator[Path]:
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
    for path in SHARED_MEMORY.glob(f"{_PREFIX}*"):
        # Its maker lives, it is another user's, or somebody was quicker.
        with suppress(OSError):
            lock = _lock(path, fcntl.LOCK_NB)
            _remove(path)
            os.close(lock)


def _make() -> tuple[Path, int]:
    while True:
        path = SHARED_MEMORY / f"{_PREFIX}{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        # Until it is locked it looks like one that was left.
        with suppress(FileNotFoundError):
            lock = _lock(path)
            if path.exists():
                return path, lock
            os.close(lock)


def _lock(path: Path, how: int = 0) -> int:
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | how)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _remove(path: Path) -> None:
    with suppress(OSError):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
