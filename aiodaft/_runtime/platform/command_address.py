"""The meeting point of a command and a running program, in which nothing listens."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from aiodaft._runtime.platform.linux import parent_of

# Sent to a fork server. Programs do not use it, unlike SIGUSR1.
VISIT: Final = signal.SIGRTMIN + 8 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1
_CREDENTIALS: Final = struct.Struct("3i")
_ROOT: Final = 0
# Names the file of a fork server in which a command says where it listens. Only the fork server's user and root reach
# it, by /proc, so that no stranger can take the command's place.
_BOARD: Final = "aiodaft-command"
_LONGEST: Final = 100


class OtherEnd(NamedTuple):
    pid: int
    uid: int


def open_board() -> int:
    return os.memfd_create(_BOARD, os.MFD_CLOEXEC)


@contextmanager
def asking(fork_server: int, address: str) -> Generator[None]:
    """Say where a command listens for the processes that a fork server leads to.

    Raises:
        BlockingIOError: Another command asks these.
        OSError: The fork server is gone, or belongs to another user.
    """
    with open(_open_board(fork_server, os.O_RDWR), "r+b", buffering=0) as board:
        fcntl.flock(board, fcntl.LOCK_EX | fcntl.LOCK_NB)
        board.truncate()
        board.write(address.encode())
        yield


def address(fork_server: int) -> str:
    with open(_open_board(fork_server, os.O_RDONLY), "rb", buffering=0) as board:
        return board.read(_LONGEST).decode()


def _open_board(fork_server: int, flags: int) -> int:
    folder = f"/proc/{fork_server}/fd"
    for fd in os.listdir(folder):
        with suppress(FileNotFoundError):
            if os.readlink(f"{folder}/{fd}").startswith(f"/memfd:{_BOARD} "):
                return os.open(f"{folder}/{fd}", flags | os.O_NONBLOCK | os.O_CLOEXEC)
    raise FileNotFoundError(f"process {fork_server} is no fork server of this release")


def debug_address(pid: int | None) -> str:
    """None: for all processes of this user."""
    return f"\0aiodaft-debug-user-{os.getuid()}" if pid is None else f"\0aiodaft-debug-{pid}"


def debug_addresses() -> list[str]:
    server = os.getppid()
    return [debug_address(pid) for pid in (os.getpid(), server, parent_of(server), None) if pid != 0]


def other_end(connection: socket.socket) -> OtherEnd:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return OtherEnd(pid, uid)


def may_debug(connection: socket.socket) -> bool:
    return other_end(connection).uid in {os.geteuid(), _ROOT}
