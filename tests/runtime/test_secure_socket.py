"""A socket with TLS behaves like one without, and leads to the process that has proved the cluster key."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from identities import identity
from leaks import open_files
from secured import SESSION, readable, received, secured_pair, tcp_pair

from aiodaft._protocol.connections.messages import KINDS, NOTE, Message
from aiodaft._protocol.connections.session import Session
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.identity import RECORD, Identity, SecureSocket, load_identity, secure, write_key_file
from aiodaft._runtime.connections.ring_poller import RingPoller
from aiodaft._runtime.process import Env, Process, ProcessOptions
from aiodaft.cli.key import new_certificate
from aiodaft.exceptions import NotAuthenticated, PeerLost
from aiodaft_transport import Key

MIB = 1 << 20


@pytest.fixture
async def pair() -> AsyncIterator[tuple[SecureSocket, SecureSocket]]:
    client, server = await secured_pair()
    with client, server:
        yield client, server


async def outcomes(
    *, other_identity: Identity | None = None, other_session: Key = SESSION, other_is_server: bool = True
) -> list[BaseException | SecureSocket]:
    """The errors of two ends that do not agree on something."""
    one, other = tcp_pair()
    found = await asyncio.gather(
        secure(one, identity(), SESSION, server=False),
        secure(other, other_identity or identity(), other_session, server=other_is_server),
        return_exceptions=True,
    )
    for end in (one, other, *found):
        if isinstance(end, socket.socket):
            end.close()
    return list(found)


async def test_the_year_of_a_clock_does_not_matter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("aiodaft.cli.key._FROM", datetime(2999, 1, 1))
    write_key_file(tmp_path / "key", bytes(32), *new_certificate())
    one, other = tcp_pair()
    # As a node whose clock is at 1976 sees a key of today.
    early = load_identity(tmp_path / "key")
    ends = await asyncio.gather(secure(one, early, SESSION, server=False), secure(other, early, SESSION, server=True))
    for end in ends:
        end.close()


def is_refusal(outcome: BaseException | SecureSocket) -> bool:
    """Whether an end was refused, or saw that the other one has closed the connection after a refusal."""
    return isinstance(outcome, NotAuthenticated | PeerLost)


# The other end.


async def test_both_ends_use_the_newest_tls_and_no_old_one() -> None:
    client, server = await secured_pair()
    with client, server:
        assert [client.version(), server.version()] == ["TLSv1.3"] * 2


async def test_a_process_of_another_cluster_is_refused_by_both_ends() -> None:
    found = await outcomes(other_identity=identity(1))
    assert [is_refusal(outcome) for outcome in found] == [True, True]
    assert any("TLS with the other end of a connection failed" in str(outcome) for outcome in found)


@pytest.mark.parametrize("other", [Key(bytes(32)), Key(SESSION.secret()[::-1])])
async def test_f95_an_end_that_did_not_prove_the_key_on_this_connection_is_refused(other: Key) -> None:
    """The results of a relay between two members, each of which has proved the key to the relay's other connection."""
    found = await outcomes(other_session=other)
    assert [is_refusal(outcome) for outcome in found] == [True, True]
    assert any("not the process that has proved the cluster key" in str(outcome) for outcome in found)


async def test_two_ends_in_the_same_role_refuse() -> None:
    assert [is_refusal(outcome) for outcome in await outcomes(other_is_server=False)] == [True, True]


async def test_f95_a_relay_with_its_own_certificate_is_refused_by_both_ends() -> None:
    """It has no member's key, and passes the handshake on as it is: the session is that of the two members."""
    ours, its_client = tcp_pair()
    its_server, theirs = tcp_pair()
    intruder = identity(7)
    found = await asyncio.gather(
        secure(ours, identity(), SESSION, server=False),
        secure(theirs, identity(), SESSION, server=True),
        secure(its_client, intruder, SESSION, server=True),
        secure(its_server, intruder, SESSION, server=False),
        return_exceptions=True,
    )
    assert [is_refusal(outcome) for outcome in found] == [True] * 4


async def test_f95_a_proof_that_is_reflected_is_refused() -> None:
    """The other end has the certificate, but no session: all it can do is say what it hears."""
    one, other = tcp_pair()

    async def reflect() -> None:
        context = identity().server_context
        sock = context.wrap_socket(other, server_side=True, do_handshake_on_connect=False)
        with sock:
            for step in (sock.do_handshake, lambda: sock.send(sock.recv(32))):
                while True:
                    try:
                        step()
                        break
                    except ssl.SSLWantReadError:
                        await readable(sock)
            await readable(sock)

    found, _ = await asyncio.gather(secure(one, identity(), SESSION, server=False), reflect(), return_exceptions=True)
    assert isinstance(found, NotAuthenticated)
    assert "not the process that has proved" in str(found)


@pytest.mark.parametrize("kind", ["no certificate", "an old version"])
async def test_an_end_with_no_certificate_or_an_old_version_is_refused(kind: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if kind == "an old version":
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    one, other = tcp_pair()

    def connect() -> None:
        one.setblocking(True)
        with one, context.wrap_socket(one) as sock:
            sock.recv(1)

    ended = asyncio.get_running_loop().run_in_executor(None, connect)
    with pytest.raises(NotAuthenticated, match="TLS with the other end of a connection failed"):
        await secure(other, identity(), SESSION, server=True)
    with pytest.raises(OSError):  # noqa: PT011 - of several kinds, as the kernel finds it
        await ended


# Ends that do not take part.


@pytest.mark.parametrize("server", [False, True])
@pytest.mark.parametrize("how", ["closed", "reset", "garbage", "a part"])
async def test_an_end_that_goes_during_the_handshake_is_an_error_and_leaves_nothing(how: str, server: bool) -> None:
    before = len(open_files())
    one, other = tcp_pair()
    with other:
        waiting = asyncio.get_running_loop().create_task(secure(one, identity(), SESSION, server=server))
        if not server:
            await readable(other)
        if how == "reset":
            other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif how == "garbage":
            other.send(random.Random(1).randbytes(5000))
        elif how == "a part":
            other.send(b"\x16\x03\x01")
    with pytest.raises((NotAuthenticated, PeerLost)):
        await waiting
    assert len(open_files()) == before


async def test_an_end_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodaft._runtime.connections.identity.DEADLINE", 0.01)
    one, other = tcp_pair()
    with other:
        with pytest.raises(PeerLost, match=r"did not finish TLS in 0\.01 s"):
            await secure(one, identity(), SESSION, server=True)
        assert one.fileno() == -1


async def test_a_cancelled_handshake_closes_the_socket() -> None:
    before = len(open_files())
    one, other = tcp_pair()
    with other:
        waiting = asyncio.get_running_loop().create_task(secure(one, identity(), SESSION, server=False))
        await readable(other)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert len(open_files()) == before


# The operations of Connection and SendQueue on it.


async def test_what_is_sent_arrives_and_the_wire_shows_none_of_it() -> None:
    client, its_end = tcp_pair()
    other_end, server = tcp_pair()
    wire: list[bytes] = []

    async def relay(source: socket.socket, target: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(source, 1 << 16):
            wire.append(data)
            await loop.sock_sendall(target, data)

    async with asyncio.TaskGroup() as relays:
        tasks = [relays.create_task(relay(its_end, other_end)), relays.create_task(relay(other_end, its_end))]
        one, two = await asyncio.gather(
            secure(client, identity(), SESSION, server=False), secure(server, identity(), SESSION, server=True)
        )
        with its_end, other_end, one, two:
            words = b"the quick brown fox jumps over the lazy dog"
            assert one.send(words) == len(words)
            assert await received(two, len(words)) == words
            for task in tasks:
                task.cancel()
    assert words not in b"".join(wire)
    assert identity().key.secret() not in b"".join(wire)


async def test_a_read_of_nothing_blocks_and_an_end_is_an_end(pair: tuple[SecureSocket, SecureSocket]) -> None:
    client, server = pair
    with pytest.raises(BlockingIOError):
        server.recvmsg_into([bytearray(RECORD)], 100)
    client.close()
    await readable(server)
    assert server.recvmsg_into([bytearray(RECORD)], 100) == (0, [], 0, None)


@pytest.mark.parametrize("size", [1, RECORD - 1, RECORD, RECORD + 1, 3 * RECORD, MIB])
async def test_nothing_that_has_arrived_waits_where_the_event_loop_does_not_see_it(
    pair: tuple[SecureSocket, SecureSocket], size: int
) -> None:
    """`received` reads once each time that the loop says so, as `Connection` does."""
    client, server = pair
    data = random.Random(size).randbytes(size)
    rest, got = memoryview(data), b""
    while rest:
        try:
            sent = client.send(rest)
            rest = rest[sent:]
        except BlockingIOError:
            got += await received(server, RECORD)
    assert got + await received(server, size - len(got)) == data
    assert server.pending() == 0


async def test_a_buffer_that_could_leave_a_part_of_a_record_unread_is_refused(
    pair: tuple[SecureSocket, SecureSocket],
) -> None:
    with pytest.raises(ValueError, match=f"at least {RECORD} bytes, not {RECORD - 1}"):
        pair[0].recvmsg_into([bytearray(RECORD - 1)], 100)


async def test_a_send_that_does_not_fit_is_repeated_until_all_of_it_has_arrived_once(
    pair: tuple[SecureSocket, SecureSocket],
) -> None:
    client, server = pair
    data = random.Random(1).randbytes(8 * MIB)
    blocked, got, sent = 0, b"", 0
    while not sent:
        try:
            # Another object with the same bytes, as a queue has it.
            sent = client.send(memoryview(bytes(data)))
        except BlockingIOError:
            blocked += 1
            got += await received(server, RECORD)
    assert blocked
    assert sent == len(data)
    assert got + await received(server, len(data) - len(got)) == data


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60_000), min_size=1, max_size=8), back=st.lists(st.integers(1, 60_000), max_size=4)
)
def test_any_sizes_in_both_directions_arrive_in_order(sizes: list[int], back: list[int]) -> None:
    async def exchange() -> None:
        client, server = await secured_pair()
        with client, server:
            for sender, receiver, lengths in ((client, server, sizes), (server, client, back)):
                for number, length in enumerate(lengths):
                    data = bytes([number]) * length
                    assert sender.send(data) == length
                    assert await received(receiver, length) == data

    asyncio.run(exchange())


@pytest.mark.parametrize("what", ["changed", "cut", "repeated", "inserted"])
async def test_f95_what_is_changed_on_its_way_ends_the_connection(what: str) -> None:
    """A relay passes records on, and does something to the one it is asked to."""
    client, its_end = tcp_pair()
    other_end, server = tcp_pair()
    change: list[Callable[[bytes], bytes]] = []
    changes: dict[str, Callable[[bytes], bytes]] = {
        "changed": lambda record: record[:-1] + bytes([record[-1] ^ 1]),
        "cut": lambda record: record[:-1] + b"\x17\x03\x03\x00\x20",
        "repeated": lambda record: record + record,
        "inserted": lambda record: b"\x17\x03\x03\x00\x20" + bytes(32) + record,
    }

    async def relay(source: socket.socket, target: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(source, 1 << 16):
            await loop.sock_sendall(target, change[0](data) if change else data)

    async with asyncio.TaskGroup() as relays:
        tasks = [relays.create_task(relay(its_end, other_end)), relays.create_task(relay(other_end, its_end))]
        one, two = await asyncio.gather(
            secure(client, identity(), SESSION, server=False), secure(server, identity(), SESSION, server=True)
        )
        with its_end, other_end, one, two:
            change.append(changes[what])
            one.send(b"some words")
            with pytest.raises(ssl.SSLError):
                # A repeated record is itself fine the first time.
                assert await received(two, 10) == b"some words"
                await received(two, 10)
            for task in tasks:
                task.cancel()


class End:
    """A process with one connection."""

    def __init__(self, local: str, remote: str) -> None:
        self.came: list[Message] = []
        self.changed = asyncio.Event()
        options = ProcessOptions(
            PeerId(local), local, PeerId(local), PeerId(local), PeerId(local), PeerId(local), "tcp", False, 0, 1000
        )
        loop = asyncio.get_running_loop()
        self.connection = Connection(
            Process(options, identity().key, Env()),
            Session(PeerId(local), os.getpid(), remote=PeerId(remote), max_pending=1000),
            PeerId(remote),
            RingPoller(loop),
            [self._handle] * KINDS,
            on_lost=lambda connection, reason: self.changed.set(),
            on_dropped=lambda connection, message: None,
        )

    def _handle(self, connection: Connection, message: Message) -> None:
        self.came.append(message)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()


async def test_connections_exchange_messages_of_any_size_in_order_and_see_the_end() -> None:
    client, server = await secured_pair()
    one, two = End("a", "b"), End("b", "a")
    notes: list[Message] = [(NOTE, "tcp", bytes([number]) * (7_919 * number), 0) for number in range(40)]
    for message in notes[:20]:
        one.connection.send(message)
    one.connection.attach(client)
    two.connection.attach(server)
    for mine, other in zip(notes[20:], notes, strict=False):
        one.connection.send(mine)
        two.connection.send(other)
    await two.until(lambda: len(two.came) == 40)
    await one.until(lambda: len(one.came) == 20)
    assert (two.came, one.came) == (notes, notes[:20])
    one.connection.close(PeerLost("the test is over"))
    await two.until(lambda: two.connection.lost is not None)
    assert isinstance(two.connection.lost, PeerLost)
