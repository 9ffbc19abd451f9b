"""Where a command and a running program, in which nothing listens, meet."""

from __future__ import annotations

import signal
import socket
import struct
from typing import Final, NamedTuple

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


def other_end(connection: socket.socket) -> OtherEnd:
    """The process at the other end of a connection."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return OtherEnd(pid, uid)
