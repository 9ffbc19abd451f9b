"""Connections between hosts: reaches a node, and proves the cluster key to it; and the port of a node.

    sock, _, _, session = await dial(address, identity, process.id, remote, Purpose.CONTROL)
    secured = await secure(sock, identity, session, server=False)
    connection.attach(secured, far=True)

A connection for DATA goes through `protect`, which leaves it as it is unless payloads are encrypted, too.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import socket
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from aiodaft._protocol.connections.address import Address, is_wildcard, parse_address
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.connections.far import Authenticated, configure, receive_message, resolve
from aiodaft._runtime.connections.identity import Identity, protect, secure
from aiodaft._runtime.platform.tasks import TaskOwner, log_error
from aiodaft.exceptions import NotAuthenticated, PeerLost, VersionMismatch
from aiodaft_transport import HandshakeError, Key, UnknownVersion, reached_by
from aiodaft_transport.handshake import (
    ACCEPT_SIZE,
    CHALLENGE_SIZE,
    HELLO_SIZE,
    NONCE_SIZE,
    ClientHandshake,
    Hello,
    Purpose,
    ServerHandshake,
)

# The one port of a node: accepts connections, and lets in those that prove the cluster key. `on_control` and `on_data`
# own the socket of an `Authenticated` from then on. The process `to` of a CONTROL connection calls `secure(sock,
# identity, session, server=True)` next.
# Until it has proved the key, a connection is a stranger: it gets a challenge and costs a fixed number of bytes. Only
# so many may be under way: one of the host that has most of them makes room, by lot. So a host of strangers takes no
# place from others, and a member beside it gets in after a few attempts.

logger = logging.getLogger("aiodaft")

MAX_STRANGERS: Final = 256
# Seconds that a stranger gets for the whole handshake.
DEADLINE: Final = 5.0
_BACKLOG: Final = 128
# Errors of accept() for lack of resources, or because the stranger left; the listener itself still works.
_PASSING: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED})
_ACCEPT_PAUSE: Final = 0.1
_LOG_PAUSE: Final = 10.0


class _Stranger(NamedTuple):
    task: asyncio.Task[tuple[Purpose, Authenticated]]
    address: str


class Listener:
    """Accepts the connections of a cluster at one address.

    Args:
        tasks: Their end ends the listener.
        on_control: Called with each connection between two processes.
        on_data: Called with each connection between two transports.
        places: The number of strangers that may be there.
    """

    def __init__(
        self,
        tasks: TaskOwner,
        identity: Identity,
        on_control: Callable[[Authenticated], object],
        on_data: Callable[[Authenticated], object],
        *,
        deadline: float = DEADLINE,
        places: int = MAX_STRANGERS,
    ) -> None:
        self._tasks = tasks
        self._identity = identity
        self._callbacks = {Purpose.CONTROL: on_control, Purpose.DATA: on_data}
        self._deadline = deadline
        self._places = places
        # Its own, which a program neither seeds nor foresees.
        self._lots = random.Random()
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._strangers: dict[socket.socket, _Stranger] = {}
        self._refused = 0
        self._next_line = 0.0

    async def open(self, address: Address, *, allow_wildcard: bool = False) -> Address:
        """Listen. Returns the address with the IP address and the port that were taken. May wait for a name server.

        Raises:
            ValueError: The address is that of all interfaces, which has to be allowed.
            OSError: The message names the address.
        """
        try:
            family, _, _, _, at = (await resolve(address))[0]
            if not allow_wildcard and is_wildcard(str(at[0])):
                raise ValueError(
                    f"{address} is the address of all interfaces, also those to strangers: name the one that leads to "
                    "the other machines, or allow all of them explicitly"
                )
            self._socket = listening = socket.create_server(at[:2], family=family, backlog=_BACKLOG)
        except OSError as error:
            raise OSError(error.errno, f"{address} cannot be listened at: {error.strerror}") from error
        listening.setblocking(False)
        self._accepting = self._tasks.create_task(self._accept(listening), name="accept connections")
        # Also if it is cancelled before it begins.
        self._accepting.add_done_callback(lambda task: listening.close())
        return Address(*listening.getsockname()[:2])

    def close(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
        for stranger in self._strangers.values():
            stranger.task.cancel()

    def abandon(self) -> None:
        """Close the sockets where no loop runs: in a forked child, which would keep the port in use."""
        for sock in (self._socket, *self._strangers):
            # uvloop holds the sockets that it waits for: `close` would do nothing.
            if sock is not None and (fd := sock.detach()) >= 0:
                os.close(fd)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listening)
            except OSError as error:
                if error.errno not in _PASSING:
                    raise
                await asyncio.sleep(_ACCEPT_PAUSE)
                continue
            if len(self._strangers) >= self._places:
                self._make_room()
            stranger = _Stranger(self._tasks.start(self._authenticate(sock), name="admit a connection"), address[0])
            self._strangers[sock] = stranger
            stranger.task.add_done_callback(partial(self._judged, sock, stranger.address))

    def _make_room(self) -> None:
        crowds = Counter(stranger.address for stranger in self._strangers.values())
        largest = max(crowds.values())
        sock = self._lots.choice([sock for sock, one in self._strangers.items() if crowds[one.address] == largest])
        stranger = self._strangers.pop(sock)
        # It is closed when its task has ended, also one that has not begun.
        stranger.task.cancel()
        self._tell_of_refusal(stranger.address, f"{self._places} connections are in the handshake")

    async def _authenticate(self, sock: socket.socket) -> tuple[Purpose, Authenticated]:
        loop, identity = asyncio.get_running_loop(), self._identity
        async with asyncio.timeout(self._deadline):
            configure(sock)
            handshake = ServerHandshake(
                identity.key, os.urandom(NONCE_SIZE), tls=True, data_tls=identity.encrypts_payloads
            )
            await loop.sock_sendall(sock, handshake.challenge)
            (sender, to, purpose), accept, session = handshake.receive_hello(await receive_message(sock, HELLO_SIZE))
            await loop.sock_sendall(sock, accept)
        return purpose, Authenticated(sock, sender, to, session)

    def _judged(self, sock: socket.socket, address: str, task: asyncio.Task[tuple[Purpose, Authenticated]]) -> None:
        self._strangers.pop(sock, None)
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            self._hand_over(*task.result())
            return
        sock.close()
        if isinstance(error, TimeoutError):
            self._tell_of_refusal(address, f"it did not finish the handshake in {self._deadline:g} s")
        elif isinstance(error, HandshakeError):
            self._tell_of_refusal(address, str(error))
        elif error is not None and not isinstance(error, OSError):
            # One that left is not worth a line: probes of orchestrators do that all the time.
            log_error("a connection could not be admitted", error)

    def _hand_over(self, purpose: Purpose, authenticated: Authenticated) -> None:
        try:
            self._callbacks[purpose](authenticated)
        except Exception as error:  # noqa: BLE001 - one connection must not end the others
            authenticated.sock.close()
            log_error(f"the connection of {authenticated.sender} to {authenticated.to} could not be used", error)

    def _tell_of_refusal(self, address: str, why: str) -> None:
        """A stranger must not fill the log."""
        self._refused += 1
        now = asyncio.get_running_loop().time()
        if now >= self._next_line:
            logger.warning("refused %d connections; the last one, from %s: %s", self._refused, address, why)
            self._refused, self._next_line = 0, now + _LOG_PAUSE


ANSWER_DEADLINE: Final = 10.0
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
        PeerLost: The node cannot be reached, drops every connection, or did not answer in time; `.executed` is False.
    """
    about = Hello(local, to, purpose)
    try:
        async with asyncio.timeout(ANSWER_DEADLINE):
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
        raise _unreachable(address, to, f"there was no answer in {ANSWER_DEADLINE:g} s") from error
    except OSError as error:
        # Name servers have error numbers below zero.
        known = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise _unreachable(address, to, known or str(error)) from error


class _Dropped(ConnectionError):
    pass


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
