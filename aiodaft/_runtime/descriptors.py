"""Descriptors that come over a socket, beside the bytes."""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

_MAX: Final = 8
# What a read has to have room for.
SPACE: Final = socket.CMSG_SPACE(_MAX * array.array("i").itemsize)


class Descriptors:
    """Those that have come and were not taken yet. Owns them."""

    def __init__(self) -> None:
        self._fds: deque[int] = deque()

    def add(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        """Take over what came with a read."""
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self._fds.extend(fds)

    def take(self) -> int | None:
        """The next one, which is the caller's now; none if there is none."""
        return self._fds.popleft() if self._fds else None

    def close(self) -> None:
        """Close them all."""
        close_all(self._fds)
        self._fds.clear()


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors; those that are closed already are no error."""
    for fd in fds:
        with suppress(OSError):
            os.close(fd)
