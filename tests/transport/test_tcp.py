"""A peer gets its granted bytes and no more; one that ends, or misbehaves, fails its own transfers and no other."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Awaitable
from contextlib import suppress

import pytest
from conformance import LoopbackControl, fetched, granted
from ends import LocalEnd, LocalHost, LocalPair, open_pair
from far_end import digest, open_far_end, pattern
from hypothesis import given, settings
from hypothesis import strategies as st
from leaks import open_files
from tcp_ends import REPLY, REQUEST, impostor, opened, receive, request, reset, send
from transport_probes import no_more_threads

from aiodaft_transport import GrantError, PeerGone, TransportError
from aiodaft_transport.tcp import TcpTransport

MIB = 1 << 20


def consumer_of(pair: LocalPair) -> TcpTransport:
    transport = pair.consumer.transport
    assert isinstance(transport, TcpTransport)
    return transport


def sockets() -> int:
    return sum(target.startswith("socket:") for target in open_files().values())


async def test_no_socket_is_made_before_the_first_fetch() -> None:
    before = sockets()
    async with open_pair("tcp") as pair:
        _, grant, content = await granted(pair, 10)
        assert sockets() == before
        assert await fetched(pair, grant) == content
        assert sockets() == before + 2


@pytest.mark.parametrize("nbytes", [1, MIB, MIB + 1, 32 * MIB - 1, 32 * MIB, 64 * MIB + 1])
async def test_any_size_arrives_also_at_the_borders_of_parts(nbytes: int) -> None:
    async with open_pair("tcp") as pair:
        block = pair.producer.transport.allocate(nbytes)
        block.view[:] = pattern(nbytes, 5)
        view = await fetched(pair, pair.producer.transport.grant(block, pair.producer.control))
        assert digest(view) == digest(pattern(nbytes, 5))
        # The producer counts the last part when it has sent it.
        while block.grants:
            await asyncio.sleep(0)


@pytest.mark.parametrize(("nbytes", "streams"), [(16 * MIB, 1), (32 * MIB, 2), (100 * MIB, 4), (256 * MIB, 4)])
async def test_a_large_block_comes_over_several_streams(nbytes: int, streams: int) -> None:
    before = sockets()
    async with open_pair("tcp") as pair:
        block = pair.producer.transport.allocate(nbytes)
        view = await fetched(pair, pair.producer.transport.grant(block, pair.producer.control))
        assert view.nbytes == nbytes
        assert sockets() - before == 2 * streams


async def test_several_pulls_at_once_use_streams_of_their_own_and_keep_four() -> None:
    before = sockets()
    async with open_pair("tcp") as pair:
        made = [await granted(pair, 2 * MIB, seed) for seed in range(12)]
        views = await asyncio.gather(*(fetched(pair, grant) for _, grant, _ in made))
        assert all(view == content for view, (_, _, content) in zip(views, made, strict=True))
        # Both ends of each stream; that the others were closed, the producer hears by and by.
        while sockets() - before > 2 * 4:
            await asyncio.sleep(0)
        assert sockets() - before == 2 * 4
        for seed in range(12):
            _, grant, content = await granted(pair, 100, seed)
            assert await fetched(pair, grant) == content
        assert sockets() - before == 2 * 4


async def test_where_no_thread_can_be_started_the_loop_moves_a_block() -> None:
    async with open_pair("tcp") as pair:
        with no_more_threads():
            _, grant, content = await granted(pair, 32 * MIB)
            assert await fetched(pair, grant) == content
        assert "aiodaft moves payload" not in {thread.name for thread in threading.enumerate()}
        _, grant, content = await granted(pair, 2 * MIB)
        assert await fetched(pair, grant) == content


async def test_a_peer_that_asks_for_what_it_was_not_granted_is_told_so_and_stays() -> None:
    async with open_pair("tcp") as pair:
        block, grant, content = await granted(pair, 1000)
        number = int(grant[3])
        wrong = [(id_, 0, 1000) for id_ in (0, 2, 10**9, 2**64 - 1)]
        wrong += [(number, *part) for part in ((0, 0), (0, 1001), (1, 1000), (1000, 1), (2**64 - 1, 2), (0, 2**64 - 1))]
        async with opened(pair) as stream:
            for words in wrong:
                await send(stream, REQUEST.pack(*words))
                assert await receive(stream, REPLY.size) == REPLY.pack(0)
            await send(stream, request(grant))
            assert await receive(stream, 1008) == REPLY.pack(1000) + content
            await pair.settle()
            assert block.grants == 0


async def test_a_grant_ends_when_every_part_was_sent() -> None:
    async with open_pair("tcp") as pair, opened(pair) as first, opened(pair) as second:
        block, grant, content = await granted(pair, 1000)
        await send(second, request(grant, 600, 400))
        assert await receive(second, 408) == REPLY.pack(1000) + content[600:]
        await pair.settle()
        assert block.grants == 1
        await send(first, request(grant, 0, 600))
        assert await receive(first, 608) == REPLY.pack(1000) + content[:600]
        await pair.settle()
        assert block.grants == 0


async def test_the_grant_of_one_peer_is_worth_nothing_to_another() -> None:
    async with open_pair("tcp") as pair:
        _, grant, _ = await granted(pair, 1000)
        async with opened(pair, "another") as stream:
            await send(stream, request(grant))
            assert await receive(stream, REPLY.size) == REPLY.pack(0)


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
        async with opened(pair) as stream:
            await send(stream, request(grant))
            assert len(await receive(stream, 100_000)) == 100_000
            assert pair.producer.live_blocks() == 1
            reset(stream)
        while pair.producer.live_blocks():
            await asyncio.sleep(0)


async def test_a_block_is_not_reused_while_a_part_of_it_is_being_sent() -> None:
    async with open_pair("tcp") as pair, opened(pair) as slow, opened(pair) as broken:
        block, grant, content = await granted(pair, 40 * MIB)
        block.release()
        await send(slow, request(grant, 0, 39 * MIB))
        assert await receive(slow, REPLY.size) == REPLY.pack(40 * MIB)
        await send(broken, request(grant, 39 * MIB, MIB))
        await receive(broken, REPLY.size)
        reset(broken)
        # The other part has ended the grant, and the block is still used.
        pair.consumer.transport.decline(grant, pair.consumer.control)
        await pair.settle()
        assert pair.producer.live_blocks() == 1
        assert digest(await receive(slow, 39 * MIB)) == digest(content[: 39 * MIB])
        while pair.producer.live_blocks():
            await asyncio.sleep(0)


@pytest.mark.parametrize("end", ["closes", "resets"])
@pytest.mark.parametrize("words", [b"", b"\0\0\0", REQUEST.pack(17, 0, 5)])
async def test_a_consumer_that_ends_in_the_middle_of_anything_harms_no_other(end: str, words: bytes) -> None:
    async with open_pair("tcp") as pair:
        _, grant, content = await granted(pair, 1000)
        async with opened(pair) as stream:
            await send(stream, words)
            if end == "resets":
                reset(stream)
        assert await fetched(pair, grant) == content


async def test_a_consumer_that_reads_nothing_holds_up_no_other() -> None:
    async with open_pair("tcp") as pair, opened(pair) as slow:
        _, grant, _ = await granted(pair, 40 * MIB)
        await send(slow, request(grant))
        assert await receive(slow, REPLY.size) == REPLY.pack(40 * MIB)
        _, other, content = await granted(pair, 40 * MIB, 2)
        assert digest(await fetched(pair, other)) == digest(content)


@pytest.mark.parametrize("nbytes", [500_000, 5 * MIB])
@pytest.mark.parametrize("missing", [1, 500_000])
@pytest.mark.parametrize("end", ["closes", "resets"])
async def test_a_producer_that_ends_midway_fails_the_pull_and_nothing_partial_is_seen(
    nbytes: int, missing: int, end: str
) -> None:
    async def behave(stream: socket.socket) -> None:
        await receive(stream, REQUEST.size)
        await send(stream, REPLY.pack(nbytes) + bytes(nbytes - missing))
        if end == "resets":
            reset(stream)

    async with open_pair("tcp") as pair:
        async with impostor(pair, behave, nbytes) as grant:
            with pytest.raises(PeerGone, match=rf"after {nbytes - missing} of {nbytes} bytes|stream broke"):
                await fetched(pair, grant)
        assert consumer_of(pair).landing.live_blocks() == 0
        block, real, content = await granted(pair, nbytes)
        assert await fetched(pair, real) == content
        block.release()


@pytest.mark.parametrize("said", [None, b"", b"\0\0\0"])
async def test_a_producer_that_ends_before_the_first_byte_fails_the_pull(said: bytes | None) -> None:
    async def behave(stream: socket.socket) -> None:
        if said is not None:
            await receive(stream, REQUEST.size)
            await send(stream, said)

    async with open_pair("tcp") as pair, impostor(pair, behave) as grant:
        with pytest.raises(PeerGone):
            await fetched(pair, grant)


async def test_without_a_stream_the_grant_comes_back() -> None:
    async def refuse(peer: str) -> socket.socket:
        raise OSError("no way")

    async with open_pair("tcp") as pair:
        block, grant, _ = await granted(pair, 1000)
        pair.consumer.host.connecting = refuse
        with pytest.raises(PeerGone, match="no stream to producer: no way"):
            await fetched(pair, grant)
        await pair.settle()
        assert block.grants == 0
        assert consumer_of(pair).landing.live_blocks() == 0


async def test_a_stream_to_a_peer_that_was_lost_meanwhile_is_closed() -> None:
    before = sockets()
    async with open_pair("tcp") as pair:
        _, grant, _ = await granted(pair, 1000)
        connect = pair.consumer.host.connect

        async def lose(peer: str) -> socket.socket:
            pair.consumer.host.connecting = None
            stream = await connect(peer)
            pair.consumer.transport.peer_lost(peer)
            return stream

        pair.consumer.host.connecting = lose
        with pytest.raises(PeerGone, match="producer is gone"):
            await fetched(pair, grant)
    assert sockets() == before


async def test_a_killed_process_fails_its_transfer_while_others_live_on() -> None:
    async with open_far_end("tcp", peer="first") as first, open_far_end("tcp", peer="second", beside=first) as second:
        doomed, safe = await second.ask("produce", "a", 96 * MIB, 1), await first.ask("produce", "b", 30 * MIB, 2)
        # Stopped, it sends no more than the bytes that the kernel took of it already.
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


@pytest.mark.parametrize("nbytes", [1000, 40 * MIB])
@pytest.mark.parametrize("sent", [None, 0, 10])
async def test_losing_the_peer_ends_a_pull_that_waits_whatever_for(nbytes: int, sent: int | None) -> None:
    """A machine that vanished sends no end of the stream; only `peer_lost` says that it is over."""
    reached = asyncio.Event()

    async def behave(stream: socket.socket) -> None:
        await receive(stream, REQUEST.size)
        if sent is not None:
            await send(stream, REPLY.pack(nbytes) + bytes(sent))
        reached.set()
        await asyncio.Event().wait()

    async with open_pair("tcp") as pair, impostor(pair, behave, nbytes) as grant:
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


async def test_a_cancelled_fetch_into_given_memory_has_stopped_writing() -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def behave(stream: socket.socket) -> None:
        await receive(stream, REQUEST.size)
        await send(stream, REPLY.pack(40 * MIB) + b"\1" * MIB)
        reached.set()
        await go_on.wait()
        await send(stream, b"\2" * MIB)

    target = memoryview(bytearray(40 * MIB))
    async with open_pair("tcp") as pair, impostor(pair, behave, 40 * MIB) as grant:
        into = pair.consumer.transport.fetch_into(grant, pair.consumer.control, target)
        fetching = asyncio.get_running_loop().create_task(_awaited(into))
        await reached.wait()
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        found = digest(target)
        go_on.set()
        await pair.settle()
        assert digest(target) == found
        del into, fetching


async def _awaited(into: Awaitable[None]) -> None:
    await into


async def test_closing_ends_pulls_on_both_sides_and_every_stream() -> None:
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


async def test_a_stream_that_comes_after_closing_is_closed() -> None:
    async with open_pair("tcp") as pair:
        pair.producer.transport.close()
        async with opened(pair) as stream:
            assert await receive(stream, 1) == b""


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
    transport = TcpTransport(LocalHost())
    with suppress(TransportError):
        transport.note_received(LoopbackControl("consumer"), note, [])
    transport.close()
