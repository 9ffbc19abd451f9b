"""Device memory between processes: snapshots in order, nothing waits on the loop, nothing outlives its users."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from conformance import CHECKS, SIZES, LoopbackControl
from device_ends import CheckedPair, DevicePair, filled, open_far_devices, open_pair
from far_end import digest, pattern

from aiodaft_transport import GrantError, PeerGone, Unreachable
from aiodaft_transport.cuda.device import Driver, Landing
from aiodaft_transport.exceptions import DeviceError

MIB = 1 << 20


@pytest.mark.parametrize("check", CHECKS)
async def test_it_conforms(check: str) -> None:
    async with open_pair() as pair:
        assert await CHECKS[check](CheckedPair(pair)) is None


async def test_a_snapshot_has_what_the_stream_had_made_whatever_it_does_later() -> None:
    async with open_pair() as pair:
        driver = pair.producer.driver
        address = pair.producer.memory(MIB, seed=1)
        long = driver.hold(stream=3)
        driver.enqueue(3, lambda: ctypes.memset(address, 5, MIB))
        block = pair.producer.capture(address, MIB, stream=3)
        driver.enqueue(3, lambda: ctypes.memset(address, 9, MIB))
        await pair.settle()
        assert not block.filled
        with pytest.raises(GrantError, match="before the device has filled it"):
            pair.grant(block)
        long.open = True
        await filled(block)
        assert ctypes.string_at(address, 1) == b"\x09"
        assert await pair.fetch(pair.grant(block)) == bytes([5]) * MIB


async def test_only_what_waits_on_a_stream_waits_for_it() -> None:
    async with open_pair() as pair:
        held = pair.producer.driver.hold(stream=3)
        behind = pair.producer.capture(pair.producer.memory(100, 1), 100, stream=3)
        beside = pair.producer.capture(pair.producer.memory(100, 2), 100, stream=4)
        await filled(beside)
        assert not behind.filled
        held.open = True
        await filled(behind)


async def test_a_block_that_is_not_wanted_any_more_is_not_reused_before_it_is_filled() -> None:
    async with open_pair() as pair:
        held = pair.producer.driver.hold(stream=3)
        block = pair.producer.capture(pair.producer.memory(100_000, 1), 100_000, stream=3)
        block.release()
        other = await pair.producer.filled(100_000, 2)
        assert (other.segment, other.offset) != (block.segment, block.offset)
        held.open = True
        await filled(block)
        assert pair.producer.transport.live_blocks() == 1
        assert await pair.fetch(pair.grant(other)) == pattern(100_000, 2)


async def test_a_consumer_has_memory_of_its_own_and_the_grant_is_back_when_it_has_it() -> None:
    async with open_pair() as pair:
        block = await pair.producer.filled(MIB, 1)
        view = await pair.fetch(pair.grant(block))
        await pair.settle()
        assert block.grants == 0
        block.release()
        assert pair.producer.transport.live_blocks() == 0
        await pair.producer.filled(MIB, 2)
        assert view == pattern(MIB, 1)


async def test_a_segment_is_announced_and_opened_once_for_many_values() -> None:
    async with open_pair() as pair:
        for seed in range(20):
            block = await pair.producer.filled(500_000, seed)
            assert digest(await pair.fetch(pair.grant(block))) == digest(pattern(500_000, seed))
            block.release()
            await pair.settle()
        assert pair.there.notes == 1
        assert pair.there.fds == 0
        assert len(pair.consumer.driver.mapped) == pair.producer.transport.segments == 1


async def test_memory_is_freed_only_when_every_peer_has_closed_it() -> None:
    async with open_pair() as pair:
        pair.producer.transport.pool(0).keep = 0
        block = await pair.producer.filled(MIB, 1)
        grant = pair.grant(block)
        await pair.settle()
        held = pair.consumer.driver.hold(pair.consumer.land.stream)
        fetching = asyncio.get_running_loop().create_task(pair.fetch(grant))
        await pair.settle()
        block.release()
        await pair.settle()
        assert pair.producer.transport.segments == 1
        deliver, late = pair.there.deliver, list[tuple[bytes, Any]]()
        pair.there.deliver = lambda note, fds: late.append((note, fds))
        held.open = True
        assert await fetching == pattern(MIB, 1)
        await pair.settle()
        # The consumer was told to close it, and has not said that it did.
        assert len(late) == len(pair.producer.driver.allocated) == pair.producer.transport.segments == 1
        assert deliver is not None
        deliver(*late[0])
        await pair.settle()
        assert pair.consumer.driver.mapped == {}
        assert pair.producer.transport.segments == 0
        assert pair.producer.driver.allocated == {}


async def test_a_cancelled_fetch_keeps_its_memory_until_the_device_is_done() -> None:
    async with open_pair() as pair:
        block = await pair.producer.filled(MIB, 1)
        held = pair.consumer.driver.hold(pair.consumer.land.stream)
        fetching = asyncio.get_running_loop().create_task(pair.fetch(pair.grant(block)))
        await pair.settle()
        fetching.cancel()
        await pair.settle()
        assert fetching.cancelled()
        assert block.grants == 1
        held.open = True
        await _until(lambda: block.grants == 0)


@pytest.mark.parametrize("end", ["complete", "cancelled", "lost"])
async def test_given_memory_is_written_behind_its_stream_and_its_owners_again_when_the_fetch_is_over(end: str) -> None:
    async with open_pair(consumer_devices=(5, 0)) as pair:
        consumer, block = pair.consumer, await pair.producer.filled(MIB, 1)
        grant, address = pair.grant(block), consumer.memory(MIB, seed=2)
        held, made = consumer.driver.hold(stream=3), consumer.driver.made
        await pair.settle()
        assert consumer.transport.device_of(grant, pair.back) == 1
        target = Landing(None, 1, address, MIB, 3)
        fetching = asyncio.get_running_loop().create_task(consumer.transport.fetch_into(grant, pair.back, target))
        await pair.settle()
        memory = consumer.driver.tensor_at(address, MIB).numpy()
        assert memory.tobytes() == pattern(MIB, 2)
        if end == "lost":
            consumer.transport.peer_lost("producer")
        elif end == "cancelled":
            for _ in range(2):
                fetching.cancel()
                await pair.settle()
        await pair.settle()
        assert not fetching.done()
        held.open = True
        (result,) = await asyncio.gather(fetching, return_exceptions=True)
        assert type(result) is {"complete": type(None), "cancelled": asyncio.CancelledError, "lost": PeerGone}[end]
        assert memory.tobytes() == pattern(MIB, 1)
        # Nothing else was needed.
        assert (consumer.driver.made, consumer.land.landed) == (made, [])
        await _until(lambda: block.grants == (end == "lost"))


async def test_a_value_of_this_process_is_copied_without_opening_anything() -> None:
    async with open_pair() as pair:
        end, itself = pair.producer, LoopbackControl("producer")
        itself.connect(end.transport, itself)
        block = await end.filled(MIB, 1)
        assert await end.transport.fetch(end.transport.grant(block, itself), itself) == pattern(MIB, 1)
        await _until(lambda: block.grants == 0)
        # Only that the grant is back.
        assert itself.notes == 1


class Owner:
    """Has memory that is lent."""


async def test_lent_memory_is_read_where_it_lies_and_its_owner_kept_until_nobody_reads_it() -> None:
    async with open_pair() as pair:
        driver, transport = pair.producer.driver, pair.producer.transport
        address = pair.producer.memory(MIB, seed=1)
        before = driver.copied
        for offset in (4096, 8192):
            owner = Owner()
            kept = weakref.ref(owner)
            block = transport.lend(0, address + offset, 8192, 0, owner)
            del owner
            await filled(block)
            assert await pair.fetch(pair.grant(block)) == pattern(MIB, 1)[offset : offset + 8192]
            assert kept() is not None
            block.release()
            await _until(lambda kept=kept: kept() is None)
        assert driver.copied == before
        # The allocation was opened once, stays so, and is its owner's to free.
        assert (transport.segments, len(pair.consumer.driver.mapped)) == (1, 1)
        assert address in driver.allocated


async def test_what_was_lent_is_closed_when_nothing_of_it_was_lent_for_a_while() -> None:
    async with open_pair() as pair:
        transport = pair.producer.transport
        address = pair.producer.memory(MIB, seed=1)
        block = transport.lend(0, address, MIB, 0, None)
        await filled(block)
        assert await pair.fetch(pair.grant(block)) == pattern(MIB, 1)
        (pool,) = transport.pools()
        # Not while it is lent.
        assert pool.forget_idle()
        assert pool.forget_idle()
        block.release()
        await _until(lambda: not block.grants)
        # It was in use a moment ago.
        assert pool.forget_idle()
        assert not pool.forget_idle()
        await _until(lambda: transport.segments == 0)
        assert pair.consumer.driver.mapped == {}


async def test_large_values_under_way_at_once_get_memory_once_and_it_is_given_back_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The test looks for idle memory itself.
    monkeypatch.setattr("aiodaft_transport.cuda.transport._REST", 3600)
    async with open_pair() as pair:
        nbytes, producer, consumer = 18 * MIB, pair.producer.driver, pair.consumer.driver
        source, transport = pair.producer.memory(nbytes, 1), pair.producer.transport
        pool, made = transport.pool(0), producer.made
        pool.keep, pool.keep_resting = 5 * nbytes, 2 * nbytes

        async def move() -> None:
            block = pair.producer.capture(source, nbytes)
            await filled(block)
            grant = pair.grant(block)
            block.release()
            await pair.fetch(grant)

        opened: list[set[int]] = []
        for _ in range(3):
            await asyncio.gather(*(move() for _ in range(4)))
            await pair.settle()
            opened.append(set(consumer.mapped))
        assert (producer.made - made, transport.segments, len(opened[0])) == (4, 4, 4)
        assert opened == opened[:1] * 3
        # It was in use a moment ago.
        assert pool.forget_idle()
        assert transport.segments == 4
        assert not pool.forget_idle()
        await _until(lambda: len(consumer.mapped) == transport.segments == 2)
        # The rest may be kept.
        assert not pool.forget_idle()
        await move()
        await pair.settle()
        assert (producer.made - made, transport.segments) == (4, 2)


async def test_memory_that_is_used_now_and_then_is_not_given_back_in_between() -> None:
    async with open_pair() as pair:
        pool = pair.producer.transport.pool(0)
        pool.keep_resting = 0
        for seed in range(3):
            block = await pair.producer.filled(MIB, seed)
            block.release()
            # Between two looks, it is taken and released.
            assert pool.forget_idle()
            assert pair.producer.transport.segments == 1
        assert not pool.forget_idle()
        await _until(lambda: pair.producer.transport.segments == 0)


async def test_the_pool_is_looked_after_while_it_has_more_than_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodaft_transport.cuda.transport._REST", 0)
    async with open_pair() as pair:
        pair.producer.transport.pool(0).keep_resting = 0
        block = await pair.producer.filled(MIB, 1)
        await pair.settle()
        assert pair.producer.transport.segments == 1
        block.release()
        await _until(lambda: pair.producer.transport.segments == 0)


async def test_of_a_large_device_more_is_kept_for_the_next_values() -> None:
    gib = 1 << 30
    async with open_pair() as pair:
        transport, driver = pair.producer.transport, pair.producer.driver
        for device, (memory, keep) in enumerate(((6 * gib, gib // 2), (79 * gib, 4 * gib), (139 * gib, 8 * gib))):
            driver.memory = lambda device, memory=memory: memory  # type: ignore[method-assign]
            pool = transport.pool(device)
            assert keep <= pool.keep < keep + gib
            assert pool.keep_resting == gib // 2


async def test_memory_is_given_back_when_the_device_has_time_for_it() -> None:
    async with open_pair() as pair:
        transport, consumer = pair.producer.transport, pair.consumer
        block = await pair.producer.filled(64 * MIB, 1)
        await pair.fetch(pair.grant(block))
        kernels = [end.driver.hold() for end in (pair.producer, consumer)]
        block.retire()
        block.release()
        await pair.settle()
        # Neither process waits for its device.
        assert (transport.segments, len(consumer.driver.mapped)) == (1, 1)
        kernels[1].open = True
        await _until(lambda: not consumer.driver.mapped)
        assert transport.segments == 1
        kernels[0].open = True
        await _until(lambda: transport.segments == 0)


async def test_memory_that_is_allocated_where_lent_memory_was_is_not_taken_for_it() -> None:
    async with open_pair() as pair:
        for seed in range(3):
            address = pair.producer.memory(MIB, seed)
            block = pair.producer.transport.lend(0, address, MIB, 0, None)
            await filled(block)
            assert await pair.fetch(pair.grant(block)) == pattern(MIB, seed)
            block.release()
            await _until(lambda block=block: not block.grants)
            # The next one has the descriptor of this one, and may have its address.
            pair.producer.driver.free(0, address)


async def test_memory_that_cannot_be_exported_is_refused_when_it_is_lent_and_copied_else() -> None:
    async with open_pair() as pair:
        driver = pair.producer.driver
        hidden = pair.producer.memory(4096, seed=1)
        fd = driver.allocated.pop(hidden)
        with pytest.raises(Unreachable, match="cannot open this device memory: set"):
            pair.producer.transport.lend(0, hidden, 4096, 0, hidden)
        block = pair.producer.capture(hidden, 4096)
        await filled(block)
        assert await pair.fetch(pair.grant(block)) == pattern(4096, 1)
        driver.allocated[hidden] = fd


REFUSALS: dict[str, tuple[Callable[[DevicePair], Any], type[Exception], str]] = {
    "no device": (lambda pair: setattr(pair.consumer.driver, "identities", []), Unreachable, "sees no device"),
    "no access": (
        lambda pair: pair.consumer.driver.out_of_reach.update(pair.producer.driver.identities),
        Unreachable,
        "no access to the device",
    ),
    "broken": (lambda pair: setattr(pair.consumer.driver, "broken", "it broke"), DeviceError, "it broke"),
}


@pytest.mark.parametrize("why", REFUSALS)
async def test_a_consumer_that_cannot_says_why_and_gives_the_grant_back(why: str) -> None:
    hinder, kind, text = REFUSALS[why]
    async with open_pair() as pair:
        hinder(pair)
        block = await pair.producer.filled(100_000, 1)
        if why == "broken":
            pair.consumer.driver.hold(pair.consumer.land.stream)
        with pytest.raises(kind, match=text):
            await pair.fetch(pair.grant(block))
        await _until(lambda: block.grants == 0)
        pair.consumer.driver.broken = None


async def test_a_process_without_a_driver_is_told_of_segments_all_the_same() -> None:
    def open_driver() -> Driver:
        raise Unreachable("there is no driver")

    async with open_pair() as pair:
        pair.consumer.open_driver = open_driver
        pair.producer.transport.pool(0).keep = 0
        block = await pair.producer.filled(100_000, 1)
        with pytest.raises(Unreachable, match="there is no driver"):
            await pair.fetch(pair.grant(block))
        block.release()
        await _until(lambda: not pair.producer.transport.segments)


async def test_a_device_that_fails_before_the_snapshot_fails_the_value() -> None:
    async with open_pair() as pair:
        held = pair.producer.driver.hold()
        block = pair.producer.capture(pair.producer.memory(100, 1), 100)
        pair.producer.driver.broken = "an illegal address was used"
        await filled(block)
        with pytest.raises(DeviceError, match="illegal address"):
            pair.grant(block)
        pair.producer.driver.broken = None
        held.open = True


def _failing(operation: Callable[..., object]) -> Callable[..., None]:
    """The operation, as a device answers it that has failed before."""

    def fail(*args: Any) -> None:
        operation(*args)
        raise DeviceError("an illegal address was used")

    return fail


async def test_nothing_waits_for_memory_and_events_of_a_device_that_failed() -> None:
    async with open_pair() as pair:
        ends = pair.producer, pair.consumer
        block, source = await pair.producer.filled(64 * MIB, 1), pair.producer.memory(100, 1)
        await pair.fetch(pair.grant(block))
        with pytest.MonkeyPatch.context() as patch:
            for driver, name in itertools.product((end.driver for end in ends), ("free", "shut", "forget")):
                patch.setattr(driver, name, _failing(getattr(driver, name)))
            await filled(pair.producer.capture(source, 100))
            block.retire()
            block.release()
            await _until(lambda: block.segment.address not in pair.producer.driver.allocated)
            # The end of the transports frees the rest.
            for end in ends:
                await end.host.aclose()
                end.transport.close()
            assert list(pair.producer.driver.allocated) == [source]


async def test_too_little_memory_is_an_error_at_once() -> None:
    async with open_pair() as pair:
        pair.producer.driver.memory_left = MIB
        with pytest.raises(DeviceError, match="out of memory"):
            pair.producer.capture(0, MIB)


async def test_where_there_is_no_memory_left_free_memory_that_is_much_too_large_serves() -> None:
    async with open_pair() as pair:
        driver = pair.producer.driver
        (await pair.producer.filled(60 * MIB, 1)).release()
        source, driver.memory_left = pair.producer.memory(20 * MIB, 2), 0
        block = pair.producer.capture(source, 20 * MIB)
        await filled(block)
        assert await pair.fetch(pair.grant(block)) == pattern(20 * MIB, 2)
        with pytest.raises(DeviceError, match="out of memory"):
            pair.producer.capture(source, 20 * MIB)
        driver.memory_left = 1 << 40


async def test_a_lost_producer_fails_what_is_under_way_and_nothing_else() -> None:
    async with open_pair() as pair:
        block = await pair.producer.filled(MIB, 1)
        held = pair.consumer.driver.hold(pair.consumer.land.stream)
        fetching = asyncio.get_running_loop().create_task(pair.fetch(pair.grant(block)))
        await pair.settle()
        pair.consumer.transport.peer_lost("producer")
        with pytest.raises(PeerGone, match="producer is gone"):
            await fetching
        # The device still reads: it is closed afterwards.
        assert len(pair.consumer.driver.mapped) == 1
        held.open = True
        await _until(lambda: not pair.consumer.driver.mapped)


NONSENSE = [b"", b"\x01" * 17, b"\x03" + bytes(16), b"\x02" + b"\x09" * 16, b"\x04" + bytes(16), b"\x08" + bytes(16)]


@pytest.mark.parametrize("note", NONSENSE, ids=range(len(NONSENSE)))
async def test_nonsense_from_a_peer_is_refused(note: bytes) -> None:
    async with open_pair() as pair:
        with pytest.raises(GrantError, match="invalid note"):
            pair.consumer.transport.note_received(pair.back, note, ())


async def test_nothing_is_asked_of_a_device_while_nothing_is_awaited() -> None:
    async with open_pair() as pair:
        await pair.fetch(pair.grant(await pair.producer.filled(100_000, 1)))
        watches = [end.transport.watch for end in (pair.producer, pair.consumer)]
        asked = [watch.questions for watch in watches]
        await pair.settle()
        assert [watch.questions for watch in watches] == asked
        assert not any(watch.is_asking for watch in watches)


async def test_memory_that_no_stream_works_on_is_lent_and_given_back_without_an_event() -> None:
    async with open_pair() as pair:
        address = pair.producer.memory(8192, seed=1)
        held = pair.producer.driver.hold(stream=3)
        block, later = (pair.producer.transport.lend(0, address, 8192, stream, None) for stream in (0, 3))
        assert (block.filled, later.filled) == (True, False)
        watch, work = pair.consumer.transport.watch, pair.consumer.driver.hold(stream=4)
        for stream in (0, 4):
            grant = pair.grant(block)
            await asyncio.sleep(0)
            reading = await pair.consumer.transport.read(grant, pair.back)
            reading.used_by(stream)
            del reading
            await pair.settle()
            # Only a stream that works is waited for.
            assert (block.grants, watch.is_asking) == ((1, True) if stream == 4 else (0, False))
        work.open = held.open = True
        await _until(lambda: not block.grants)
        await filled(later)
        block.release()
        later.release()


# Between processes.


async def test_every_size_between_processes_that_number_their_devices_differently() -> None:
    async with open_far_devices(5, 0) as far:
        for seed, nbytes in enumerate(SIZES):
            view = await far.near.transport.fetch(await far.ask("produce", "it", nbytes, seed), far.connection)
            assert digest(view) == digest(pattern(nbytes, seed))
            await far.ask("release", "it")
            block = await far.near.filled(nbytes, seed)
            grant = far.near.transport.grant(block, far.connection)
            block.release()
            assert await far.ask("fetch", grant) == digest(pattern(nbytes, seed))
        await _until_asked(lambda: far.ask("live_blocks"), 0)
        assert far.near.transport.live_blocks() == 0
        # Theirs come from device 5, which is not here; ours go to their second one, which is ours.
        assert {device for device, _ in far.near.land.landed} == {0}
        assert {device for device, _ in await far.ask("landed")} == {1}


async def test_a_killed_consumer_in_the_middle_of_a_copy_gives_back_what_it_read() -> None:
    async with open_far_devices(0) as far:
        far.near.transport.pool(0).keep = 0
        block = await far.near.filled(20 * MIB, 1)
        await far.ask("begin", far.near.transport.grant(block, far.connection))
        block.release()
        assert (block.grants, far.near.transport.live_blocks()) == (1, 1)
        await far.kill()
        assert (block.grants, far.near.transport.live_blocks()) == (0, 0)
        await _until(lambda: not far.near.driver.allocated)


async def test_a_killed_producer_fails_what_comes_late_and_leaves_what_is_here() -> None:
    async with open_far_devices(0) as far:
        view = await far.near.transport.fetch(await far.ask("produce", "first", MIB, 1), far.connection)
        late = await far.ask("produce", "late", MIB, 2)
        held = far.near.driver.hold(far.near.land.stream)
        fetching = asyncio.get_running_loop().create_task(far.near.transport.fetch(late, far.connection))
        await asyncio.sleep(0)
        await far.kill()
        with pytest.raises(PeerGone):
            await fetching
        with pytest.raises(GrantError, match="unknown segment"):
            await far.near.transport.fetch(late, far.connection)
        assert view == pattern(MIB, 1)
        held.open = True
        await _until(lambda: not far.near.driver.mapped)


async def _until(reached: Callable[[], bool]) -> None:
    while not reached():
        await asyncio.sleep(0)


async def _until_asked(ask: Callable[[], Awaitable[Any]], wanted: Any) -> None:
    while await ask() != wanted:
        await asyncio.sleep(0)
