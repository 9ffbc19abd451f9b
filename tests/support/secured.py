"""Connections over TCP between two ends in this process, with and without TLS."""

from __future__ import annotations

import asyncio
import socket

from identities import identity

from aiodaft._runtime.connections.identity import SecureSocket, secure
from aiodaft_transport import Key

SESSION = Key(bytes(range(32)))


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection on the loopback interface, not blocking."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for sock in (one, other):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
    return one, other


async def secured_pair() -> tuple[SecureSocket, SecureSocket]:
    """Both ends of a connection with TLS: the one that connected, and the other one."""
    one, other = tcp_pair()
    client, server = await asyncio.gather(
        secure(one, identity(), SESSION, server=False), secure(other, identity(), SESSION, server=True)
    )
    return client, server


async def readable(sock: socket.socket) -> None:
    """Wait until an event loop would say that a socket is readable."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock.fileno(), ready.set)
    await ready.wait()
    loop.remove_reader(sock.fileno())


async def received(sock: SecureSocket, nbytes: int, buffer: bytearray | None = None) -> bytes:
    """That many bytes, or those there were before the end, read like `Connection` does."""
    buffer, data = buffer or bytearray(16 << 10), b""
    while len(data) < nbytes:
        await readable(sock)
        try:
            count, _, _, _ = sock.recvmsg_into([buffer], 100)
        except BlockingIOError:
            continue
        if not count:
            break
        data += buffer[:count]
    return data
