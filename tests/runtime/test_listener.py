"""The port of a node lets in those that prove the key, tells the others nothing, and costs no more than it may."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
from identities import identity
from leaks import open_files, resident
from secured import received
from tcp_ends import receive, reset, send
from transport_probes import no_more_files

from aiodaft._protocol.connections.address import Address, parse_address
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.connections import dialing
from aiodaft._runtime.connections.dialing import MAX_STRANGERS, Listener, dial
from aiodaft._runtime.connections.far import Authenticated
from aiodaft._runtime.connections.identity import secure
from aiodaft._runtime.platform.tasks import TaskOwner
from aiodaft.exceptions import NotAuthenticated, PeerLost
from aiodaft_transport import Key
from aiodaft_transport.handshake import (
    CHALLENGE_SIZE,
    HELLO_SIZE,
    MAGIC,
    ClientHandshake,
    Hello,
    Purpose,
    ServerHandshake,
)

HERE = Address("127.0.0.1", 0)
SENDER, TO = PeerId("controller-1@a"), PeerId("worker-2@b")
MIB = 1 << 20


class Port:
    """The listener of a node, and the connections that it has let in."""

    def __init__(self, tasks: TaskOwner, *, deadline: float, places: int = MAX_STRANGERS) -> None:
        self.came = asyncio.Queue[tuple[str, Authenticated]]()
        self.listener = Listener(
            tasks,
            identity(),
            lambda admitted: self.came.put_nowait(("control", admitted)),
            lambda admitted: self.came.put_nowait(("data", admitted)),
            deadline=deadline,
            places=places,
        )
        self.address = HERE


@asynccontextmanager
async def opened(
    address: Address = HERE, *, deadline: float = 5.0, places: int = MAX_STRANGERS
) -> AsyncGenerator[Port]:
    tasks = TaskOwner("test")
    port = Port(tasks, deadline=deadline, places=places)
    port.address = await port.listener.open(address)
    try:
        yield port
    finally:
        port.listener.close()
        await tasks.aclose()
        while not port.came.empty():
            port.came.get_nowait()[1].sock.close()


@asynccontextmanager
async def stranger(port: Port, host: str = "127.0.0.1") -> AsyncGenerator[socket.socket]:
    """A connection of a host to the port, and not a word said."""
    with socket.socket() as sock:
        sock.setblocking(False)
        sock.bind((host, 0))
        await asyncio.get_running_loop().sock_connect(sock, port.address)
        yield sock


async def works(port: Port) -> None:
    """A member gets in and is heard."""
    mine = await dial(port.address, identity(), SENDER, TO, Purpose.DATA)
    kind, theirs = await port.came.get()
    with mine.sock, theirs.sock:
        assert (kind, theirs.sender, theirs.to) == ("data", SENDER, TO)
        mine.sock.send(b"hello")
        assert await receive(theirs.sock, 5) == b"hello"


# Members.


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
@pytest.mark.parametrize("purpose", Purpose)
async def test_a_member_gets_in_over_either_ip_version_with_its_name_and_purpose(host: str, purpose: Purpose) -> None:
    async with opened(Address(host, 0)) as port:
        assert port.address.host in {"127.0.0.1", "::1"}
        assert port.address.port
        mine = await dial(port.address, identity(), SENDER, TO, purpose)
        kind, theirs = await port.came.get()
        with mine.sock, theirs.sock:
            assert kind == purpose.name.lower()
            assert (mine.sender, mine.to) == (theirs.sender, theirs.to) == (SENDER, TO)
            assert mine.session.secret() == theirs.session.secret()


async def test_a_connection_for_messages_goes_on_with_tls_in_another_process_than_the_nodes() -> None:
    """The node gives away the descriptor and the session key, as bytes, and reads nothing."""
    async with opened() as port:
        mine = await dial(port.address, identity(), SENDER, TO, Purpose.CONTROL)
        ours = asyncio.get_running_loop().create_task(secure(mine.sock, identity(), mine.session, server=False))
        _, theirs = await port.came.get()
        with theirs.sock:
            handed_on = socket.socket(fileno=os.dup(theirs.sock.fileno()))
        remote = await secure(handed_on, identity(), Key(theirs.session.secret()), server=True)
        local = await ours
        with local, remote:
            local.send(b"a word")
            assert await received(remote, 6) == b"a word"


async def test_both_ends_notice_a_host_that_is_gone() -> None:
    options = {
        socket.TCP_NODELAY: 1,
        socket.TCP_KEEPIDLE: 2,
        socket.TCP_KEEPINTVL: 1,
        socket.TCP_KEEPCNT: 3,
        socket.TCP_USER_TIMEOUT: 10_000,
    }
    async with opened() as port:
        mine = await dial(port.address, identity(), SENDER, TO, Purpose.CONTROL)
        _, theirs = await port.came.get()
        for sock in (mine.sock, theirs.sock):
            with sock:
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert {option: sock.getsockopt(socket.IPPROTO_TCP, option) for option in options} == options
                assert not sock.get_inheritable()


async def test_many_members_at_once_all_get_in() -> None:
    async with opened() as port:
        mine = await asyncio.gather(
            *(dial(port.address, identity(), f"worker-{number}", TO, Purpose.DATA) for number in range(150))
        )
        names = set()
        for admitted in mine:
            _, theirs = await port.came.get()
            names.add(theirs.sender)
            theirs.sock.close()
            admitted.sock.close()
        assert len(names) == 150


# Strangers.


async def test_f83_a_member_of_another_cluster_is_told_so_by_its_own_side() -> None:
    async with opened() as port:
        with pytest.raises(NotAuthenticated, match="belongs to another cluster: it has another key"):
            await dial(port.address, identity(1), SENDER, TO, Purpose.CONTROL)
        await works(port)


SENT = {
    "a web browser": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".ljust(HELLO_SIZE),
    "the right beginning": MAGIC.ljust(HELLO_SIZE, b"\xff"),
    "zeros": bytes(HELLO_SIZE),
    "random bytes": random.Random(1).randbytes(HELLO_SIZE),
    "a pickle": b"\x80\x04\x8c\x08builtins\x8c\x04exec\x93.".ljust(HELLO_SIZE, b"\0"),
    "a megabyte": MAGIC + bytes(MIB),
}


@pytest.mark.parametrize("what", SENT)
async def test_f85_a_stranger_gets_a_challenge_and_no_reason(what: str) -> None:
    async with opened() as port:
        async with stranger(port) as sock:
            await send(sock, SENT[what])
            assert len(await receive(sock, 2 * CHALLENGE_SIZE)) in {0, CHALLENGE_SIZE}
        await works(port)


@pytest.mark.parametrize("what", ["its own challenge", "a recorded hello", "a part", "with another key"])
async def test_f84_greetings_that_prove_nothing_are_refused_without_a_reason(what: str) -> None:
    about = Hello(SENDER, TO, Purpose.CONTROL)
    async with opened() as port:
        async with stranger(port) as earlier:
            recorded = ClientHandshake(identity().key, bytes(32), about, tls=True).receive_challenge(
                await receive(earlier, CHALLENGE_SIZE)
            )
        async with stranger(port) as sock:
            challenge = await receive(sock, CHALLENGE_SIZE)
            own = ClientHandshake(identity().key, bytes(32), about, tls=True).receive_challenge(challenge)
            said = {
                "its own challenge": challenge.ljust(HELLO_SIZE, b"\0"),
                "a recorded hello": recorded,
                "a part": own[:-1],
                "with another key": own[:-32] + identity(1).key.mac(b"client", challenge, own[:-32]),
            }[what]
            await send(sock, said)
            sock.shutdown(socket.SHUT_WR)
            assert await receive(sock, 1) == b""
        assert port.came.empty()
        await works(port)


async def test_f84_a_side_without_tls_is_refused() -> None:
    """An attacker who wants to read along would have a member believe that."""
    about = Hello(SENDER, TO, Purpose.CONTROL)
    async with opened() as port, stranger(port) as sock:
        challenge = await receive(sock, CHALLENGE_SIZE)
        without = challenge[:10] + b"\0\0" + challenge[12:]
        await send(sock, ClientHandshake(identity().key, bytes(32), about, tls=False).receive_challenge(without))
        assert await receive(sock, 1) == b""
        assert port.came.empty()


@pytest.mark.parametrize("said", [0, 1, HELLO_SIZE - 1])
async def test_f86_a_stranger_that_does_not_finish_is_cut_off(said: int) -> None:
    async with opened(deadline=0.01) as port, stranger(port) as sock:
        await send(sock, MAGIC.ljust(said, b"\0")[:said])
        assert len(await receive(sock, CHALLENGE_SIZE + 1)) in {0, CHALLENGE_SIZE}


def is_there(sock: socket.socket) -> bool:
    """Whether the node has not closed a connection on which it has sent its challenge."""
    try:
        return sock.recv(1) != b""
    except BlockingIOError:
        return True


async def test_f86_one_of_too_many_strangers_makes_room_and_members_get_in() -> None:
    async with opened(places=8) as port, AsyncExitStack() as stack:
        strangers = [await stack.enter_async_context(stranger(port)) for _ in range(8)]
        for sock in strangers:
            assert len(await receive(sock, CHALLENGE_SIZE)) == CHALLENGE_SIZE
        await works(port)
        # One had to go, and no other one. The node closes it before it lets the member in.
        assert sum(map(is_there, strangers)) == 7


async def test_f86_strangers_of_one_host_take_no_place_from_another_however_long_it_takes() -> None:
    async with opened(places=8) as port, AsyncExitStack() as stack:
        far = await stack.enter_async_context(stranger(port, "127.0.0.2"))
        challenge = await receive(far, CHALLENGE_SIZE)
        # As 1,000 a second do while a member is 100 ms away.
        for _ in range(100):
            await receive(await stack.enter_async_context(stranger(port)), CHALLENGE_SIZE)
        about = Hello(SENDER, TO, Purpose.DATA)
        hello = ClientHandshake(identity().key, bytes(32), about, tls=True).receive_challenge(challenge)
        await send(far, hello)
        _, admitted = await port.came.get()
        with admitted.sock:
            assert admitted.sender == SENDER


async def test_f86_of_strangers_of_one_host_none_has_to_go_because_it_is_slow() -> None:
    async with opened(places=64) as port, AsyncExitStack() as stack:
        first, others = [
            [await stack.enter_async_context(stranger(port)) for _ in range(64)] for _ in range(2)
        ]  # fmt: skip
        for sock in others:
            with suppress(ConnectionError):
                await receive(sock, CHALLENGE_SIZE)
        await works(port)
        for sock in first:
            with suppress(BlockingIOError):
                sock.recv(CHALLENGE_SIZE)
        # Each had to go with a probability of 63 %; all of them, as the oldest, once in 10 ** 13.
        assert any(map(is_there, first))


async def test_f86_five_hundred_slow_strangers_hold_no_member_up() -> None:
    """Each sends a byte now and then, and never the last one."""
    async with opened() as port, AsyncExitStack() as stack:
        before = len(open_files())
        strangers = [await stack.enter_async_context(stranger(port)) for _ in range(500)]
        for sock in strangers:
            await send(sock, MAGIC[:1])
        await works(port)
        # Their own ends are open here, too.
        assert len(open_files()) - before <= 500 + MAX_STRANGERS
        for sock in strangers:
            await send(sock, MAGIC[1:2])
        await works(port)


async def test_f85_what_a_stranger_costs_is_bounded() -> None:
    async with opened() as port:
        await works(port)
        before = resident(os.getpid())
        for _ in range(50):
            async with stranger(port) as sock:
                with suppress(BlockingIOError, ConnectionError):
                    sock.send(MAGIC + bytes(MIB))
                await receive(sock, CHALLENGE_SIZE)
        assert resident(os.getpid()) - before < 4 * MIB


async def test_the_log_has_one_line_for_many_refusals(caplog: pytest.LogCaptureFixture) -> None:
    async with opened() as port:
        with caplog.at_level(logging.WARNING, "aiodaft"):
            for _ in range(20):
                async with stranger(port) as sock:
                    await send(sock, b"\x1b[2J\r\nroot: all is well\n".ljust(HELLO_SIZE))
                    await receive(sock, 2 * CHALLENGE_SIZE)
    (line,) = caplog.messages
    assert line == "refused 1 connections; the last one, from 127.0.0.1: the other side does not speak this protocol"


async def test_a_probe_that_connects_and_leaves_is_not_worth_a_line(caplog: pytest.LogCaptureFixture) -> None:
    async with opened() as port:
        for index in range(20):
            async with stranger(port) as sock:
                if index % 2:
                    reset(sock)
        await works(port)
    assert caplog.messages == []


async def test_running_out_of_descriptors_does_not_end_the_listener() -> None:
    async with opened() as port:
        await works(port)
        with socket.socket() as sock:
            with no_more_files():
                sock.connect(port.address)
                for _ in range(10):
                    await asyncio.sleep(0)
            await works(port)


async def test_a_connection_that_cannot_be_used_is_closed_and_the_next_one_works(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tasks = TaskOwner("test")

    def fail(admitted: Authenticated) -> None:
        raise ZeroDivisionError

    listener = Listener(tasks, identity(), fail, fail)
    address = await listener.open(HERE)
    for _ in range(2):
        mine = await dial(address, identity(), SENDER, TO, Purpose.CONTROL)
        with mine.sock:
            assert await receive(mine.sock, 1) == b""
    listener.close()
    await tasks.aclose()
    assert f"the connection of {SENDER} to {TO} could not be used" in caplog.text


# The address.


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0", "0x0"])
async def test_f82_listening_on_all_interfaces_is_refused_however_it_is_spelled(host: str) -> None:
    tasks = TaskOwner("test")
    listener = Port(tasks, deadline=1).listener
    with pytest.raises(ValueError, match="the address of all interfaces, also those to strangers"):
        await listener.open(Address(host, 0))
    found = await listener.open(Address(host, 0), allow_wildcard=True)
    assert found.port
    listener.close()
    await tasks.aclose()


async def test_a_port_that_is_taken_or_another_machines_address_says_so() -> None:
    tasks = TaskOwner("test")
    async with opened() as port:
        for address, why in (
            (port.address, "Address already in use"),
            (Address("192.0.2.77", 0), "Cannot assign requested address"),
        ):
            with pytest.raises(OSError, match=f"{address} cannot be listened at: {why}"):
                await Port(tasks, deadline=1).listener.open(address)


async def test_a_closed_listener_frees_its_port_and_strangers_at_once() -> None:
    async with opened() as port, stranger(port) as sock:
        assert len(await receive(sock, CHALLENGE_SIZE)) == CHALLENGE_SIZE
        port.listener.close()
        assert await receive(sock, 1) == b""
        async with opened(port.address):
            pass


async def test_a_forked_child_lets_go_of_the_port() -> None:
    async with opened() as port, stranger(port) as sock:
        await receive(sock, CHALLENGE_SIZE)
        before = len(open_files())
        child = os.fork()
        if not child:
            port.listener.abandon()
            os._exit(before - len(open_files()))
        _, status = os.waitpid(child, 0)  # noqa: ASYNC222 - it ends at once
        assert os.waitstatus_to_exitcode(status) == 2
        await works(port)


# The other side.


@asynccontextmanager
async def impostor(*words: bytes | None) -> AsyncGenerator[Address]:
    """A port that says something else to each connection, or None: proves the key, and closes it."""
    loop = asyncio.get_running_loop()

    async def serve() -> None:
        for said in words:
            sock, _ = await loop.sock_accept(listening)
            with sock:
                if said is not None:
                    await send(sock, said)
                    await receive(sock, 1)
                    continue
                handshake = ServerHandshake(identity().key, random.randbytes(32), tls=True)
                await send(sock, handshake.challenge)
                await send(sock, handshake.receive_hello(await receive(sock, HELLO_SIZE)).accept)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        serving = loop.create_task(serve())
        try:
            yield Address(*listening.getsockname())
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


async def test_something_else_at_the_address_is_told_at_its_first_word() -> None:
    """Not after it has said as much as a challenge has: it may say less, and then wait."""
    async with impostor(b"220 mail") as address:
        with pytest.raises(NotAuthenticated, match="does not speak this protocol"):
            await dial(address, identity(), SENDER, TO, Purpose.CONTROL)


async def test_f83_a_node_that_copies_a_challenge_gets_no_further() -> None:
    challenge = ServerHandshake(identity().key, bytes(32), tls=True).challenge
    async with impostor(challenge + bytes(32)) as address:
        with pytest.raises(NotAuthenticated, match="does not hold the cluster key"):
            await dial(address, identity(), SENDER, TO, Purpose.CONTROL)


async def test_f84_a_node_that_says_it_has_no_tls_is_refused() -> None:
    """Also if it is only said on the way to it."""
    challenge = ServerHandshake(identity().key, bytes(32), tls=False).challenge
    async with impostor(challenge) as address:
        with pytest.raises(NotAuthenticated, match="this process uses TLS between hosts, and the other side does not"):
            await dial(address, identity(), SENDER, TO, Purpose.CONTROL)


async def test_a_member_that_is_dropped_during_the_handshake_connects_again() -> None:
    async with impostor() as closed:
        pass
    with pytest.raises(PeerLost, match="Connection refused"):
        await dial(closed, identity(), SENDER, TO, Purpose.DATA)
    drops = 0

    async def drop_three(listening: socket.socket) -> None:
        nonlocal drops
        for _ in range(3):
            sock, _ = await asyncio.get_running_loop().sock_accept(listening)
            sock.close()
            drops += 1

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        address = Address(*listening.getsockname())
        dialled = asyncio.get_running_loop().create_task(dial(address, identity(), SENDER, TO, Purpose.DATA))
        await drop_three(listening)
        sock, _ = await asyncio.get_running_loop().sock_accept(listening)
        with sock:
            handshake = ServerHandshake(identity().key, bytes(32), tls=True)
            await send(sock, handshake.challenge)
            await send(sock, handshake.receive_hello(await receive(sock, HELLO_SIZE)).accept)
            (await dialled).sock.close()
    assert drops == 3


async def test_a_node_that_drops_every_connection_is_given_up() -> None:
    before = len(open_files())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        address = Address(*listening.getsockname())
        dialled = asyncio.get_running_loop().create_task(dial(address, identity(), SENDER, TO, Purpose.DATA))
        for _ in range(16):
            sock, _ = await asyncio.get_running_loop().sock_accept(listening)
            sock.close()
        with pytest.raises(PeerLost, match="it ended during the handshake, 16 times"):
            await dialled
    assert len(open_files()) == before


async def test_a_node_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialing, "ANSWER_DEADLINE", 0.01)
    before = len(open_files())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = Address(*listening.getsockname())
        with pytest.raises(PeerLost, match=rf"at {address}: there was no answer in 0\.01 s"):
            await dial(address, identity(), SENDER, TO, Purpose.DATA)
    assert len(open_files()) == before


async def test_a_cancelled_attempt_closes_its_socket() -> None:
    before = len(open_files())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        address = Address(*listening.getsockname())
        dialled = asyncio.get_running_loop().create_task(dial(address, identity(), SENDER, TO, Purpose.DATA))
        sock, _ = await asyncio.get_running_loop().sock_accept(listening)
        with sock:
            dialled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await dialled
            assert await receive(sock, 1) == b""
    assert len(open_files()) == before


async def test_a_host_that_does_not_exist_says_so() -> None:
    with pytest.raises(PeerLost, match=r"Name or service|name resolution|not known"):
        await dial(parse_address("tcp://no-such-host.invalid:7777"), identity(), SENDER, TO, Purpose.DATA)


@pytest.mark.parametrize("count", [50, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(300)])])
async def test_members_and_strangers_that_come_and_go_leave_nothing(count: int) -> None:
    async with opened() as port:

        async def come_and_go(times: int) -> None:
            for _ in range(times):
                await works(port)
                async with stranger(port):
                    pass

        await come_and_go(50)
        files, memory = len(open_files()), resident(os.getpid())
        await come_and_go(count)
        while len(open_files()) > files:
            await asyncio.sleep(0)
        assert resident(os.getpid()) - memory < 4 * MIB
