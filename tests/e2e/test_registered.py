"""`aiodaft.register`: memory that is prepared once, and sent and received into where it lies."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from landing_actors import Giver, counted
from transports import needs_ucx

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZE = 1 << 17


def transport_of(rt: aiodaft.Runtime, name: str) -> Any:
    return rt.peer.store.transport_named(name)


@needs_ucx
async def test_a_hundred_sends_and_receives_register_once(module_rt: aiodaft.Runtime) -> None:
    giver, ucx = await module_rt.spawn(Giver), transport_of(module_rt, "ucx")
    tensor, target = torch.zeros(SIZE), torch.empty(SIZE)
    counts = []
    with aiodaft.register(tensor), aiodaft.register(target):
        for step in range(100):
            ref = module_rt.put(tensor, transport="ucx")
            assert await giver.total(ref) == SIZE * step
            await ref.released()
            # Nobody reads it: it may change, and the next reader sees that.
            tensor.add_(1.0)
            assert (await giver.full_by_ucx(SIZE, float(step)).into(target))[-1] == step
            counts.append(ucx.registrations)
    assert counts == counts[:1] * 100
    # What is not registered is, each time.
    await giver.full_by_ucx(SIZE, 1.0).into(target)
    await giver.full_by_ucx(SIZE, 1.0).into(target)
    assert ucx.registrations == counts[0] + 2


@pytest.mark.parametrize("name", ["tcp", pytest.param("ucx", marks=needs_ucx)])
async def test_nothing_is_copied_on_the_way_out(module_rt: aiodaft.Runtime, name: str) -> None:
    giver, transport = await module_rt.spawn(Giver), transport_of(module_rt, name)
    tensor = counted(300, 400)
    with aiodaft.register(tensor):
        parts = {"a": tensor[:100], "b": tensor[200:], "small": tensor[0]}
        for value, sent in ((tensor, 480_000), (tensor[7:], 468_800), (tensor.t(), 480_000)):
            before = module_rt.traffic().payload_sent
            assert await giver.total(module_rt.put(value, transport=name)) == value.sum()
            assert (transport.arena.live_blocks(), transport.arena.idle_bytes()) == (0, 0)
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
    with aiodaft.register(tensor):
        ref = module_rt.put(tensor, transport="shm")
        await ref.ready()
        tensor.zero_()
        assert await giver.total(ref) == SIZE


async def test_a_write_before_it_was_read_is_found_out(module_rt: aiodaft.Runtime) -> None:
    giver = await module_rt.spawn(Giver)
    tensor = torch.ones(SIZE)
    with aiodaft.register(tensor):
        ref = module_rt.put(tensor, transport="tcp")
        # Receiving is writing.
        await giver.full_by_tcp(SIZE, 2.0).into(tensor)
        with pytest.raises(aiodaft.BorrowError):
            await giver.total(ref)


async def test_it_ends_with_the_tensor_but_not_before_its_readers(module_rt: aiodaft.Runtime) -> None:
    giver, store = await module_rt.spawn(Giver), module_rt.peer.store
    tensor = torch.ones(SIZE)
    registration = aiodaft.register(tensor[1000:])
    ref = module_rt.put(tensor[1000:], transport="tcp")
    registration.close()
    registration.close()
    del tensor
    assert await giver.total(ref) == SIZE - 1000
    tensor = torch.ones(SIZE)
    aiodaft.register(tensor)
    view = tensor[5:]
    del tensor, ref
    gc.collect()
    assert len(store._registered) == 1
    del view
    gc.collect()
    assert store._registered == {}


async def test_it_may_outlive_the_runtime() -> None:
    tensor, late = torch.ones(SIZE), torch.ones(SIZE)
    async with aiodaft.Runtime(preload=()):
        first, second = aiodaft.register(tensor), aiodaft.register(late)
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
            aiodaft.register(tensor)
    whole = torch.zeros(100)
    with aiodaft.register(whole) as registration:
        for part in (whole, whole[:1], whole[99:]):
            with pytest.raises(ValueError, match="already"):
                aiodaft.register(part)
    registration.close()
    aiodaft.register(torch.zeros(0, 3)).close()
    with aiodaft.register(whole[:50]), aiodaft.register(whole[50:]):
        assert len(module_rt.peer.store._registered) == 2
