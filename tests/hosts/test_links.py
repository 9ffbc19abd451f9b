"""Connections between hosts notice a host that is gone, and carry all data or end."""

from __future__ import annotations

import asyncio
import errno
import random
import socket
import ssl
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager, suppress

import pytest
from identities import identity
from network_namespaces import Host, network
from proxy import Faults, Proxy
from secured import received

from aiodaft._protocol.connections.address import Address
from aiodaft._runtime.connections.dialing import Listener, dial
from aiodaft._runtime.connections.far import Authenticated, configure
from aiodaft._runtime.connections.identity import SecureSocket, secure
from aiodaft._runtime.platform.tasks import TaskOwner
from aiodaft.exceptions import NotAuthenticated, PeerLost
from aiodaft_transport.handshake import Purpose

TEXT = random.Random(1).randbytes(20_000)


@pytest.mark.hosts
@pytest.mark.timeout(120)
def test_d54_d55_d56_both_ends_notice_a_partition_and_a_one_way_drop_whether_they_send_or_not() -> None:
    with network("one", "two", "three") as net, ExitStack() as stack:
        one, two, three = net.hosts
        ends: list[socket.socket] = []
        for client, server in ((one, two), (one, three), (three, one)):
            for sends in (False, True):
                near, far = connect(client, server)
                ends += [stack.enter_context(near), stack.enter_context(far)]
                if sends:
                    fill(near)
        net.partition(two)
        net.drop(one, three)
        # If one direction works, the first to give up may tell the other.
        assert {error_of(end) for end in ends} <= {errno.ETIMEDOUT, errno.ECONNRESET}
        net.heal()
        for end in connect(one, two):
            end.close()


def connect(client: Host, server: Host) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection with the options of ours."""
    with server.listen() as listener:
        near = client.open_socket()
        near.connect(listener.getsockname())
        far, _ = listener.accept()
    configure(near)
    configure(far)
    return near, far


def fill(end: socket.socket) -> None:
    with suppress(BlockingIOError):
        while True:
            end.send(bytes(1 << 16))


def error_of(end: socket.socket) -> int | None:
    """The number of the error with which a connection ends; None for any other end."""
    end.settimeout(30)
    try:
        while end.recv(1 << 16):
            pass
    except OSError as error:
        return error.errno
    return None


class Port:
    """A port of a node behind a proxy."""

    def __init__(self, proxy: Proxy, came: asyncio.Queue[Authenticated]) -> None:
        self.proxy = proxy
        self.came = came

    async def connect(self) -> tuple[SecureSocket, SecureSocket]:
        """Both ends of a connection that is ready for messages. Raises the errors of either end."""
        address = Address(*self.proxy.address)
        mine = await dial(address, identity(), "worker-2@b", "node-1@a", Purpose.CONTROL)
        theirs = await self.came.get()
        ends = await asyncio.gather(
            secure(mine.sock, identity(), mine.session, server=False),
            secure(theirs.sock, identity(), theirs.session, server=True),
            return_exceptions=True,
        )
        for end in ends:
            if isinstance(end, BaseException):
                for other in ends:
                    if isinstance(other, SecureSocket):
                        other.close()
                raise end
        near, far = ends
        assert isinstance(near, SecureSocket)
        assert isinstance(far, SecureSocket)
        return near, far


@asynccontextmanager
async def port() -> AsyncGenerator[Port]:
    tasks, came = TaskOwner("test"), asyncio.Queue[Authenticated]()
    listener = Listener(tasks, identity(), came.put_nowait, came.put_nowait)
    with Proxy(await listener.open(Address("127.0.0.1", 0))) as proxy:
        try:
            yield Port(proxy, came)
        finally:
            listener.close()
            await tasks.aclose()
            while not came.empty():
                came.get_nowait().sock.close()


def send(end: SecureSocket, text: bytes) -> None:
    """As records of some bytes; all of it fits into the buffers of the kernel."""
    for start in range(0, len(text), 1000):
        end.send(text[start : start + 1000])


@pytest.mark.parametrize(
    "faults",
    [Faults(latency=0.02, jitter=0.02), Faults(slice=1), Faults(slice=7, jitter=0.01), Faults(gather=0.02)],
    ids=str,
)
async def test_d64_a_slow_line_and_one_that_cuts_up_or_joins_what_is_sent_change_nothing(faults: Faults) -> None:
    async with port() as opened:
        opened.proxy.disturb(faults, faults)
        near, far = await opened.connect()
        with near, far:
            for source, sink in ((near, far), (far, near)):
                send(source, TEXT)
                assert await received(sink, len(TEXT)) == TEXT


@pytest.mark.parametrize("to_server", [True, False])
async def test_d65_whichever_bit_is_flipped_nothing_wrong_arrives_and_the_connection_ends(to_server: bool) -> None:
    rng = random.Random(to_server)
    refused = 0
    async with port() as opened:
        for offset in (*rng.sample(range(3000), 30), *rng.sample(range(3000, len(TEXT)), 10)):
            faults = Faults(flip_at=offset)
            opened.proxy.disturb(*((faults, Faults()) if to_server else (Faults(), faults)))
            try:
                near, far = await opened.connect()
            except (NotAuthenticated, PeerLost):
                refused += 1
                continue
            source, sink = (near, far) if to_server else (far, near)
            with near, far:
                send(source, TEXT)
                # Else it would wait for the rest of a record whose length was changed.
                source.shutdown(socket.SHUT_WR)
                with pytest.raises((ssl.SSLError, ConnectionError)):
                    arrived = await received(sink, len(TEXT))
                    assert TEXT.startswith(arrived)
                    assert arrived != TEXT
                    raise ssl.SSLError
    assert 5 < refused < 35


async def test_a_line_that_breaks_during_the_handshake_is_dialled_again() -> None:
    async with port() as opened:
        opened.proxy.disturb(to_client=Faults(limit=50))
        with pytest.raises(PeerLost):
            await opened.connect()
        assert opened.proxy.accepted > 1
        opened.proxy.heal()
        near, far = await opened.connect()
        near.close()
        far.close()


async def test_a_port_that_takes_connections_and_says_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aiodaft._runtime.connections.dialing.ANSWER_DEADLINE", 0.2)
    async with port() as opened:
        opened.proxy.disturb(to_client=Faults(black_hole=True))
        with pytest.raises(PeerLost, match="no answer in 0.2 s"):
            await opened.connect()
