"""The handshake by which both ends of a connection between hosts come to trust each other."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Any, Final, NamedTuple

from aiodaft._protocol.connections.address import Address
from aiodaft_transport import HandshakeError, Key
from aiodaft_transport.handshake import MAGIC

# TCP notices a host that is gone: after 5 s when nothing is under way, after 10 s when something is.
_OPTIONS: Final = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    # Not every system has each of them, or gives it this name.
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (
            ("TCP_KEEPIDLE", 2),
            ("TCP_KEEPINTVL", 1),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", 10_000),
        )
        if hasattr(socket, name)
    ),
)
# The most milliseconds until TCP sends a packet again; else a short partition is felt for up to twice its length.
_RTO_MAX_MS: Final = 44


class Authenticated(NamedTuple):
    """A connection whose ends have proved the cluster key to each other.

    Attributes:
        sock: Not blocking. Nothing was read from it beyond the handshake; the receiver of this owns it.
        sender: The process that connected.
        to: The process that it wants to reach. The node that accepts hands the socket to it.
        session: The key of this connection, the same at both ends and for no other connection.
    """

    sock: socket.socket
    sender: str
    to: str
    session: Key


def configure(sock: socket.socket) -> None:
    """Set the options that each TCP connection of a cluster has. Before it connects, they also bound that."""
    sock.setblocking(False)
    for level, option, value in _OPTIONS:
        sock.setsockopt(level, option, value)
    # Linux 6.15.
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, 1000)


async def resolve(address: Address) -> list[tuple[int, int, int, str, Any]]:
    """The entries that `socket.getaddrinfo` finds, at least one; waits only for the name of a host.

    Raises:
        OSError: There is no such host.
    """
    try:
        return list(socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
    except socket.gaierror:
        found = await asyncio.get_running_loop().getaddrinfo(*address, type=socket.SOCK_STREAM)
        return list(found)


async def receive_message(sock: socket.socket, size: int, start: bytes = MAGIC) -> bytes:
    """Read a message of the handshake, and not a byte more.

    Raises:
        HandshakeError: The message does not begin with `start`; does not wait for the rest.
        ConnectionError: The connection ended.
    """
    loop = asyncio.get_running_loop()
    received = b""
    while len(received) < size:
        part = await loop.sock_recv(sock, size - len(received))
        if not part:
            raise ConnectionResetError(f"the other side ended the connection after {len(received)} of {size} bytes")
        received += part
        if received[: len(start)] != start[: len(received)]:
            raise HandshakeError("the other side does not speak this protocol")
    return received
