"""One value for many: one block where memory is shared, passed on from consumer to consumer where not (row DP5)."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from relay_actors import Sink, Source, digest, made
from transports import needs_ucx

import aiodaft

MIB = 1 << 20
SIZE = 8 * MIB


@asynccontextmanager
async def opened(transport: str, sinks: int) -> AsyncGenerator[tuple[aiodaft.Runtime, Source, list[Sink]], None]:
    async with aiodaft.Runtime(preload=("relay_actors",), transport=transport, stop_grace=1) as rt:
        yield rt, await rt.spawn(Source), list(await asyncio.gather(*(rt.spawn(Sink) for _ in range(sinks))))


async def stored(rt: aiodaft.Runtime, actors: list[Sink]) -> list[int]:
    return [(await rt.info(actor)).stored_bytes for actor in actors]


async def nothing_stored(rt: aiodaft.Runtime, actors: list[Sink]) -> None:
    """Wait until no process has a copy any more: the time limit of the promise."""
    gc.collect()
    async with asyncio.timeout(1):
        while any(await stored(rt, actors)):
            await asyncio.sleep(0)


async def test_on_one_host_eight_consumers_read_one_block() -> None:
    nbytes = 64 * MIB
    async with opened("shm", 8) as (_, source, sinks):
        ref = source.make(nbytes)
        found = await asyncio.gather(*(sink.hold(ref) for sink in sinks))
        assert {content for content, _, _ in found} == {digest(made(nbytes))}
        assert await source.live_blocks() == 1
        # Reading it dirties no memory of their own.
        assert max(own for _, own, _ in found) < 8 * MIB
        assert min(shared for _, _, shared in found) > nbytes - 8 * MIB


@pytest.mark.parametrize("transport", ["tcp", pytest.param("ucx", marks=needs_ucx)])
async def test_the_producer_sends_twice_and_the_consumers_the_rest(transport: str) -> None:
    async with opened(transport, 8) as (rt, source, sinks):
        ref = source.make(SIZE)
        expected = digest(made(SIZE))
        assert await asyncio.gather(*(sink.take(ref) for sink in sinks)) == [expected] * 8
        assert await source.sent() == 2 * SIZE
        assert sum([await sink.sent() for sink in sinks]) == 6 * SIZE
        # Processes that ask late, and this one too.
        assert digest(await ref) == expected
        assert await source.sent() == 2 * SIZE
        assert sum(await stored(rt, sinks)) > SIZE
        del ref
        await nothing_stored(rt, [source, *sinks])  # type: ignore[list-item]  # any actor


async def test_those_who_come_one_after_the_other_find_one_copy() -> None:
    async with opened("tcp", 5) as (rt, source, sinks):
        ref = source.make(SIZE)
        expected = digest(made(SIZE))
        # A consumer's change of its own value is not passed on.
        assert [await sink.spoil(ref) for sink in sinks] == [expected] * 5
        assert await source.sent() == 2 * SIZE
        assert [size > SIZE for size in await stored(rt, sinks)] == [False, True, False, False, False]
        assert [await sink.take(ref) for sink in sinks] == [expected] * 5
        assert await source.sent() == 2 * SIZE
        del ref
        await nothing_stored(rt, sinks)


async def test_a_value_that_this_process_put_is_passed_on_too() -> None:
    async with opened("tcp", 6) as (rt, _, sinks):
        ref = rt.put(made(SIZE))
        assert await asyncio.gather(*(sink.take(ref) for sink in sinks)) == [digest(made(SIZE))] * 6
        assert rt.traffic().payload_sent == 2 * SIZE
        del ref
        await nothing_stored(rt, sinks)


@pytest.mark.parametrize("transport", ["tcp", pytest.param("ucx", marks=[needs_ucx, pytest.mark.soak])])
async def test_no_consumer_fails_when_the_one_that_passes_it_on_is_killed(transport: str) -> None:
    async with opened(transport, 5) as (rt, source, sinks):
        first, second, *others = sinks
        ref = source.make(SIZE)
        expected = digest(made(SIZE))
        await first.take(ref)
        await second.take(ref)
        # It has the copy, and does not answer.
        os.kill((await rt.info(second)).pid, signal.SIGSTOP)
        waiting = [asyncio.get_running_loop().create_task(other.take(ref).value()) for other in others]
        here = asyncio.get_running_loop().create_task(ref.value())
        while await source.members() < 5:
            await asyncio.sleep(0)
        assert await source.sent() == 2 * SIZE
        await rt.kill(second)
        assert await asyncio.gather(*waiting) == [expected] * 3
        assert digest(await here) == expected
        assert await first.take(ref) == expected
        del ref, here, waiting
        await nothing_stored(rt, [first, *others])


async def test_actors_of_one_process_share_what_it_fetched() -> None:
    async with opened("tcp", 2) as (rt, source, sinks):
        roommates = [await rt.on(with_=sink).spawn(Sink) for sink in sinks for _ in range(3)]
        ref = source.make(SIZE)
        takers = [*sinks, *roommates]
        assert await asyncio.gather(*(sink.take(ref) for sink in takers)) == [digest(made(SIZE))] * 8
        assert await source.sent() == 2 * SIZE
        del ref
        await nothing_stored(rt, sinks)


async def test_the_death_of_the_producer_frees_the_copies() -> None:
    async with opened("tcp", 3) as (rt, source, sinks):
        ref = source.make(SIZE)
        await asyncio.gather(*(sink.take(ref) for sink in sinks))
        assert any(await stored(rt, sinks))
        await rt.kill(source)
        await nothing_stored(rt, sinks)
        with pytest.raises(aiodaft.ActorDied):
            await sinks[0].take(ref)


async def test_small_values_and_single_consumers_leave_no_copies() -> None:
    async with opened("tcp", 3) as (rt, source, sinks):
        small, single = source.make(MIB), source.make(SIZE)
        assert await asyncio.gather(*(sink.take(small) for sink in sinks)) == [digest(made(MIB))] * 3
        assert await sinks[0].take(single) == digest(made(SIZE))
        assert await stored(rt, sinks) == [0, 0, 0]
        assert await source.sent() == 3 * MIB + SIZE
