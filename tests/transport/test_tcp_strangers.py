"""Who cannot prove the key gets nothing and stops nothing."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from contextlib import AsyncExitStack

import pytest
from conformance import LoopbackControl, fetched, granted
from ends import KEY, LocalHost, open_pair
from far_end import OTHER_KEY, open_far_end
from leaks import open_files, resident
from tcp_ends import WORD, address_of_grant, admit, admitted, dialled, impostor, receive, reset, send
from transport_probes import no_more_files

from aiodaft_transport import HandshakeError, PeerGone, TransportError
from aiodaft_transport.handshake import CHALLENGE_SIZE, HELLO_SIZE, MAGIC, ServerHandshake
from aiodaft_transport.tcp import TcpTransport

MIB = 1 << 20


async def test_a_stranger_gets_a_challenge_and_nothing_else() -> None:
    async with open_pair("tcp") as pair:
        _, grant, content = await granted(pair, 1000)
        async with dialled(grant) as connection:
            await send(connection, WORD.pack(int(grant[3])).ljust(HELLO_SIZE, b"\0"))
            said = await receive(connection, 1 << 16)
        assert len(said) <= CHALLENGE_SIZE
        assert await fetched(pair, grant) == content


GARBAGE = {
    "nothing": b"",
    "one byte": b"\0",
    "a web browser": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".ljust(HELLO_SIZE),
    "the right beginning": MAGIC.ljust(HELLO_SIZE, b"\xff"),
    "a flood": bytes(MIB),
    "random bytes": random.Random(1).randbytes(HELLO_SIZE),
}


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("end", ["closes", "resets"])
async def test_garbage_from_a_stranger_is_refused_and_the_listener_goes_on(kind: str, end: str) -> None:
    async with open_pair("tcp") as pair:
        block, grant, content = await granted(pair, 1000)
        for _ in range(5):
            async with dialled(grant) as connection:
                await send(connection, GARBAGE[kind])
                if end == "resets":
                    reset(connection)
        assert block.grants == 1
        assert await fetched(pair, grant) == content


async def test_a_consumer_with_another_key_is_refused() -> None:
    async with open_pair("tcp") as pair:
        block, grant, content = await granted(pair, 1000)
        intruder = TcpTransport(LocalHost(), OTHER_KEY, name="consumer")
        with pytest.raises(TransportError):
            await intruder.fetch(grant, LoopbackControl("producer"))
        intruder.close()
        assert block.grants == 1
        assert await fetched(pair, grant) == content


async def test_a_real_process_with_another_key_gets_nothing() -> None:
    async with open_far_end("tcp", same_key=False) as far:
        with pytest.raises(TransportError):
            await far.fetch(await far.ask("produce", "theirs", 1000, 1))


async def test_a_producer_with_another_key_is_asked_for_nothing() -> None:
    heard = list[bytes]()

    async def behave(connection: socket.socket) -> None:
        handshake = ServerHandshake(OTHER_KEY, random.randbytes(32))
        await send(connection, handshake.challenge)
        hello = await receive(connection, HELLO_SIZE)
        await send(connection, OTHER_KEY.mac(b"server", handshake.challenge, hello))
        heard.append(await receive(connection, WORD.size))

    async with open_pair("tcp") as pair, impostor(behave) as grant:
        with pytest.raises(HandshakeError, match="does not hold the cluster key"):
            await fetched(pair, grant)
        while not heard:
            await asyncio.sleep(0)
        assert heard == [b""]


async def test_something_else_at_the_address_is_not_even_told_the_name() -> None:
    heard = list[bytes]()

    async def behave(connection: socket.socket) -> None:
        await send(connection, b"220 mail.example ESMTP ready and waiting for you\r\n")
        heard.append(await receive(connection, 1))

    async with open_pair("tcp") as pair, impostor(behave) as grant:
        with pytest.raises(HandshakeError, match="does not speak this protocol"):
            await fetched(pair, grant)
        while not heard:
            await asyncio.sleep(0)
        assert heard == [b""]


async def test_a_silent_stranger_is_cut_off() -> None:
    async with open_pair("tcp", handshake_timeout=0.01) as pair:
        _, grant, _ = await granted(pair, 1000)
        async with dialled(grant) as connection:
            assert len(await receive(connection, CHALLENGE_SIZE + 1)) == CHALLENGE_SIZE


async def test_f86_strangers_beyond_a_limit_make_room_for_each_other_and_members_are_served() -> None:
    async with open_pair("tcp") as pair, AsyncExitStack() as stack:
        _, grant, content = await granted(pair, 1000)
        strangers = [await stack.enter_async_context(dialled(grant)) for _ in range(64)]
        for stranger in strangers:
            assert len(await receive(stranger, CHALLENGE_SIZE)) == CHALLENGE_SIZE
        assert await fetched(pair, grant) == content
        # The oldest one had to go, and no other one.
        assert await receive(strangers[0], 1) == b""
        for stranger in strangers[1:]:
            with pytest.raises(BlockingIOError):
                stranger.recv(1)


async def test_f86_a_member_keeps_its_connection_however_many_strangers_come() -> None:
    async with open_pair("tcp") as pair:
        _, grant, _ = await granted(pair, 1000)
        async with admitted(grant) as connection, AsyncExitStack() as stack:
            for _ in range(200):
                stranger = await stack.enter_async_context(dialled(grant))
                await receive(stranger, CHALLENGE_SIZE)
            await send(connection, WORD.pack(int(grant[3])))
            assert await receive(connection, WORD.size) == WORD.pack(1000)


@pytest.mark.parametrize("said", ["nothing", "the challenge"])
async def test_f86_a_consumer_that_is_dropped_before_it_has_proved_the_key_connects_again(said: str) -> None:
    came = list[socket.socket]()

    async def behave(connection: socket.socket) -> None:
        came.append(connection)
        if len(came) == 3:
            await admit(connection)
            await send(connection, WORD.pack(4) + b"here")
        elif said == "the challenge":
            await send(connection, ServerHandshake(KEY, bytes(32)).challenge)

    async with open_pair("tcp") as pair, impostor(behave, 4) as grant:
        assert await fetched(pair, grant) == b"here"
    assert len(came) == 3


async def test_a_producer_that_drops_every_connection_is_given_up() -> None:
    came = list[socket.socket]()

    async def behave(connection: socket.socket) -> None:
        came.append(connection)

    async with open_pair("tcp") as pair, impostor(behave) as grant:
        with pytest.raises(PeerGone, match="ended the connection before the handshake was over"):
            await fetched(pair, grant)
    assert len(came) == 16


async def test_running_out_of_descriptors_does_not_end_the_listener() -> None:
    async with open_pair("tcp") as pair:
        block, grant, content = await granted(pair, 1000)
        await pair.settle()
        with socket.socket() as stranger:
            with no_more_files():
                stranger.connect(address_of_grant(grant))
                await pair.settle()
            assert await fetched(pair, grant) == content
        again = pair.producer.transport.grant(block, pair.producer.control)
        assert await fetched(pair, again) == content


@pytest.mark.parametrize("end", ["closes", "resets"])
@pytest.mark.parametrize("words", [b"", b"\0\0\0", WORD.pack(17)])
async def test_a_consumer_that_ends_in_the_middle_of_anything_harms_no_other(end: str, words: bytes) -> None:
    async with open_pair("tcp") as pair:
        _, grant, content = await granted(pair, 1000)
        async with admitted(grant) as connection:
            await send(connection, words)
            if end == "resets":
                reset(connection)
        assert await fetched(pair, grant) == content


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(300)])])
async def test_members_and_strangers_that_come_and_go_leave_nothing(count: int) -> None:
    async with open_pair("tcp") as pair:
        _, grant, content = await granted(pair, 1000)

        async def come_and_go(times: int) -> None:
            for index in range(times):
                async with admitted(grant) if index % 2 else dialled(grant):
                    pass

        await come_and_go(50)
        await pair.settle()
        files, memory = len(open_files()), resident(os.getpid())
        await come_and_go(count)
        while len(open_files()) > files:
            await asyncio.sleep(0)
        assert resident(os.getpid()) - memory < 4 * MIB
        assert await fetched(pair, grant) == content
