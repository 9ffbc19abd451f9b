"""How `aiodaft stack` reaches a running controller, in which nothing listens.

The command listens on an abstract socket that is named after the fork server, and sends the fork server a signal. The
fork server tells the controller, which connects and writes the stacks. Both ends check the other's user (SO_PEERCRED).
There is no file, so none is left if a process is killed.
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

# A signal that programs do not use, unlike SIGUSR1.
STACK_SIGNAL: Final = signal.SIGRTMIN + 8 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1
_CREDENTIALS: Final = struct.Struct("3i")


def address(fork_server: int) -> str:
    """The address on which the command listens for a fork server's controller."""
    return f"\0aiodaft-stack-{fork_server}"


def is_trusted(connection: socket.socket) -> bool:
    """Whether the other end belongs to this user or to root, or this process is root."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return uid in (os.geteuid(), 0) or os.geteuid() == 0


async def answer(fork_server: int, text: Callable[[], Coroutine[Any, Any, str]]) -> None:
    """Connect to the command, and write the text if the command's user may read it."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, suppress(OSError):
        connection.setblocking(False)
        await loop.sock_connect(connection, address(fork_server))
        if not is_trusted(connection):
            logger.warning("the process of another user asked for the stacks of this one: refused")
            return
        await loop.sock_sendall(connection, (await text()).encode("utf-8", "backslashreplace"))
