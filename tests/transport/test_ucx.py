"""UCX: operations own their memory until they are complete, and only peers are listened to."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
from contextlib import AbstractAsyncContextManager

import pytest
from conformance import CHECKS, LoopbackControl, fetched, fill, granted
from ends import LocalHost, LocalPair, open_pair
from far_end import digest, numbers_in, open_far_end, pattern
from leaks import in_shared_memory, left_in_shared_memory
from transports import needs_ucx

from aiodaft_transport import PeerGone, TransportError, open_transport
from aiodaft_transport.memory import address_of
from aiodaft_transport.ucx.transport import UcxSettings, UcxTransport

pytestmark = needs_ucx

MIB = 1 << 20
# Long enough to be interrupted: two pieces are under way at a time, and a turn of the loop copies for 1 ms.
LARGE = 96 * MIB
POISON = b"\xee"


def opened(transport: object) -> UcxTransport:
    assert isinstance(transport, UcxTransport)
    return transport


def over_tcp(turn_seconds: float = 0.001) -> AbstractAsyncContextManager[LocalPair]:
    """A pair as between hosts: nothing is shared."""
    return open_pair("ucx", interface="lo", settings=UcxSettings(local="self", turn_seconds=turn_seconds))


async def drained(transport: UcxTransport) -> None:
    """Nothing is in flight any more."""
    while transport.driver.in_flight:
        await asyncio.sleep(0)


# Sizes, numbers, registration.


@pytest.mark.parametrize("nbytes", [1, 8 * MIB - 1, 8 * MIB, 8 * MIB + 1, 24 * MIB + 7])
async def test_any_size_arrives_also_at_the_borders_of_pieces(nbytes: int) -> None:
    async with open_pair("ucx") as pair:
        block = pair.producer.transport.allocate(nbytes)
        block.view[:] = pattern(nbytes, 5)
        grant = pair.producer.transport.grant(block, pair.producer.control)
        await pair.settle()
        assert digest(await fetched(pair, grant)) == digest(block.view)
        await pair.settle()
        assert block.grants == 0


@pytest.mark.soak
async def test_a_gibibyte_arrives_from_another_process() -> None:
    async with open_far_end("ucx") as far:
        view = await far.fetch(await far.ask("fill", "all", 1 << 30))
        assert numbers_in(view) == list(range(1024))


async def test_without_shared_memory_it_works_over_a_network() -> None:
    async with over_tcp() as pair:
        for nbytes in (1, 5000, 20 * MIB + 1):
            _, grant, content = await granted(pair, nbytes)
            assert await fetched(pair, grant) == content


async def test_memory_is_registered_once_per_segment_however_often_it_is_used() -> None:
    async with open_pair("ucx") as pair:
        ends = [opened(pair.producer.transport), opened(pair.consumer.transport)]
        for seed in range(20):
            block, grant, content = await granted(pair, 100_000, seed)
            assert await fetched(pair, grant) == content
            block.release()
            await pair.settle()
        # One for blocks, one for values that arrive, one for the stamps of each.
        assert [end.registrations for end in ends] == [2, 2]


async def test_memory_of_users_is_registered_each_time_or_once_and_needs_no_other_memory() -> None:
    async with open_pair("ucx") as pair:
        producer, consumer = opened(pair.producer.transport), opened(pair.consumer.transport)
        source, target = bytearray(MIB), memoryview(bytearray(MIB))
        producer.register(address_of(source), MIB)
        counts: list[tuple[int, int]] = []
        for seed in range(40):
            if seed == 20:
                consumer.register(address_of(target), MIB)
            block = producer.block_at(memoryview(source))
            assert block is not None
            content = fill(block, seed)
            grant = producer.grant(block, pair.producer.control)
            await pair.settle()
            await consumer.fetch_into(grant, pair.consumer.control, target)
            assert target == content
            counts.append((producer.registrations, consumer.registrations))
            await pair.settle()
        # The stamps and the source; the stamps and the target, time after time until it was registered.
        assert counts == [(2, 2 + min(seed, 20)) for seed in range(40)]
        for arena in (producer.arena, producer.landing, consumer.arena, consumer.landing):
            assert (arena.live_blocks(), arena.idle_bytes()) == (0, 0)
        del block


async def test_hundreds_at_once_keep_few_operations_in_flight() -> None:
    async with open_pair("ucx") as pair:
        consumer = opened(pair.consumer.transport)
        block = pair.producer.transport.allocate(20 * MIB)
        block.view[:] = pattern(20 * MIB, 1)
        small = [await granted(pair, 1000 + seed, seed) for seed in range(300)]
        large = [pair.producer.transport.grant(block, pair.producer.control) for _ in range(8)]
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(fetched(pair, grant)) for grant in (*large, *(grant for _, grant, _ in small))]
        most = 0
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            most = max(most, consumer.driver.in_flight)
        assert most <= 8 * 2 + 300
        assert all(digest(task.result()) == digest(block.view) for task in tasks[:8])
        assert all(task.result() == content for task, (_, _, content) in zip(tasks[8:], small, strict=True))
        del tasks


async def test_a_process_may_fetch_from_itself() -> None:
    host = LocalHost()
    transport = open_transport("ucx", host)
    control = LoopbackControl("self")
    control.connect(transport, control)
    block = transport.allocate(3 * MIB)
    block.view[:] = pattern(3 * MIB, 1)
    grant = transport.grant(block, control)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert digest(await transport.fetch(grant, control)) == digest(block.view)
    transport.close()
    await host.aclose()


# Cancelling.


async def _cancelled_after(pair: LocalPair, ticks: int) -> bool:
    """Cancel a fetch of three pieces after so many turns; whether it was still under way."""
    consumer = opened(pair.consumer.transport)
    nbytes = 24 * MIB
    block = pair.producer.transport.allocate(nbytes)
    ctypes.memset(block.address, ticks % 200 + 1, nbytes)
    grant = pair.producer.transport.grant(block, pair.producer.control)
    await pair.settle()
    task = asyncio.get_running_loop().create_task(fetched(pair, grant))
    for _ in range(ticks):
        await asyncio.sleep(0)
    interrupted = not task.done()
    task.cancel()
    await asyncio.wait([task])
    # Memory that is taken now must have only one writer.
    poisoned = [consumer.landing.allocate(nbytes) for _ in range(2)]
    for one in poisoned:
        ctypes.memset(one.address, POISON[0], nbytes)
    await drained(consumer)
    assert all(bytes(one.view) == POISON * nbytes for one in poisoned)
    for one in poisoned:
        one.release()
    block.release()
    del task
    await pair.settle()
    assert consumer.landing.live_blocks() == 0
    assert block.grants == 0
    return interrupted


async def _cancelled_everywhere(pair: LocalPair) -> int:
    """Cancel fetches later and later, until one was complete before that; how many were not."""
    # One that was not begun has nothing to give back.
    interrupted, ticks = 0, 1
    while await _cancelled_after(pair, ticks):
        interrupted += 1
        ticks += 1 + ticks // 4
    return interrupted


# Each turn makes UCX progress once: how far a transfer is after so many turns does not depend on the clock.


async def test_memory_of_a_cancelled_fetch_is_not_reused_before_ucx_is_done_with_it() -> None:
    async with open_pair("ucx", settings=UcxSettings(turn_seconds=0.0)) as pair:
        assert await _cancelled_everywhere(pair) >= 8


async def test_memory_of_a_fetch_that_is_cancelled_over_a_network_is_not_reused_early() -> None:
    async with over_tcp(turn_seconds=0.0) as pair:
        assert await _cancelled_everywhere(pair) >= 8


async def test_memory_is_its_owners_again_once_a_fetch_into_it_over_a_network_is_cancelled() -> None:
    async with over_tcp() as pair:
        await CHECKS["memory_is_its_owners_again_once_a_fetch_into_it_is_cancelled"](pair)


async def test_a_cancelled_fetch_frees_its_memory_only_after_the_last_piece() -> None:
    async with open_pair("ucx") as pair:
        consumer = opened(pair.consumer.transport)
        block = pair.producer.transport.allocate(LARGE)
        grant = pair.producer.transport.grant(block, pair.producer.control)
        await pair.settle()
        task = asyncio.get_running_loop().create_task(fetched(pair, grant))
        while not consumer.driver.in_flight:
            await asyncio.sleep(0)
        task.cancel()
        assert consumer.landing.live_blocks() == 1
        assert block.grants == 1
        await drained(consumer)
        await asyncio.wait([task])
        await pair.settle()
        assert (consumer.landing.live_blocks(), block.grants) == (0, 0)
        del task


# Death.


@pytest.mark.parametrize("ticks", [2, *(pytest.param(ticks, marks=pytest.mark.soak) for ticks in (0, 1, 5))])
async def test_a_producer_killed_in_the_middle_is_gone_at_once_and_others_go_on(ticks: int) -> None:
    shared = in_shared_memory()
    async with (
        open_far_end("ucx", peer="first") as first,
        open_far_end("ucx", peer="second", beside=first) as second,
    ):
        transport = opened(first.transport)
        safe = await first.ask("produce", "safe", 20 * MIB, 2)
        # Connected, so that nothing but the transfer itself can fail.
        await second.fetch(await second.ask("produce", "before", 1000, 1))
        doomed = await second.ask("produce", "doomed", 256 * MIB, 1)
        lost = asyncio.get_running_loop().create_task(second.fetch(doomed))
        other = asyncio.get_running_loop().create_task(first.fetch(safe))
        for _ in range(ticks):
            await asyncio.sleep(0)
        os.kill(second.pid, signal.SIGKILL)
        await second.kill()
        await asyncio.wait([lost], timeout=1)
        assert isinstance(lost.exception(), PeerGone)
        assert digest(await other) == digest(pattern(20 * MIB, 2))
        assert digest(await first.fetch(await first.ask("produce", "next", 100, 3))) == digest(pattern(100, 3))
        del other, lost
        gc.collect()
        await drained(transport)
        assert transport.landing.live_blocks() == 0
    assert left_in_shared_memory(shared) == set()


async def test_a_consumer_killed_in_the_middle_frees_what_it_read_and_others_go_on() -> None:
    async with (
        open_far_end("ucx", peer="first") as first,
        open_far_end("ucx", peer="second", beside=first) as second,
    ):
        begun, grant = second.give(1000, 1)
        assert await second.ask("fetch", "before", grant) == digest(pattern(1000, 1))
        block, grant = second.give(256 * MIB, 1)
        asked = asyncio.get_running_loop().create_task(second.ask("fetch", "doomed", grant))
        await second.ask("settle")
        assert block.grants == 1
        os.kill(second.pid, signal.SIGKILL)
        await second.kill()
        asked.cancel()
        assert [block.grants, begun.grants] == [0, 0]
        _, grant = first.give(MIB, 4)
        assert await first.ask("fetch", "next", grant) == digest(pattern(MIB, 4))
        await asyncio.wait([asked])
        del asked


async def test_what_a_producer_took_back_while_it_was_read_is_never_taken_for_a_value() -> None:
    """The consumer learns late that it is lost: the memory may already be something else."""
    async with open_pair("ucx") as pair:
        block = pair.producer.transport.allocate(LARGE)
        ctypes.memset(block.address, 1, LARGE)
        grant = pair.producer.transport.grant(block, pair.producer.control)
        await pair.settle()
        task = asyncio.get_running_loop().create_task(fetched(pair, grant))
        while not opened(pair.consumer.transport).driver.in_flight:
            await asyncio.sleep(0)
        pair.producer.transport.peer_lost("consumer")
        assert block.grants == 0
        ctypes.memset(block.address, 2, LARGE)
        with pytest.raises(PeerGone):
            await task
        del task


async def test_closing_in_the_middle_fails_the_fetch_and_frees_everything() -> None:
    for side in ("producer", "consumer"):
        async with open_pair("ucx") as pair:
            _, first, content = await granted(pair, 100)
            assert await fetched(pair, first) == content
            block = pair.producer.transport.allocate(LARGE)
            grant = pair.producer.transport.grant(block, pair.producer.control)
            await pair.settle()
            task = asyncio.get_running_loop().create_task(fetched(pair, grant))
            await asyncio.sleep(0)
            getattr(pair, side).transport.close()
            getattr(pair, side).transport.close()
            with pytest.raises(TransportError):
                await task
            del task


# Waiting.


async def test_an_idle_connection_does_nothing_at_all() -> None:
    async with open_far_end("ucx") as far:
        await far.fetch(await far.ask("produce", "one", MIB, 1))
        assert await far.ask("fetch", "two", far.give(MIB, 2)[1]) == digest(pattern(MIB, 2))
        await far.settle()
        before = opened(far.transport).driver.turns, await far.ask("turns")
        # Longer than anything that UCX does from time to time by itself.
        await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=1.5)
        assert (opened(far.transport).driver.turns, await far.ask("turns")) == before
