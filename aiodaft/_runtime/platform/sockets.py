"""Sockets and descriptors of the operating system. A simulation has its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from contextlib import suppress


class Sockets:
    """Makes sockets and owns none."""

    def pair(self) -> tuple[socket.socket, socket.socket]:
        return socket.socketpair()

    def of_fd(self, fd: int) -> socket.socket:
        """The socket with a descriptor, which it owns from now on."""
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
            # What is there when one of them fails stays in the list.
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
