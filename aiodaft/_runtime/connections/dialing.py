"""Connections to other hosts: reaches a node, and proves the cluster key to it.

    sock, _, _, session = await dial(address, identity, process.id, remote, Purpose.CONTROL)
    secured = await secure(sock, identity, session, server=False)
    connection.attach(secured, far=True)

A connection for DATA goes through `protect`, which leaves it as it is unless payloads are encrypted, too.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Final

from aiodaft._protocol.connections.address import Address, parse_address
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.connections.far import Authenticated, configure, receive_message, resolve
from aiodaft._runtime.connections.identity import Identity
from aiodaft._runtime.connections.listener import Listener
from aiodaft._runtime.connections.secure_socket import protect, secure
from aiodaft._runtime.platform.tasks import TaskOwner
from aiodaft.exceptions import NotAuthenticated, PeerLost, VersionMismatch
from aiodaft_transport import HandshakeError, Key, UnknownVersion, reached_by
from aiodaft_transport.handshake import ACCEPT_SIZE, CHALLENGE_SIZE, NONCE_SIZE, ClientHandshake, Hello, Purpose

# Seconds for all of it.
DEADLINE: Final = 10.0
# Attempts in a row if the node, which has too many strangers, drops it during the handshake.
_ATTEMPTS: Final = 16


async def dial(address: Address, identity: Identity, local: str, to: str, purpose: Purpose) -> Authenticated:
    """Connect to a process through its node, which hands the connection on after this has returned.

    Cancellation: closes the connection.

    Args:
        to: The name of the process to reach. The node closes the connection if it has no such process.

    Raises:
        NotAuthenticated: The listener there belongs to another cluster, or to none.
        VersionMismatch: It speaks no version of the handshake that this process speaks.
        PeerLost: The node cannot be reached, drops every connection, or did not answer within `DEADLINE`; `.executed`
            is False.
    """
    about = Hello(local, to, purpose)
    try:
        async with asyncio.timeout(DEADLINE):
            for _ in range(_ATTEMPTS - 1):
                try:
                    return await _attempt(address, identity, about)
                except _Dropped:
                    continue
            return await _attempt(address, identity, about)
    except UnknownVersion as error:
        raise VersionMismatch(f"no connection to {to} at {address}: {error}") from error
    except HandshakeError as error:
        raise NotAuthenticated(f"no connection to {to} at {address}: {error}") from error
    except TimeoutError as error:
        raise _unreachable(address, to, f"there was no answer in {DEADLINE:g} s") from error
    except OSError as error:
        # asyncio has its own words for errors of the system; name servers have numbers below zero.
        known = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise _unreachable(address, to, known or str(error)) from error


class _Dropped(ConnectionError):
    """The node ended the connection during the handshake."""


def _unreachable(address: Address, to: str, why: str) -> PeerLost:
    return PeerLost(f"no connection to {to} at {address}: {why}", executed=False)


async def _attempt(address: Address, identity: Identity, about: Hello) -> Authenticated:
    loop = asyncio.get_running_loop()
    sock = await _connect(address)
    try:
        nonce = os.urandom(NONCE_SIZE)
        handshake = ClientHandshake(identity.key, nonce, about, tls=True, data_tls=identity.encrypts_payloads)
        hello = handshake.receive_challenge(await receive_message(sock, CHALLENGE_SIZE))
        await loop.sock_sendall(sock, hello)
        session = handshake.receive_accept(await receive_message(sock, ACCEPT_SIZE, start=b""))
    except ConnectionError as error:
        sock.close()
        raise _Dropped(f"it ended during the handshake, {_ATTEMPTS} times") from error
    except BaseException:
        sock.close()
        raise
    return Authenticated(sock, about.sender, about.to, session)


async def _connect(address: Address) -> socket.socket:
    loop = asyncio.get_running_loop()
    problem: OSError | None = None
    for family, kind, protocol, _, at in await resolve(address):
        sock = socket.socket(family, kind, protocol)
        try:
            configure(sock)
            await loop.sock_connect(sock, at)
        except OSError as error:
            sock.close()
            problem = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    assert problem is not None
    raise problem


class TcpNetwork:
    """See `far.Network`."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self.key = identity.key
        self.cluster = identity.name

    @property
    def reached_by(self) -> tuple[str, ...]:
        # They would not encrypt payloads.
        return () if self._identity.encrypts_payloads else reached_by()

    def packed(self) -> bytes:
        return self._identity.packed()

    def door(
        self,
        tasks: TaskOwner,
        on_control: Callable[[Authenticated], object],
        on_data: Callable[[Authenticated], object],
    ) -> Listener:
        return Listener(tasks, self._identity, on_control, on_data)

    async def dial(self, address: str, local: PeerId, to: PeerId, purpose: Purpose) -> tuple[socket.socket, Key]:
        sock, _, _, session = await dial(parse_address(address), self._identity, local, to, purpose)
        return sock, session

    async def secure(self, sock: socket.socket, session: Key, *, server: bool) -> socket.socket:
        return await secure(sock, self._identity, session, server=server)

    async def protect(self, stream: socket.socket, session: Key, *, server: bool) -> socket.socket:
        return await protect(stream, self._identity, session, server=server)

    async def receive(self, sock: socket.socket, size: int) -> bytes:
        return await receive_message(sock, size, start=b"")
