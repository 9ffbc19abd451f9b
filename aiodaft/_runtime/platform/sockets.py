"""Sockets and descriptors of the operating system. A simulation has its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from aiodaft._runtime.platform.capabilities import keeps_messages_apart

# A message may have this many bytes where it is a datagram.
_LONGEST: Final = 8192


def message_pair() -> tuple[socket.socket, socket.socket]:
    """Connected sockets within this machine that keep messages apart.

    Datagrams, where there is nothing better: then neither end notices that the other one is closed.
    """
    if keeps_messages_apart():
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST)
    return pair


class Sockets:
    """Makes sockets and owns none."""

    def pair(self) -> tuple[socket.socket, socket.socket]:
        return socket.socketpair()

    def of_fd(self, fd: int) -> socket.socket:
        return socket.socket(fileno=fd)

    def dup(self, fd: int) -> int:
        return os.dup(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def dup_all(self, fds: Iterable[int]) -> list[int]:
        """Duplicates of descriptors.

        Raises:
            OSError: There is no room for all of them. None are left open.
        """
        copies: list[int] = []
        try:
            # Copies made before one fails stay in the list.
            copies.extend(map(self.dup, fds))
        except OSError:
            self.close_all(copies)
            raise
        return copies

    def close_all(self, fds: Iterable[int]) -> None:
        """Close descriptors; a closed descriptor is no error."""
        for fd in fds:
            with suppress(OSError):
                self.close(fd)
