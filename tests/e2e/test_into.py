"""`ref.into(tensor)`: in place, and without memory in between where the target is laid out as the value is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from landing_actors import VALUES, Giver, counted
from torch_actors import Keeper
from transports import needs_ucx

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1 << 20
STRAIGHT = ["plain", "bytes", "bfloat16", "bool", "complex", "transposed", "channels last", "one long", "parameter"]


def landed(rt: aiodaft.Runtime, name: str) -> tuple[int, int]:
    """What a transport of this process has allocated for values to arrive in."""
    arena: Any = rt.peer.store.transport_named(name).landing  # type: ignore[attr-defined]  # those that copy have it
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
    # Autograd, and readers of what is lent, see that it was written to.
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
            # How it counts what it has but one of does not matter.
            target = around[1:-1].view(expected.shape)
        await giver.by_tcp(name).into(target)
        assert torch.equal(target, expected), name
        assert not around[[0, -1]].any(), name
    parameter = torch.nn.Parameter(torch.zeros(300, 400))
    await giver.by_tcp("plain").into(parameter)
    assert torch.equal(parameter, counted(300, 400))
    assert landed(module_rt, "tcp") == (0, 0)


async def test_everything_else_is_copied(module_rt: aiodaft.Runtime) -> None:
    giver = await module_rt.spawn(Giver)
    for name in VALUES:
        expected = VALUES[name]().detach()
        scattered = torch.zeros(*(2 * length for length in expected.shape), dtype=expected.dtype)
        target = scattered[tuple(slice(None, None, 2) for _ in expected.shape)]
        assert torch.equal(await giver.usual(name).into(target), expected), name
        assert torch.equal(await giver.usual(name).into(torch.zeros(expected.shape, dtype=expected.dtype)), expected)
    conjugate = torch.zeros(300, 400, dtype=torch.complex64).conj()
    assert torch.equal(await giver.usual("complex").into(conjugate), VALUES["complex"]())
    here = giver.usual("plain")
    assert torch.equal(await here, await here.into(torch.zeros(300, 400)))
    mine = module_rt.put(counted(300, 400))
    assert torch.equal(await mine.into(torch.zeros(300, 400)), await mine)
    assert await mine.into(await mine) is await mine


async def test_what_does_not_fit_is_refused_before_anything_is_fetched(module_rt: aiodaft.Runtime) -> None:
    giver, keeper = await module_rt.spawn(Giver), await module_rt.spawn(Keeper)
    before = module_rt.traffic().payload_received
    for target in (torch.zeros(400, 300), torch.zeros(300, 400, dtype=torch.int32), torch.zeros(120_000)):
        ref = giver.by_tcp("plain")
        with pytest.raises(ValueError, match=r"Giver.by_tcp has shape \(300, 400\) and torch.float32, and cannot"):
            await ref.into(target)
        assert not target.any()
        # The value is still there for others.
        assert await giver.total(ref) == counted(300, 400).sum()
    with pytest.raises(ValueError, match=r"shape \(10,\) and torch.float32"):
        await giver.usual("small").into(torch.zeros(11))
    assert module_rt.traffic().payload_received == before
    target = torch.zeros(3)
    with pytest.raises(TypeError, match="Keeper.echo is list, and `into`"):
        await keeper.echo([1]).into(target)
    with pytest.raises(TypeError, match="Keeper.echo is dict, and `into`"):
        await keeper.echo({"weights": counted(300, 400)}).into(target)
    with pytest.raises(TypeError, match="written into a meta tensor"):
        await giver.usual("small").into(torch.zeros(10, device="meta"))
    with pytest.raises(TypeError, match="written into list"):
        await giver.usual("small").into([0.0] * 10)
    with pytest.raises(ValueError, match="expanded tensor"):
        await giver.usual("small").into(torch.zeros(1).expand(10))
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
