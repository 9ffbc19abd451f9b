"""Memory that the user has: `ref.into(tensor)` writes to it in place, `aiodaft.memory.register()` prepares it once."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
import torch
from inside import peer_of
from landing_actors import VALUES, Giver, counted
from torch_actors import Keeper
from transports import needs_ucx

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1 << 20
SIZE = 1 << 15
STRAIGHT = ["plain", "bytes", "bfloat16", "bool", "complex", "transposed", "channels last", "one long", "parameter"]


def transport_of(rt: aiodaft.Runtime, name: str) -> Any:
    return peer_of(rt).store.transport_named(name)


def landed(rt: aiodaft.Runtime, name: str) -> tuple[int, int]:
    """The memory that a transport of this process has allocated for values to arrive in."""
    arena = transport_of(rt, name).landing
    return arena.live_blocks(), arena.idle_bytes()


@pytest.mark.parametrize("name", ["shm", "tcp", pytest.param("ucx", marks=needs_ucx)])
async def test_a_large_value_needs_no_memory_but_the_target(module_rt: aiodaft.Runtime, name: str) -> None:
    giver = await module_rt.spawn(Giver)
    target = torch.zeros(8 * MIB)
    address, version = target.data_ptr(), target._version
    ref = getattr(giver, f"full_by_{name}")(8 * MIB, 3.0)
    before = module_rt.traffic().payload_received
    assert await ref.into(target) is target
    assert module_rt.traffic().payload_received - before == 32 * MIB
    assert target.data_ptr() == address
    assert target.min() == target.max() == 3.0
    # Autograd, and readers of lent memory, see that it was written to.
    assert target._version > version
    if name != "shm":
        assert landed(module_rt, name) == (0, 0)


async def test_any_layout_arrives_straight_if_the_target_has_the_same(module_rt: aiodaft.Runtime) -> None:
    giver = await module_rt.spawn(Giver)
    for name in STRAIGHT:
        expected = VALUES[name]().detach()
        around = torch.zeros(expected.numel() + 2, dtype=expected.dtype)
        target = around[1:-1].as_strided(expected.shape, expected.stride(), 1)
        if name == "one long":
            # The stride of a dimension of one element does not matter.
            target = around[1:-1].view(expected.shape)
        await giver.by_tcp(name).into(target)
        assert torch.equal(target, expected), name
        assert not around[[0, -1]].any(), name
    parameter = torch.nn.Parameter(torch.zeros(130, 240))
    await giver.by_tcp("plain").into(parameter)
    assert torch.equal(parameter, counted(130, 240))
    assert landed(module_rt, "tcp") == (0, 0)


async def test_everything_else_is_copied(module_rt: aiodaft.Runtime) -> None:
    giver = await module_rt.spawn(Giver)
    for name in VALUES:
        expected = VALUES[name]().detach()
        scattered = torch.zeros(*(2 * length for length in expected.shape), dtype=expected.dtype)
        target = scattered[tuple(slice(None, None, 2) for _ in expected.shape)]
        assert torch.equal(await giver.by_shm(name).into(target), expected), name
        assert torch.equal(await giver.by_shm(name).into(torch.zeros(expected.shape, dtype=expected.dtype)), expected)
    conjugate = torch.zeros(130, 240, dtype=torch.complex64).conj()
    assert torch.equal(await giver.by_shm("complex").into(conjugate), VALUES["complex"]())
    here = giver.by_shm("plain")
    assert torch.equal(await here, await here.into(torch.zeros(130, 240)))
    mine = module_rt.put(counted(130, 240))
    assert torch.equal(await mine.into(torch.zeros(130, 240)), await mine)
    assert await mine.into(await mine) is await mine


async def test_what_does_not_fit_is_refused_before_anything_is_fetched(module_rt: aiodaft.Runtime) -> None:
    giver, keeper = await module_rt.spawn(Giver), await module_rt.spawn(Keeper)
    before = module_rt.traffic().payload_received
    for target in (torch.zeros(240, 130), torch.zeros(130, 240, dtype=torch.int32), torch.zeros(31_200)):
        ref = giver.by_tcp("plain")
        with pytest.raises(ValueError, match=r"Giver.by_tcp has shape \(130, 240\) and torch.float32, and cannot"):
            await ref.into(target)
        assert not target.any()
        # The value is still there for others.
        assert await giver.total(ref) == counted(130, 240).sum()
    with pytest.raises(ValueError, match=r"shape \(10,\) and torch.float32"):
        await giver.by_shm("small").into(torch.zeros(11))
    assert module_rt.traffic().payload_received == before
    target = torch.zeros(3)
    with pytest.raises(TypeError, match="Keeper.echo is list, and `into`"):
        await keeper.echo([1]).into(target)
    with pytest.raises(TypeError, match="Keeper.echo is dict, and `into`"):
        await keeper.echo({"weights": counted(130, 240)}).into(target)
    with pytest.raises(TypeError, match="written into a meta tensor"):
        await giver.by_shm("small").into(torch.zeros(10, device="meta"))
    with pytest.raises(TypeError, match="written into list"):
        await giver.by_shm("small").into([0.0] * 10)
    with pytest.raises(ValueError, match="expanded tensor"):
        await giver.by_shm("small").into(torch.zeros(1).expand(10))
    assert not target.any()


@pytest.mark.parametrize("name", ["shm", "tcp"])
async def test_a_cancelled_one_writes_no_more_and_the_value_can_be_had_again(
    module_rt: aiodaft.Runtime, name: str
) -> None:
    giver = await module_rt.spawn(Giver)
    ref = getattr(giver, f"full_by_{name}")(8 * MIB, 3.0)
    await ref.ready()
    target = torch.zeros(8 * MIB)
    received = module_rt.traffic().payload_received
    writing = asyncio.get_running_loop().create_task(ref.into(target))
    while not target[0]:
        await asyncio.sleep(0)
    writing.cancel()
    await asyncio.wait([writing])
    assert writing.cancelled()
    assert module_rt.traffic().payload_received == received
    target.fill_(-1.0)
    assert await giver.total(ref) == 24.0 * MIB
    assert target.max() == -1.0
    assert (await ref.into(target)).min() == 3.0


# Registered.


@needs_ucx
async def test_a_hundred_sends_and_receives_register_once(module_rt: aiodaft.Runtime) -> None:
    giver, ucx = await module_rt.spawn(Giver), transport_of(module_rt, "ucx")
    tensor, target = torch.zeros(SIZE), torch.empty(SIZE)
    counts = []
    with aiodaft.memory.register(tensor), aiodaft.memory.register(target):
        for step in range(100):
            ref = module_rt.put(tensor, transport="ucx")
            assert await giver.total(ref) == SIZE * step
            await ref.released()
            # No process reads it: it may change, and the next reader sees that.
            tensor.add_(1.0)
            assert (await giver.full_by_ucx(SIZE, float(step)).into(target))[-1] == step
            counts.append(ucx.registrations)
    assert counts == counts[:1] * 100
    # Unregistered memory is registered, each time.
    await giver.full_by_ucx(SIZE, 1.0).into(target)
    await giver.full_by_ucx(SIZE, 1.0).into(target)
    assert ucx.registrations == counts[0] + 2


@pytest.mark.parametrize("name", ["tcp", pytest.param("ucx", marks=needs_ucx)])
async def test_nothing_is_copied_on_the_way_out(module_rt: aiodaft.Runtime, name: str) -> None:
    giver, transport = await module_rt.spawn(Giver), transport_of(module_rt, name)
    tensor = counted(130, 240)
    with aiodaft.memory.register(tensor):
        parts = {"a": tensor[:60], "b": tensor[70:], "small": tensor[0]}
        for value, sent in ((tensor, 124_800), (tensor[7:], 118_080), (tensor.t(), 124_800)):
            before, pooled = module_rt.traffic().payload_sent, transport.arena.idle_bytes()
            assert await giver.total(module_rt.put(value, transport=name)) == value.sum()
            assert (transport.arena.live_blocks(), transport.arena.idle_bytes()) == (0, pooled)
            assert module_rt.traffic().payload_sent - before == sent
        got = await giver.echo(module_rt.put(parts, transport=name))
        assert all(torch.equal(got[key], part) for key, part in parts.items())


@needs_ucx
async def test_an_actor_sends_parts_of_what_it_registered(module_rt: aiodaft.Runtime) -> None:
    giver = await module_rt.spawn(Giver)
    await giver.register_cache(1000, 1000)
    cache, target = counted(1000, 1000), torch.empty(100, 1000)
    counts = []
    for start in range(0, 1000, 100):
        assert torch.equal(await giver.rows_by_ucx(start, start + 100).into(target), cache[start : start + 100])
        counts.append(await giver.registrations())
    assert counts == counts[:1] * 10


async def test_with_shared_memory_what_is_sent_is_a_copy_as_ever(module_rt: aiodaft.Runtime) -> None:
    giver = await module_rt.spawn(Giver)
    tensor = torch.ones(SIZE)
    with aiodaft.memory.register(tensor):
        ref = module_rt.put(tensor, transport="shm")
        await ref.ready()
        tensor.zero_()
        assert await giver.total(ref) == SIZE


async def test_a_write_before_it_was_read_is_found_out(module_rt: aiodaft.Runtime) -> None:
    giver = await module_rt.spawn(Giver)
    tensor = torch.ones(SIZE)
    with aiodaft.memory.register(tensor):
        ref = module_rt.put(tensor, transport="tcp")
        # Receiving is writing.
        await giver.full_by_tcp(SIZE, 2.0).into(tensor)
        with pytest.raises(aiodaft.exceptions.BorrowError):
            await giver.total(ref)


async def test_it_ends_with_the_tensor_but_not_before_its_readers(module_rt: aiodaft.Runtime) -> None:
    giver, store = await module_rt.spawn(Giver), peer_of(module_rt).store
    tensor = torch.ones(SIZE)
    registration = aiodaft.memory.register(tensor[1000:])
    ref = module_rt.put(tensor[1000:], transport="tcp")
    registration.close()
    registration.close()
    del tensor
    assert await giver.total(ref) == SIZE - 1000
    tensor = torch.ones(SIZE)
    aiodaft.memory.register(tensor)
    view = tensor[5:]
    del tensor, ref
    gc.collect()
    assert len(store.registered) == 1
    del view
    gc.collect()
    assert store.registered == {}


async def test_it_may_outlive_the_runtime() -> None:
    tensor, late = torch.ones(SIZE), torch.ones(SIZE)
    async with aiodaft.Runtime(preload=()):
        first, second = aiodaft.memory.register(tensor), aiodaft.memory.register(late)
    first.close()
    del late
    gc.collect()
    second.close()


async def test_what_cannot_be_registered_is_refused_with_the_reason(module_rt: aiodaft.Runtime) -> None:
    tensor: Any
    for tensor, error, reason in (
        ([1.0], TypeError, "a plain tensor, not list"),
        (torch.eye(3).to_sparse(), TypeError, "layout torch.sparse_coo"),
        (torch.zeros(3, device="meta"), ValueError, "not one on meta"),
        (torch.zeros(4, 4)[:, :2], ValueError, "without gaps"),
        (torch.zeros(3, 1).expand(3, 4), ValueError, "without gaps"),
    ):
        with pytest.raises(error, match=reason):
            aiodaft.memory.register(tensor)
    whole = torch.zeros(100)
    with aiodaft.memory.register(whole) as registration:
        for part in (whole, whole[:1], whole[99:]):
            with pytest.raises(ValueError, match="already"):
                aiodaft.memory.register(part)
    registration.close()
    aiodaft.memory.register(torch.zeros(0, 3)).close()
    with aiodaft.memory.register(whole[:50]), aiodaft.memory.register(whole[50:]):
        assert len(peer_of(module_rt).store.registered) == 2


async def test_shared_memory_and_other_memory_in_one_result(module_rt: aiodaft.Runtime) -> None:
    """The tensor in shared memory is read in place, the other one is a snapshot."""
    keeper, other = await module_rt.spawn(Keeper), await module_rt.spawn(Keeper)
    both = keeper.make_both(SIZE, 2.0)
    await keeper.overwrite(5.0)
    for _ in range(2):
        shared, plain = await other.echo(both)
        assert shared.min() == shared.max() == plain.min() == plain.max() == 2.0


async def test_a_lent_value_is_not_copied_for_its_own_process(module_rt: aiodaft.Runtime) -> None:
    keeper = await module_rt.spawn(Keeper)
    lent = keeper.lend(SIZE, 2.0)
    assert await keeper.is_mine(lent)
    assert await keeper.stored_bytes() == 0
    # It is there for other processes nevertheless; and once it was written to, no call gets it.
    assert (await lent).max() == 2.0
    again = keeper.lend(SIZE, 3.0)
    await keeper.overwrite(4.0)
    with pytest.raises(aiodaft.exceptions.BorrowError):
        await keeper.is_mine(again)
