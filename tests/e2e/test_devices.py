"""Tensors on accelerators between actors, with devices that are memory of the host (DP8; tests/gpu has real ones)."""

from __future__ import annotations

import asyncio
import gc

import pytest
import torch
from actors import Box
from device_actors import DeviceKeeper, Reader
from here import current_peer
from host_devices import HostAccelerators, HostDriver

import aiodaft
from aiodaft_transport import DeviceError, Unreachable

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZE = 1 << 18


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def test_a_tensor_goes_from_device_to_device_and_touches_no_host_memory(rt: aiodaft.Runtime) -> None:
    a, b, c = [await rt.spawn(DeviceKeeper, number) for number in (0, 0, 5)]
    for make in (a.make, a.make_on_thread):
        for size in (1, SIZE):
            ref = make(size, 3.0)
            assert await b.where(ref) == (0, size * 3.0)
            # A received value is passed on, by a process with other devices.
            assert await c.where(b.echo(ref)) == (0, size * 3.0)
    sent, passed = await a.traffic(), await b.traffic()
    assert sent["payload"] == sent["device"] == 2 * 2 * 4 * (SIZE + 1)
    assert passed["received"] == 2 * 2 * 4 * (SIZE + 1)
    # One copy for the snapshot, and one for each consumer.
    assert sent["copied"] == 2 * 4 * (SIZE + 1)


async def test_a_value_may_have_parts_here_and_there(rt: aiodaft.Runtime, here: HostDriver) -> None:
    a, b = await rt.spawn(DeviceKeeper, 0), await rt.spawn(DeviceKeeper, 0)
    host, base, part, strided, empty, nothing = await b.echo(a.several(100_000))
    find = HostAccelerators(here).device_of
    assert [find(tensor) for tensor in (host, base, part, strided)] == [None, 0, 0, 0]
    assert [float(tensor.sum()) for tensor in (host, base, strided)] == [300_000.0, 100_000.0, 100_000.0]
    assert (empty.shape, nothing.shape, strided.shape) == ((0,), (0,), (50_000,))
    base[10] = 7.0
    assert part[0] == 7.0
    sent = await a.traffic()
    # Of the one with gaps only the elements are sent, and the host's part goes by the usual way.
    assert sent["device"] == 400_000 + 200_000
    assert sent["payload"] == sent["device"] + 400_000


async def test_what_is_seen_is_what_was_returned_and_no_process_waits_for_the_device(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(DeviceKeeper, 0), await rt.spawn(DeviceKeeper, 0)
    ref = a.make_slowly(SIZE, 5.0)
    total = b.where(ref)
    # The device has not come to it, and the actor goes on.
    await a.overwrite_behind(9.0)
    await a.traffic()
    assert not total.done()
    await a.open_gate()
    assert await total == (0, SIZE * 5.0)
    assert await b.where(ref) == (0, SIZE * 5.0)


async def test_arguments_are_as_they_were_when_the_call_was_made(rt: aiodaft.Runtime, here: HostDriver) -> None:
    a = await rt.spawn(DeviceKeeper, 0)
    for size in (10, SIZE):
        tensor = here.tensor(size).fill_(2.0)
        gate = here.hold()
        ref = a.where(tensor)
        here.enqueue(0, lambda tensor=tensor: tensor.fill_(8.0))
        gate.open = True
        assert await ref == (0, size * 2.0)
        assert tensor[0] == 8.0
    # It looks like a write, while the host's part of the value is still being copied.
    mixed = a.echo([torch.zeros(SIZE * 4), tensor])
    tensor.add_(0.0)
    assert (await mixed)[1][0] == 8.0
    long = [list(range(200_000)), here.tensor(100).fill_(1.0)]
    assert float((await a.echo(long))[1].sum()) == 100.0


@pytest.mark.parametrize("size", [10, SIZE])
async def test_arguments_of_a_def_method_are_as_its_stream_has_made_them(rt: aiodaft.Runtime, size: int) -> None:
    a, b = await rt.spawn(DeviceKeeper, 0), await rt.spawn(DeviceKeeper, 0)
    assert await a.pass_on(b, size) == (0, size * 3.0)
    # It was sent: nothing is left of it.
    while await a.blocks():
        await asyncio.sleep(0)


async def test_arguments_of_a_def_method_may_have_refs_among_them(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(DeviceKeeper, 0), await rt.spawn(DeviceKeeper, 0)
    for other in (a, b):
        assert await a.pass_with(b, Box(other.make(10, 1.0))) == (0, 50.0)
    failed = b.first_of([])
    with pytest.raises(IndexError):
        await a.pass_with(b, Box(failed))
    while await a.blocks():
        await asyncio.sleep(0)


async def test_consumers_may_write_and_memory_is_reused_only_when_no_process_reads(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(DeviceKeeper, 0), await rt.spawn(DeviceKeeper, 0)
    for value in range(8):
        ref = a.make(SIZE, float(value))
        got = await asyncio.gather(*(b.add_in_place(ref, 100.0) for _ in range(4)))
        assert got == [value + 100.0] * 4
        assert await b.where(ref) == (0, value * SIZE)
        del ref
        gc.collect()
    while await a.blocks():
        await asyncio.sleep(0)


async def test_what_is_lent_is_read_where_it_is(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(DeviceKeeper, 0), await rt.spawn(DeviceKeeper, 0)
    ref = a.lend(SIZE, 4.0)
    assert await b.where(ref) == (0, SIZE * 4.0)
    assert (await a.traffic())["copied"] == 0
    await ref.released()
    ref = a.lend(SIZE, 4.0)
    await ref.ready()
    await a.overwrite(1.0)
    with pytest.raises(aiodaft.exceptions.BorrowError):
        await b.where(ref)


async def test_who_only_reads_gets_no_copy(rt: aiodaft.Runtime, here: HostDriver) -> None:
    a, b, c = [await rt.spawn(DeviceKeeper, number) for number in (0, 0, 5)]
    ref, before = a.make(SIZE, 2.0), here.copied
    assert await asyncio.gather(*(b.peek(ref) for _ in range(8))) == [2.0 * SIZE] * 8
    # Also a tensor that this process passes, in a list.
    mine = here.tensor(SIZE).fill_(3.0)
    assert await b.peek_on_thread([ref, mine], factor=0.5) == 2.5 * SIZE
    # The process that made it, and one with another GPU, which needs a copy.
    assert await a.peek(ref) == await c.peek(ref) == 2.0 * SIZE
    # One snapshot of each value, and the copy.
    assert [(await actor.traffic())["copied"] for actor in (a, b, c)] == [4 * SIZE, 0, 4 * SIZE]
    assert here.copied == before + 4 * SIZE
    # Without a snapshot, nothing at all is copied.
    lent = a.lend(SIZE, 4.0)
    assert await b.peek(lent) == 4.0 * SIZE
    await lent.released()
    assert (await a.traffic())["copied"] == 4 * SIZE


async def test_memory_that_is_read_in_place_stays_until_the_reader_drops_it(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(DeviceKeeper, 0), await rt.spawn(DeviceKeeper, 0)
    await b.hold_on(a.make(SIZE, 7.0))
    gc.collect()
    for value in range(4):
        await b.where(a.make(SIZE, float(value)))
    assert await a.blocks() >= 1
    assert await b.let_go() == 7.0
    while await a.blocks():
        await asyncio.sleep(0)
    lent = a.lend(SIZE, 5.0)
    await b.hold_on(lent)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await lent.released()
    assert await b.let_go() == 5.0
    await lent.released()


async def test_what_is_read_in_place_stays_until_the_stream_of_the_method_is_done(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(DeviceKeeper, 0), await rt.spawn(DeviceKeeper, 0)
    # Its memory is open, so that the next value is here before the actor's thread uses another stream than the loop.
    assert await b.peek(a.make(SIZE, 1.0)) == SIZE
    ref = a.make(SIZE, 2.0)
    await ref.ready()
    b.use_stream.tell(5)
    assert await b.read_on_thread(ref) == 2.0 * SIZE
    del ref
    gc.collect()
    await b.traffic()
    assert await a.blocks() == 1
    await b.open_gate()
    while await a.blocks():
        await asyncio.sleep(0)


async def test_a_write_to_what_is_only_to_be_read_is_an_error(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(DeviceKeeper, 0), await rt.spawn(DeviceKeeper, 0)
    with pytest.raises(
        aiodaft.exceptions.BorrowError, match=r"break_promise is declared @read_only, but wrote to .* args\[0\]"
    ):
        await b.break_promise(a.make(10, 1.0))
    # Also where each reader has memory of its own.
    with pytest.raises(aiodaft.exceptions.BorrowError):
        await b.break_promise(torch.zeros(3))


async def test_methods_of_a_plain_class_read_in_place_and_its_static_methods_get_copies(rt: aiodaft.Runtime) -> None:
    a = await rt.spawn(DeviceKeeper, 0)
    async with rt.spawn(Reader) as reader:
        ref = a.lend(SIZE, 2.0)
        assert await reader.call(Reader.total, ref) == 2.0 * SIZE
        await reader.call(Reader.write, ref)
        assert await reader.call(Reader.total, ref) == 2.0 * SIZE


async def test_a_reader_in_place_outlives_the_process_that_made_the_value(rt: aiodaft.Runtime) -> None:
    a, b = await rt.on(restart="temporary").spawn(DeviceKeeper, 0), await rt.spawn(DeviceKeeper, 0)
    await b.hold_on(a.make(SIZE, 7.0))
    a.die.tell()
    with pytest.raises(aiodaft.ActorDied):
        await a.blocks()
    assert await b.let_go() == 7.0


async def test_a_full_device_is_emptied_first_and_then_named(rt: aiodaft.Runtime, here: HostDriver) -> None:
    b, size = await rt.spawn(DeviceKeeper, 0), 5 << 20
    tensor, larger = here.tensor(size).fill_(1.0), here.tensor(2 * size)
    left, here.memory_left, here.cached = here.memory_left, 0, 4 * size
    try:
        assert await b.peek(tensor) == size
        with pytest.raises(aiodaft.ResourceExhausted, match=r"out of memory: free memory of the GPU, or send .*borrow"):
            await b.peek(larger)
        while current_peer().store.devices.transport.live_blocks():
            await asyncio.sleep(0)
        assert await b.peek(tensor) == size
    finally:
        here.memory_left += left


@pytest.mark.parametrize("lent", [False, True], ids=["items", "lent items"])
async def test_streams_carry_them(rt: aiodaft.Runtime, here: HostDriver, lent: bool) -> None:
    a, before = await rt.spawn(DeviceKeeper, 0), here.copied
    values = [float(tensor[-1]) async for tensor in a.items(5, lent)]
    assert values == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert here.copied - before == 5 * 4000


async def test_who_asks_for_a_transport_gets_it(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(DeviceKeeper, 0), await rt.spawn(DeviceKeeper, 0)
    assert await b.where(a.make_for_the_host(SIZE, 1.0)) == (None, SIZE)
    sent = await a.traffic()
    assert (sent["device"], sent["payload"]) == (0, 4 * SIZE)
    with pytest.raises(Unreachable, match="automatically; name a transport for host memory"):
        rt.put(1, transport="cuda")


async def test_a_process_without_a_device_is_told_what_to_do_and_stays_usable(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(DeviceKeeper, 0), await rt.spawn(DeviceKeeper)
    ref = a.make(SIZE, 1.0)
    for use in (b.where, b.peek, b.where):
        with pytest.raises(Unreachable, match="sees no device") as caught:
            await use(ref)
        assert any("return x.cpu()" in note for note in caught.value.__notes__)
    assert await b.echo(a.make_for_the_host(SIZE, 1.0)) is not None
    del ref, caught
    gc.collect()
    while await a.blocks():
        await asyncio.sleep(0)


async def test_a_value_for_which_a_consumer_has_no_memory_fails_there_alone(rt: aiodaft.Runtime) -> None:
    a, b, c = [await rt.spawn(DeviceKeeper, 0) for _ in range(3)]
    ref = a.make(SIZE, 1.0)
    await b.limit_memory(SIZE)
    for _ in range(2):
        with pytest.raises(DeviceError, match="out of memory"):
            await b.where(ref)
    assert await c.where(ref) == (0, SIZE)
    await b.limit_memory(1 << 40)
    assert await b.where(ref) == (0, SIZE)
    del ref
    gc.collect()
    while await a.blocks():
        await asyncio.sleep(0)


async def test_into_writes_in_place_without_memory_in_between(rt: aiodaft.Runtime, here: HostDriver) -> None:
    a = await rt.spawn(DeviceKeeper, 0)
    target = here.tensor(SIZE).zero_()
    made, copied, version = here.made, here.copied, target._version
    ref = a.make(SIZE, 6.0)
    # Work that is queued for the target's stream comes before the value.
    here.enqueue(0, lambda: target.fill_(9.0))
    assert await ref.into(target) is target
    assert target.min() == target.max() == 6.0
    assert (here.made, here.copied) == (made, copied + 4 * SIZE)
    assert target._version > version
    # Of this very process.
    own = await rt.put(target).into(here.tensor(SIZE))
    assert own.min() == own.max() == 6.0
    with pytest.raises(ValueError, match="cannot be written into a tensor of shape"):
        await ref.into(here.tensor(SIZE - 1))
    del ref
    gc.collect()
    while await a.blocks():
        await asyncio.sleep(0)


async def test_into_goes_between_host_and_device_and_between_devices(rt: aiodaft.Runtime, here: HostDriver) -> None:
    near, far = await rt.spawn(DeviceKeeper, 0), await rt.spawn(DeviceKeeper, 5)
    for size in (10, SIZE * 2):
        for ref, target in (
            (near.make(size, 6.0), torch.zeros(size)),
            (near.make_for_the_host(size, 6.0), here.tensor(size).zero_()),
            (far.make(size, 6.0), here.tensor(size).zero_()),
        ):
            await ref.into(target)
            assert target.min() == target.max() == 6.0


@pytest.mark.usefixtures("here")
async def test_a_producer_that_dies_fails_what_is_not_here_yet_and_nothing_else(rt: aiodaft.Runtime) -> None:
    a, b = await rt.on(restart="temporary").spawn(DeviceKeeper, 0), await rt.spawn(DeviceKeeper, 0)
    value = await a.make(SIZE, 1.0)
    waiting = b.where(a.make_slowly(SIZE, 5.0))
    await a.traffic()
    a.die.tell()
    with pytest.raises(aiodaft.ActorDied, match="SIGABRT"):
        await waiting
    assert float(value.sum()) == SIZE
    assert await b.where(value) == (0, SIZE)
    del value
