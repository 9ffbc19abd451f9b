"""The sockets that torch.distributed opens in this process, and how to end all that waits for them.

One end of each connection of gloo, or of the store, has been accepted by a listener of the process that it leads to. If
each member shuts down the connections that its listeners have accepted, all that waits for data ends, at every member.

In gloo one of two members waits until the other one connects, for `patience`, also if that one is dead. So this process
connects in its place. Each pair of gloo has a number at its listener, which the member that connects sends.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final, NamedTuple

from aiodaft._runtime.platform.linux import SEES_PROCESSES

# The first bytes that gloo reads of a new connection: the number of the pair that it is for.
_PAIR: Final = struct.Struct("=q")
# Seconds that a connection inside this machine may take.
_CONNECT_WITHIN: Final = 1.0
# The folder in which the system shows the descriptors of a process.
_DESCRIPTORS: Final = "/proc/self/fd" if SEES_PROCESSES else "/dev/fd"


class TorchSockets:
    """The sockets that this process opens from now on.

    Args:
        size: The number of members.

    Raises:
        OSError: There is no descriptor to look for those that are open.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._before = frozenset(_sockets().values())
        # The pairs to which this process has connected in the place of others. gloo keeps each connection, used or not.
        self._given: set[tuple[str, int, int]] = set()
        # The port at which the store of torch listens, if that is here: it knows no pairs.
        self.store_port: int | None = None

    def shut(self) -> None:
        """End the waits for them. Sockets that torch opens later, or a lack of descriptors, need another call."""
        with suppress(OSError), self._opened() as (listeners, accepted):
            for connection in accepted:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            for address in {listener.getsockname()[:2] for listener in listeners}:
                if address[1] != self.store_port:
                    self._connect_pairs(address)

    def _connect_pairs(self, address: tuple[str, int]) -> None:
        for pair in range(self._size):
            if (*address, pair) not in self._given:
                with suppress(OSError), socket.create_connection(address, _CONNECT_WITHIN) as connection:
                    connection.sendall(_PAIR.pack(pair))
                    self._given.add((*address, pair))

    @contextmanager
    def _opened(self) -> Generator[_Opened]:
        with ExitStack() as stack:
            found: list[socket.socket] = []
            for fd, inode in _sockets().items():
                if inode not in self._before:
                    with suppress(OSError):
                        found.append(stack.enter_context(socket.socket(fileno=os.dup(fd))))
            found = [sock for sock in found if sock.family in {socket.AF_INET, socket.AF_INET6}]
            listeners = [sock for sock in found if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]
            ports = {sock.getsockname()[1] for sock in listeners}
            accepted = [sock for sock in found if sock not in listeners and sock.getsockname()[1] in ports]
            yield _Opened(listeners, accepted)


class _Opened(NamedTuple):
    listeners: list[socket.socket]
    accepted: list[socket.socket]


def _sockets() -> dict[int, int]:
    found: dict[int, int] = {}
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found
