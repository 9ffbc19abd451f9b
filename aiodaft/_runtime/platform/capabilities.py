"""The capabilities of this operating system. aiodaft is made for Linux; with less, it is good for development.

Nothing asks for the name of the system. The needs of transports are in `aiodaft_transport.system`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Final

from aiodaft._runtime.platform.linux import HAS_PRCTL, SEES_PROCESSES
from aiodaft_transport.system import shares_memory


@cache
def keeps_messages_apart() -> bool:
    # Some systems know the name and refuse the socket.
    try:
        for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET):
            end.close()
    except (AttributeError, OSError):
        return False
    return True


@cache
def has_fork_server() -> bool:
    return HAS_PRCTL and keeps_messages_apart()


def can_be_asked() -> bool:
    return SEES_PROCESSES and hasattr(socket, "SO_PEERCRED") and has_fork_server()


def missing() -> dict[str, str]:
    """The capabilities that this system lacks, and their effects; nothing on Linux."""
    followed = {
        "fork server": (
            has_fork_server(),
            "each process of actors is a new interpreter, which takes longer to start; programs that an actor started "
            "end with it unless they have left its process group",
        ),
        "shared memory": (shares_memory(), "values travel over `tcp` also between processes of this machine"),
        "/proc": (
            SEES_PROCESSES,
            "a process that is stopped is reported and not killed, errors do not say whether the kernel killed one for "
            "want of memory, and `rt.stack()` does not show where C code blocks a process",
        ),
        "commands": (
            can_be_asked(),
            "`aiodaft ps`, `top`, `stack`, `logs`, `trace`, `memory`, `kill` and `debug` cannot ask programs: use "
            "`rt.overview()`, `rt.trace()` or the dashboard",
        ),
        "CPU affinity": (
            hasattr(os, "sched_getaffinity"),
            "`Runtime()` offers all CPUs: say `Runtime(cpus=...)` for less",
        ),
    }
    return {what: so for what, (is_there, so) in followed.items() if not is_there}


# A message may have this many bytes where it is a datagram.
_LONGEST: Final = 8192


def message_pair() -> tuple[socket.socket, socket.socket]:
    """Connected sockets within this machine that keep messages apart.

    Where they are datagrams, neither end notices that the other one is closed.
    """
    if keeps_messages_apart():
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST)
    return pair


class Sockets:
    def pair(self) -> tuple[socket.socket, socket.socket]:
        return socket.socketpair()

    def of_fd(self, fd: int) -> socket.socket:
        return socket.socket(fileno=fd)

    def dup(self, fd: int) -> int:
        return os.dup(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def dup_all(self, fds: Iterable[int]) -> list[int]:
        """Raises OSError: there is no room for all of them; none are left open."""
        copies: list[int] = []
        try:
            # Copies made before one fails stay in the list.
            copies.extend(map(self.dup, fds))
        except OSError:
            self.close_all(copies)
            raise
        return copies

    def close_all(self, fds: Iterable[int]) -> None:
        for fd in fds:
            with suppress(OSError):
                self.close(fd)
