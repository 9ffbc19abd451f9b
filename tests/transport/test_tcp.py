"""Strangers get nothing and stop nothing; a peer that ends fails its own transfers and no other."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from conformance import LoopbackControl, fetched, granted
from ends import KEY, LocalEnd, LocalHost, LocalPair, open_pair
from far_end import digest, open_far_end, pattern
from hypothesis import given, settings
from hypothesis import strategies as st
from leaks import open_files
from tcp_ends import WORD, address_of_grant, admit, admitted, dialled, impostor, receive, reset, send

from aiodaft_transport import GrantError, PeerGone, TransportError
from aiodaft_transport.handshake import CHALLENGE_SIZE, HELLO_SIZE, MAGIC, ServerHandshake
from aiodaft_transport.tcp import TcpTransport

MIB = 1 << 20


def consumer_of(pair: LocalPair) -> TcpTransport:
    transport = pair.consumer.transport
    assert isinstance(transport, TcpTransport)
    return transport


def listening_at(port: int) -> list[str]:
    """Local addresses at which this process listens at a port, in the kernel's hexadecimal, the lowest byte first."""
    inodes = {target[8:-1] for target in open_files().values() if target.startswith("socket:[")}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    places = [fields[1].split(":") for fields in lines if fields[3] == "0A" and fields[9] in inodes]
    return [address for address, number in places if int(number, 16) == port]


def sockets() -> int:
    return sum(target.startswith("socket:") for target in open_files().values())


async def test_nothing_listens_before_the_first_grant_nor_after_closing() -> None:
    before = sockets()
    async with open_pair("tcp") as pair:
        block = pair.producer.transport.allocate(10)
        assert sockets() == before
        grant = pair.producer.transport.grant(block, pair.producer.control)
        assert sockets() == before + 1
        pair.producer.transport.grant(block, pair.producer.control)
        assert sockets() == before + 1
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address_of_grant(grant)).close()


async def test_only_the_loopback_address_listens() -> None:
    async with open_pair("tcp") as pair:
        _, grant, _ = await granted(pair, 10)
        assert grant[0] == "127.0.0.1"
        assert listening_at(int(grant[1])) == ["0100007F"]


@pytest.mark.parametrize("interface", ["", "0.0.0.0", "::", "0", "0.0", "000.000.000.000", "0x0"])
def test_listening_on_all_interfaces_is_refused_however_it_is_spelled(interface: str) -> None:
    with pytest.raises(ValueError, match="one named interface"):
        TcpTransport(LocalHost(), KEY, name="x", interface=interface)


async def test_a_chosen_interface_is_the_one_that_listens() -> None:
    host = LocalHost()
    transport = TcpTransport(host, KEY, name="x", interface="127.0.0.2")
    grant = transport.grant(transport.allocate(1), LoopbackControl("consumer"))
    assert grant[0] == "127.0.0.2"
    async with dialled(grant) as connection:
        assert (await receive(connection, CHALLENGE_SIZE)).startswith(MAGIC)
    transport.close()
    await host.aclose()


@pytest.mark.parametrize("nbytes", [1, MIB - 1, MIB, MIB + 1, 4 * MIB, 64 * MIB + 1])
async def test_any_size_arrives_also_at_the_borders_of_chunks(nbytes: int) -> None:
    async with open_pair("tcp") as pair:
        block = pair.producer.transport.allocate(nbytes)
        block.view[:] = pattern(nbytes, 5)
        view = await fetched(pair, pair.producer.transport.grant(block, pair.producer.control))
        assert digest(view) == digest(pattern(nbytes, 5))
        assert block.grants == 0


async def test_several_pulls_at_once_use_connections_of_their_own_and_keep_four() -> None:
    before = sockets()
    async with open_pair("tcp") as pair:
        made = [await granted(pair, 2 * MIB, seed) for seed in range(12)]
        views = await asyncio.gather(*(fetched(pair, grant) for _, grant, _ in made))
        assert all(view == content for view, (_, _, content) in zip(views, made, strict=True))
        # The listener, and both ends of each connection; that the others were closed, the producer hears by and by.
        while sockets() - before > 1 + 2 * 4:
            await asyncio.sleep(0)
        assert sockets() - before == 1 + 2 * 4
        for seed in range(12):
            _, grant, content = await granted(pair, 100, seed)
            assert await fetched(pair, grant) == content
        assert sockets() - before == 1 + 2 * 4


async def test_a_member_that_asks_for_what_it_was_not_granted_is_told_so_and_stays() -> None:
    async with open_pair("tcp") as pair:
        block, grant, content = await granted(pair, 1000)
        async with admitted(grant) as connection:
            for number in (0, 2, 10**9, 2**64 - 1):
                await send(connection, WORD.pack(number))
                assert await receive(connection, 8) == WORD.pack(0)
            await send(connection, WORD.pack(int(grant[3])))
            assert await receive(connection, 1008) == WORD.pack(1000) + content
            await pair.settle()
            assert block.grants == 0


async def test_the_grant_of_one_peer_is_worth_nothing_to_another() -> None:
    async with open_pair("tcp") as pair:
        _, grant, _ = await granted(pair, 1000)
        async with admitted(grant, name="another") as connection:
            await send(connection, WORD.pack(int(grant[3])))
            assert await receive(connection, 8) == WORD.pack(0)


async def test_a_grant_that_promises_another_size_is_refused_and_comes_back() -> None:
    async with open_pair("tcp") as pair:
        block, grant, _ = await granted(pair, 1000)
        with pytest.raises(GrantError, match="was for 500 bytes but the peer has 1000"):
            await fetched(pair, (*grant[:2], 500, grant[3]))
        await pair.settle()
        assert block.grants == 0


async def test_a_consumer_that_ends_in_the_middle_of_a_block_has_given_it_back() -> None:
    async with open_pair("tcp") as pair:
        block, grant, _ = await granted(pair, 40 * MIB)
        block.release()
        async with admitted(grant) as connection:
            await send(connection, WORD.pack(int(grant[3])))
            assert len(await receive(connection, 100_000)) == 100_000
            assert pair.producer.live_blocks() == 1
            reset(connection)
        while pair.producer.live_blocks():
            await asyncio.sleep(0)


@pytest.mark.parametrize("sent", [0, 1, 499_999])
@pytest.mark.parametrize("end", ["closes", "resets"])
async def test_a_producer_that_ends_midway_fails_the_pull_and_nothing_partial_is_seen(sent: int, end: str) -> None:
    async def behave(connection: socket.socket) -> None:
        await admit(connection)
        await send(connection, WORD.pack(500_000) + bytes(sent))
        if end == "resets":
            reset(connection)

    async with open_pair("tcp") as pair, impostor(behave, 500_000) as grant:
        with pytest.raises(PeerGone, match=rf"after {sent} of 500000 bytes|connection broke"):
            await fetched(pair, grant)
        assert consumer_of(pair).landing.live_blocks() == 0
        block, real, content = await granted(pair, 500_000)
        assert await fetched(pair, real) == content
        block.release()


@pytest.mark.parametrize("stage", range(4))
async def test_a_producer_that_ends_before_the_first_byte_fails_the_pull(stage: int) -> None:
    async def behave(connection: socket.socket) -> None:
        handshake = ServerHandshake(KEY, random.randbytes(32))
        if stage >= 1:
            await send(connection, handshake.challenge)
            _, accept = handshake.receive_hello(await receive(connection, HELLO_SIZE))
        if stage >= 2:
            await send(connection, accept)
            await receive(connection, WORD.size)
        if stage >= 3:
            await send(connection, b"\0\0\0")

    async with open_pair("tcp") as pair, impostor(behave) as grant:
        with pytest.raises(PeerGone):
            await fetched(pair, grant)


async def test_a_producer_that_is_not_there_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    async with open_pair("tcp") as pair:
        with pytest.raises(PeerGone, match=f"no connection to 127.0.0.1:{port}"):
            await fetched(pair, ("127.0.0.1", port, 10, 1))


async def test_a_killed_process_fails_its_transfer_while_others_live_on() -> None:
    async with (
        open_far_end("tcp", peer="first") as first,
        open_far_end("tcp", peer="second", transport=first.transport) as second,
    ):
        doomed, safe = await second.ask("produce", "a", 96 * MIB, 1), await first.ask("produce", "b", 30 * MIB, 2)
        # Stopped, it sends no more than what the kernel took of it already.
        second.process.send_signal(signal.SIGSTOP)
        lost = asyncio.get_running_loop().create_task(second.fetch(doomed))
        other = asyncio.get_running_loop().create_task(first.fetch(safe))
        await asyncio.sleep(0)
        second.process.kill()
        with pytest.raises(PeerGone):
            await lost
        assert digest(await other) == digest(pattern(30 * MIB, 2))
        assert digest(await first.fetch(await first.ask("produce", "c", 100, 3))) == digest(pattern(100, 3))
        del other, lost


@pytest.mark.parametrize("stage", ["before the challenge", "before the accept", "before the first byte", "midway"])
async def test_losing_the_peer_ends_a_pull_that_waits_whatever_for(stage: str) -> None:
    """A machine that vanished sends no end of the stream; only `peer_lost` says that it is over."""
    reached = asyncio.Event()

    async def behave(connection: socket.socket) -> None:
        if stage == "before the accept":
            await send(connection, ServerHandshake(KEY, bytes(32)).challenge)
            await receive(connection, HELLO_SIZE)
        elif stage != "before the challenge":
            await admit(connection)
        if stage == "midway":
            await send(connection, WORD.pack(1000) + bytes(10))
        reached.set()
        await asyncio.Event().wait()

    async with open_pair("tcp") as pair, impostor(behave) as grant:
        pull = asyncio.get_running_loop().create_task(fetched(pair, grant))
        await reached.wait()
        await pair.settle()
        pair.consumer.transport.peer_lost("producer")
        try:
            await asyncio.wait([pull], timeout=5)
            assert pull.done()
            assert isinstance(pull.exception(), PeerGone)
        finally:
            pull.cancel()
            await asyncio.wait([pull])


async def test_closing_ends_pulls_on_both_sides_and_every_connection() -> None:
    before = sockets()
    for side in ("producer", "consumer"):
        async with open_pair("tcp") as pair:
            _, first, _ = await granted(pair, 100)
            await fetched(pair, first)
            _, grant, _ = await granted(pair, 64 * MIB)
            pull = asyncio.get_running_loop().create_task(fetched(pair, grant))
            for _ in range(4):
                await asyncio.sleep(0)
            end: LocalEnd = getattr(pair, side)
            end.transport.close()
            end.transport.close()
            with pytest.raises(TransportError):
                await pull
            del pull
        assert sockets() == before


async def test_closing_at_once_after_the_first_grant_leaves_no_listener() -> None:
    before = sockets()
    host = LocalHost()
    transport = TcpTransport(host, KEY, name="x")
    transport.grant(transport.allocate(1), LoopbackControl("consumer"))
    transport.close()
    await host.aclose()
    assert sockets() == before


async def test_giving_a_grant_back_twice_does_no_harm() -> None:
    async with open_pair("tcp") as pair:
        block, grant, _ = await granted(pair, 1000)
        again = pair.producer.transport.grant(block, pair.producer.control)
        for _ in range(2):
            pair.consumer.transport.decline(grant, pair.consumer.control)
        await pair.settle()
        assert block.grants == 1
        pair.consumer.transport.decline(again, pair.consumer.control)
        await pair.settle()
        assert block.grants == 0


@settings(deadline=None)
@given(st.binary(max_size=20))
def test_a_garbled_note_is_a_transport_error_at_most(note: bytes) -> None:
    transport = TcpTransport(LocalHost(), KEY, name="x")
    with suppress(TransportError):
        transport.note_received(LoopbackControl("consumer"), note, [])
    transport.close()
