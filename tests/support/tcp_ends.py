"""Either end of a TCP transfer, spoken by hand: strangers, members that misbehave, and producers that end."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

from ends import KEY

from aiodaft_transport import Grant
from aiodaft_transport.handshake import ACCEPT_SIZE, CHALLENGE_SIZE, HELLO_SIZE, ClientHandshake, ServerHandshake

# Requests and replies are one such word.
WORD: Final = struct.Struct("<Q")


def address_of_grant(grant: Grant) -> tuple[str, int]:
    return str(grant[0]), int(grant[1])


async def receive(connection: socket.socket, nbytes: int) -> bytes:
    """That many bytes, or those there were before the end."""
    loop, received = asyncio.get_running_loop(), b""
    while len(received) < nbytes:
        try:
            part = await loop.sock_recv(connection, nbytes - len(received))
        except ConnectionResetError:
            break
        if not part:
            break
        received += part
    return received


async def send(connection: socket.socket, data: bytes) -> None:
    with suppress(ConnectionError):
        await asyncio.get_running_loop().sock_sendall(connection, data)


@asynccontextmanager
async def dialled(grant: Grant) -> AsyncGenerator[socket.socket, None]:
    """A connection to a producer, and not a word said."""
    with socket.socket() as connection:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, address_of_grant(grant))
        yield connection


@asynccontextmanager
async def admitted(grant: Grant, name: str = "consumer") -> AsyncGenerator[socket.socket, None]:
    """A connection to a producer that has seen the key."""
    async with dialled(grant) as connection:
        handshake = ClientHandshake(KEY, random.randbytes(32), name)
        await send(connection, handshake.receive_challenge(await receive(connection, CHALLENGE_SIZE)))
        handshake.receive_accept(await receive(connection, ACCEPT_SIZE))
        yield connection


def reset(connection: socket.socket) -> None:
    """End it as the kernel does for a process that had something unread."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@asynccontextmanager
async def impostor(
    behave: Callable[[socket.socket], Awaitable[None]], nbytes: int = 1000
) -> AsyncGenerator[Grant, None]:
    """A process that serves connections, one after the other, as `behave` says, and a grant that leads to it."""
    loop = asyncio.get_running_loop()

    async def serve() -> None:
        while True:
            connection, _ = await loop.sock_accept(listener)
            with connection:
                connection.setblocking(False)
                await behave(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        served = loop.create_task(serve())
        try:
            # Not the number of a real grant: it is given back to the process at the other end of the control link.
            yield ("127.0.0.1", listener.getsockname()[1], nbytes, 10**6)
        finally:
            served.cancel()
            await asyncio.gather(served, return_exceptions=True)


async def admit(connection: socket.socket) -> None:
    """A producer's part of the handshake, and the request that follows."""
    handshake = ServerHandshake(KEY, random.randbytes(32))
    await send(connection, handshake.challenge)
    _, accept = handshake.receive_hello(await receive(connection, HELLO_SIZE))
    await send(connection, accept)
    await receive(connection, WORD.size)
