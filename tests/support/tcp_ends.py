"""Either end of a stream, spoken by hand: consumers that misbehave, and producers that end."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

from ends import LocalPair, tcp_pair

from aiodaft_transport import Grant

# A request: id of a grant, where the part begins, its bytes.
REQUEST: Final = struct.Struct("<QQQ")
# A reply: bytes of the whole block.
REPLY: Final = struct.Struct("<Q")


def request(grant: Grant, start: int = 0, nbytes: int | None = None) -> bytes:
    """A consumer's request for a part of a block, or all of it."""
    return REQUEST.pack(int(grant[3]), start, int(grant[2]) if nbytes is None else nbytes)


async def receive(stream: socket.socket, nbytes: int) -> bytes:
    """That many bytes, or those there were before the end."""
    loop, received = asyncio.get_running_loop(), b""
    while len(received) < nbytes:
        try:
            part = await loop.sock_recv(stream, nbytes - len(received))
        except ConnectionResetError:
            break
        if not part:
            break
        received += part
    return received


async def send(stream: socket.socket, data: bytes) -> None:
    with suppress(ConnectionError):
        await asyncio.get_running_loop().sock_sendall(stream, data)


@asynccontextmanager
async def opened(pair: LocalPair, name: str = "consumer") -> AsyncGenerator[socket.socket, None]:
    """A stream to the producer, opened in the name of a process."""
    stream, theirs = tcp_pair()
    pair.producer.transport.stream_came(name, theirs)
    with stream:
        stream.setblocking(False)
        yield stream


def reset(stream: socket.socket) -> None:
    """End it as the kernel does for a process that had something unread."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.close()


@asynccontextmanager
async def impostor(
    pair: LocalPair, behave: Callable[[socket.socket], Awaitable[None]], nbytes: int = 1000
) -> AsyncGenerator[Grant, None]:
    """A producer that serves the streams of the consumer as `behave` says, and a grant of that many bytes."""
    loop = asyncio.get_running_loop()
    served: list[asyncio.Task[None]] = []

    async def serve(stream: socket.socket) -> None:
        with stream:
            stream.setblocking(False)
            await behave(stream)

    async def connect(peer: str) -> socket.socket:
        ours, theirs = tcp_pair()
        served.append(loop.create_task(serve(theirs)))
        return ours

    pair.consumer.host.connecting = connect
    try:
        # Not the number of a real grant: it is given back to the process at the other end of the control link.
        yield (0, 0, nbytes, 10**6)
    finally:
        pair.consumer.host.connecting = None
        for task in served:
            task.cancel()
        await asyncio.gather(*served, return_exceptions=True)
