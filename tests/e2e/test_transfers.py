"""Values between actors by every transport: of any size, many at a time, and beside what runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch
from dtypes import DTYPES, as_bytes
from receiving import Receiver
from transports import TRANSPORTS

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=TRANSPORTS)
async def shared_runtime(request: pytest.FixtureRequest) -> AsyncIterator[aiodaft.Runtime]:
    """A runtime on each transport."""
    async with aiodaft.Runtime(transport=request.param) as runtime:
        await runtime.stop(await runtime.spawn(Receiver))
        yield runtime


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def test_dp1_two_hundred_small_tensors_are_one_payload_from_actor_to_actor(rt: aiodaft.Runtime) -> None:
    sender, receiver = await rt.spawn(Receiver), await rt.spawn(Receiver)
    # Connections are made once.
    await receiver.echo(sender.make(1)).ready()
    sent, received, here = await sender.traffic(), await receiver.traffic(), rt.traffic()
    sizes = range(500, 700)
    assert await receiver.total_of(sender.make(*sizes)) == sum(size * size for size in sizes)
    assert (await sender.traffic()).payloads_sent - sent.payloads_sent == 1
    assert (await receiver.traffic()).payloads_received - received.payloads_received == 1
    assert rt.traffic().payloads_received == here.payloads_received


async def test_dp1_sizes_change_with_every_call_and_nobody_declares_them(rt: aiodaft.Runtime) -> None:
    sender, receiver = await rt.spawn(Receiver), await rt.spawn(Receiver)
    for size in (0, 1, 100_000, 3, 1 << 20, 17, 0, 16_385, 300_000, 2):
        (tensor,) = await receiver.echo(sender.make(size))
        assert torch.equal(tensor, torch.full((size,), float(size)))


async def test_dp1_every_dtype_and_layout_arrives_as_it_was(rt: aiodaft.Runtime) -> None:
    sender, receiver = await rt.spawn(Receiver), await rt.spawn(Receiver)
    memory = torch.arange(1 << 17, dtype=torch.int32).to(torch.uint8)
    values = {
        dtype: [(whole := memory.view(dtype)), whole[5], whole[:0], whole[: 1 << 12].view(64, 64).t()[::2]]
        for dtype in DTYPES
    }
    arrived = await receiver.echo(sender.echo(values))
    for dtype, tensors in values.items():
        for before, after in zip(tensors, arrived[dtype], strict=True):
            assert (after.dtype, after.shape, as_bytes(after)) == (dtype, before.shape, as_bytes(before))


async def test_dp1_ten_numbers_for_a_receiver_of_six_are_delivered_or_refused_and_end_nothing(
    rt: aiodaft.Runtime,
) -> None:
    """With gloo, a receiver that has posted six numbers for a message of ten aborts."""
    sender = await rt.spawn(Receiver)
    six = torch.zeros(6)
    with pytest.raises(ValueError, match=r"Receiver.ones has shape \(10,\) .* cannot be written into .* shape \(6,\)"):
        await sender.ones(10).into(six)
    assert torch.equal(six, torch.zeros(6))
    assert torch.equal(await sender.ones(10), torch.ones(10))
    assert torch.equal(await sender.ones(6).into(six), torch.ones(6))


async def test_dp3_the_values_of_one_call_are_fetched_at_the_same_time(rt: aiodaft.Runtime) -> None:
    receiver, *senders = await asyncio.gather(*(rt.spawn(Receiver) for _ in range(4)))
    # If one was fetched after another, none would ever be here.
    await receiver.fetch_together(6)
    refs = [sender.ones(50_000) for sender in senders for _ in range(2)]
    assert await receiver.total(*refs) == 6 * 50_000


async def test_dp3_the_value_for_the_next_call_is_fetched_while_a_coroutine_runs(rt: aiodaft.Runtime) -> None:
    sender, receiver = await rt.spawn(Receiver), await rt.spawn(Receiver)
    await receiver.watch_fetches()
    running = receiver.run_until_fetched()
    following = receiver.total(sender.ones(50_000))
    # It runs until then.
    await running
    assert await following == 50_000


async def test_dp3_the_value_for_the_next_call_is_fetched_while_a_method_runs_on_the_thread(
    rt: aiodaft.Runtime,
) -> None:
    sender, receiver = await rt.spawn(Receiver), await rt.spawn(Receiver)
    await receiver.watch_fetches()
    running = receiver.run_on_thread_until_fetched()
    following = receiver.total_on_thread(sender.ones(50_000))
    assert await running
    assert await following == 50_000
