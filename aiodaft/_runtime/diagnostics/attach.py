"""How `aiodaft stack` reaches a running controller, in which nothing listens.

The command listens, on an abstract socket that is named after the fork server, and rings at that process by a signal;
the fork server tells the controller, which connects and writes. Both sides look at who the other one is (SO_PEERCRED),
and whatever is killed at whatever moment, no file is left, because there never was one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

from aiodaft._runtime.platform.tasks import logger

# Not SIGUSR1: one that nobody sends by accident.
DOORBELL: Final = signal.SIGRTMIN + 8 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1
_CREDENTIALS: Final = struct.Struct("3i")


def address(fork_server: int) -> str:
    """Where the command listens that has rung at a fork server."""
    return f"\0aiodaft-stack-{fork_server}"


def is_trusted(connection: socket.socket) -> bool:
    """Whether the other end belongs to this user, or to root, or this process is root's."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return uid in (os.geteuid(), 0) or os.geteuid() == 0


async def answer(fork_server: int, text: Callable[[], Coroutine[Any, Any, str]]) -> None:
    """Somebody has rung: connect, and write the text to them if it is for them to read."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, suppress(OSError):
        connection.setblocking(False)
        await loop.sock_connect(connection, address(fork_server))
        if not is_trusted(connection):
            logger.warning("somebody else's process wants to know what this one does: refused")
            return
        await loop.sock_sendall(connection, (await text()).encode("utf-8", "backslashreplace"))
