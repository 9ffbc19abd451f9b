"""A stream for payload with TLS is a socket like any other, and the wire shows nothing of it."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from identities import identity
from leaks import open_files
from secured import SESSION, tcp_pair
from tcp_ends import receive

from aiodaft._runtime.connections.identity import Identity, load_identity, protect, write_key_file
from aiodaft.cli.key import new_certificate
from aiodaft.exceptions import NotAuthenticated, PeerLost

MIB = 1 << 20


@pytest.fixture(scope="module")
def encrypting(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    path = tmp_path_factory.mktemp("cluster") / "key"
    write_key_file(path, bytes(32), *new_certificate(), encrypt_payloads=True)
    return load_identity(path)


async def threads_ended() -> None:
    while any(thread.name == "aiodaft encrypts" for thread in threading.enumerate()):
        await asyncio.sleep(0)


@asynccontextmanager
async def protected(
    found: Identity, pair: tuple[socket.socket, socket.socket] | None = None
) -> AsyncGenerator[tuple[socket.socket, socket.socket]]:
    one, other = pair or tcp_pair()
    client, server = await asyncio.gather(
        protect(one, found, SESSION, server=False), protect(other, found, SESSION, server=True)
    )
    with client, server:
        yield client, server
    await threads_ended()


async def test_a_cluster_that_does_not_encrypt_payloads_uses_streams_as_they_are() -> None:
    one, other = tcp_pair()
    with one, other:
        assert await protect(one, identity(), SESSION, server=False) is one


@pytest.mark.parametrize("size", [0, 1, 16 << 10, (16 << 10) + 1, 8 * MIB])
async def test_any_number_of_bytes_arrives_in_both_directions_at_once(encrypting: Identity, size: int) -> None:
    loop = asyncio.get_running_loop()
    there, back = random.Random(1).randbytes(size), random.Random(2).randbytes(size)
    async with protected(encrypting) as (client, server):
        _, _, came, came_back = await asyncio.gather(
            loop.sock_sendall(client, there),
            loop.sock_sendall(server, back),
            receive(server, size),
            receive(client, size),
        )
    assert (came, came_back) == (there, back)


async def test_what_was_sent_before_the_end_arrives(encrypting: Identity) -> None:
    loop = asyncio.get_running_loop()
    data = random.Random(1).randbytes(4 * MIB)
    async with protected(encrypting) as (client, server):
        reading = loop.create_task(receive(server, len(data) + 1))
        await loop.sock_sendall(client, data)
        client.close()
        assert await reading == data


@pytest.mark.parametrize("end", ["closed", "shut down"])
@pytest.mark.parametrize("under_way", [False, True])
async def test_the_end_of_either_side_is_the_end_of_the_other_and_leaves_nothing(
    encrypting: Identity, end: str, under_way: bool
) -> None:
    before = len(open_files())
    async with protected(encrypting) as (client, server):
        if under_way:
            # More than there is room for on the way: nothing is read.
            with pytest.raises(BlockingIOError):
                while True:
                    server.send(bytes(MIB))
        if end == "closed":
            client.close()
        else:
            client.shutdown(socket.SHUT_RDWR)
        assert await receive(server, 1) == b""
    assert len(open_files()) == before


async def test_a_connection_that_is_reset_is_the_end_of_the_stream(encrypting: Identity) -> None:
    pair, relayed = tcp_pair(), tcp_pair()
    loop = asyncio.get_running_loop()

    async def relay(source: socket.socket, target: socket.socket) -> None:
        while data := await loop.sock_recv(source, 1 << 16):
            await loop.sock_sendall(target, data)

    relays = [loop.create_task(relay(pair[1], relayed[0])), loop.create_task(relay(relayed[0], pair[1]))]
    async with protected(encrypting, (pair[0], relayed[1])) as (client, server):
        for task in relays:
            task.cancel()
        await asyncio.gather(*relays, return_exceptions=True)
        for sock in (pair[1], relayed[0]):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        assert await receive(client, 1) == b""
        assert await receive(server, 1) == b""


async def test_the_wire_shows_nothing_of_the_payload(encrypting: Identity) -> None:
    pair, relayed = tcp_pair(), tcp_pair()
    loop, wire = asyncio.get_running_loop(), list[bytes]()

    async def relay(source: socket.socket, target: socket.socket) -> None:
        while data := await loop.sock_recv(source, 1 << 16):
            wire.append(data)
            await loop.sock_sendall(target, data)

    relays = [loop.create_task(relay(pair[1], relayed[0])), loop.create_task(relay(relayed[0], pair[1]))]
    words = b"weights of a secret model" * 1000
    async with protected(encrypting, (pair[0], relayed[1])) as (client, server):
        await loop.sock_sendall(client, words)
        assert await receive(server, len(words)) == words
        for task in relays:
            task.cancel()
        await asyncio.gather(*relays, return_exceptions=True)
        pair[1].close()
        relayed[0].close()
    assert b"secret" not in b"".join(wire)


async def test_a_process_without_the_session_gets_no_stream(encrypting: Identity) -> None:
    one, other = tcp_pair()
    found = await asyncio.gather(
        protect(one, encrypting, SESSION, server=False),
        protect(other, encrypting, identity().key, server=True),
        return_exceptions=True,
    )
    assert all(isinstance(outcome, NotAuthenticated | PeerLost) for outcome in found)


def test_the_key_file_says_whether_payloads_are_encrypted(encrypting: Identity, tmp_path: Path) -> None:
    assert (identity().encrypts_payloads, encrypting.encrypts_payloads) == (False, True)
    assert Identity(encrypting.packed()).encrypts_payloads
    changed = tmp_path / "key"
    changed.write_bytes(encrypting.packed().replace(b"encrypted", b"plain"))
    os.chmod(changed, 0o600)
    with pytest.raises(Exception, match="none that `aiodaft key new` made"):
        load_identity(changed)
