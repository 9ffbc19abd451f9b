"""Files that only this user can read."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager


def private(path: str, flags: int) -> int:
    """The `opener` of a file that only this user can read, if it is made; one that is there keeps its mode."""
    return os.open(path, flags, 0o600)


@contextmanager
def private_file(name: str, content: bytes) -> Generator[str]:
    """The path of a file that only this user can read, for as long as the block lasts.

    It lies in memory, without a name in any folder, and ends with this process, if the system has such files. Else it
    is a temporary file.
    """
    if hasattr(os, "memfd_create"):
        fd, path = os.memfd_create(name, os.MFD_CLOEXEC), ""
        os.fchmod(fd, 0o600)
    else:
        import tempfile  # noqa: PLC0415 - takes long to import

        fd, path = tempfile.mkstemp(prefix=f"{name}-")
    try:
        with open(fd, "wb", buffering=0) as file:
            file.write(content)
            yield path or f"/proc/{os.getpid()}/fd/{fd}"
    finally:
        if path:
            os.unlink(path)
