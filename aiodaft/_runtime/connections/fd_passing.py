"""Descriptors that are received over a socket, beside the bytes."""

from __future__ import annotations

import array
import errno
import os
import socket
from collections import deque
from typing import Final

from aiodaft._runtime.platform.sockets import Sockets

_MAX: Final = 8
# Room for ancillary data that a read needs.
SPACE: Final = socket.CMSG_SPACE(_MAX * array.array("i").itemsize)


class Descriptors:
    """Received descriptors that were not taken yet. Owns them.

    A read ends behind the bytes that descriptors were sent with, so those of one message come with one read.
    """

    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets
        # The descriptors of each message; None where this process had no room for all of them.
        self._came: deque[list[int] | None] = deque()

    def add(self, ancillary: list[tuple[int, int, bytes]], flags: int) -> None:
        fds = array.array("i")
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        if flags & socket.MSG_CTRUNC:
            self._sockets.close_all(fds)
            self._came.append(None)
        elif fds:
            self._came.append(list(fds))

    @property
    def some_came(self) -> bool:
        return bool(self._came)

    def take(self, count: int) -> list[int]:
        """Hand the descriptors of the next message to the caller.

        Raises:
            LookupError: Another number of them was received.
            OSError: This process had no room for them.
        """
        fds = self._came.popleft() if self._came else []
        if fds is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if len(fds) != count:
            self._sockets.close_all(fds)
            raise LookupError(f"{len(fds)} descriptors came, not {count}")
        return fds

    def close(self) -> None:
        while self._came:
            self._sockets.close_all(self._came.popleft() or ())
