"""The network of a real cluster: TCP between nodes, authenticated by the cluster key and encrypted by TLS."""

from __future__ import annotations

import socket
from collections.abc import Callable

from aiodaft._protocol.connections.address import parse_address
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.connections.authentication import Authenticated, receive_message
from aiodaft._runtime.connections.dialing import dial
from aiodaft._runtime.connections.identity import Identity
from aiodaft._runtime.connections.listener import Listener
from aiodaft._runtime.connections.secure_socket import secure
from aiodaft._runtime.connections.secure_stream import protect
from aiodaft._runtime.platform.tasks import TaskOwner
from aiodaft_transport import Key, reached_by
from aiodaft_transport.handshake import Purpose


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
