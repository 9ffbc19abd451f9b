"""Where a command and a running program, in which nothing listens, meet."""

from __future__ import annotations

import os
import signal
import socket
import struct
from typing import Final, NamedTuple

from aiodaft._runtime.platform.linux import parent_of

# Sent to a fork server. Programs do not use it, unlike SIGUSR1.
VISIT: Final = signal.SIGRTMIN + 8 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1
_CREDENTIALS: Final = struct.Struct("3i")


class OtherEnd(NamedTuple):
    """The process at the other end of a connection, as the kernel knows it."""

    pid: int
    uid: int


def address(fork_server: int) -> str:
    """The address on which a command listens for the processes that a fork server leads to."""
    return f"\0aiodaft-command-{fork_server}"


def debug_address(pid: int | None) -> str:
    """The address on which `aiodaft debug` listens for a process; None: for all of this user."""
    return f"\0aiodaft-debug-user-{os.getuid()}" if pid is None else f"\0aiodaft-debug-{pid}"


def debug_addresses() -> list[str]:
    """Those for this worker: its own, that of its fork server, of what started that, and of the user."""
    server = os.getppid()
    return [debug_address(pid) for pid in (os.getpid(), server, parent_of(server), None) if pid != 0]


def other_end(connection: socket.socket) -> OtherEnd:
    """The process at the other end of a connection."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return OtherEnd(pid, uid)


def may_debug(connection: socket.socket) -> bool:
    """Whether the other end of a debugger's line belongs to this user or to root, or this process is root."""
    return other_end(connection).uid in {os.geteuid(), 0} or os.geteuid() == 0
