"""Tensors between actors: straight from one to the other, and always the values that were returned (CR3, DP4)."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch
from actors import Box
from dtypes import DTYPES, as_bytes
from inside import peer_of
from receiving import Receiver
from supervised import AT_ONCE
from torch_actors import Keeper, Layer
from transports import REPEATED, on_each_transport

import aiodaft

MIB = 1 << 18  # elements of float32


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=REPEATED)
async def shared_runtime(request: pytest.FixtureRequest) -> AsyncIterator[aiodaft.Runtime]:
    """A runtime on each transport."""
    async with aiodaft.Runtime(transport=request.param) as runtime:
        await runtime.stop(await runtime.spawn(Keeper))
        yield runtime


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


@dataclasses.dataclass
class Nested:
    """A dataclass around a ref."""

    value: Any


@on_each_transport
async def test_a_tensor_goes_from_actor_to_actor_and_nothing_comes_here(rt: aiodaft.Runtime) -> None:
    a, b, c = await asyncio.gather(*(rt.spawn(Keeper) for _ in range(3)))
    # Connections are made once.
    await c.echo(b.echo(a.make(16 * MIB, 1.0))).ready()
    before, pulled = rt.traffic().control, rt.traffic().payloads_received
    big = a.make(16 * MIB, 3.0)
    doubled = b.double({"in": [big]})
    again = c.echo([{"deep": doubled}])
    await again.ready()
    assert rt.traffic().payloads_received == pulled
    assert rt.traffic().control - before < 4096
    (value,) = await again
    assert value["deep"]["out"][0].shape == (16 * MIB,)
    assert value["deep"]["out"][0][-1] == 6.0


async def test_refs_in_dataclasses_lists_and_dicts_carry_tensors(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(Keeper), await rt.spawn(Keeper)
    big = a.make(MIB, 2.0)
    got = await b.echo({"deep": [Nested((big, 1))]})
    assert torch.equal(got["deep"][0].value[0], torch.full((MIB,), 2.0))


async def test_a_ref_given_back_to_its_producer_is_the_very_tensor(rt: aiodaft.Runtime) -> None:
    a = await rt.spawn(Keeper)
    big = a.make(MIB, 1.0)
    assert await a.is_mine(big)
    neighbour = await rt.on(with_=a).spawn(Keeper)
    await neighbour.keep(big)
    assert await neighbour.address() == await a.address()


@pytest.mark.parametrize("make", ["make", "make_on_thread"])
@pytest.mark.parametrize("size", [100, MIB // 2, 4 * MIB])
async def test_consumers_see_what_was_returned_whatever_happens_later(
    rt: aiodaft.Runtime, make: str, size: int
) -> None:
    a, b = await rt.spawn(Keeper), await rt.spawn(Keeper)
    ref = getattr(a, make)(size, 1.0)
    overwrite = a.overwrite if make == "make" else a.overwrite_on_thread
    await asyncio.gather(overwrite(7.0), overwrite(9.0))
    assert await b.total(ref) == size
    assert float((await ref).sum()) == size
    # The producer itself changed its tensor, so it gets the returned value, not its present tensor.
    assert await a.total(ref) == size


async def test_consumers_may_write_and_no_other_process_sees_it(rt: aiodaft.Runtime) -> None:
    a, b, c = await asyncio.gather(*(rt.spawn(Keeper) for _ in range(3)))
    ref = a.make(MIB, 1.0)
    assert await b.add_in_place(ref, 10.0) == 11.0
    assert await b.add_in_place(ref, 20.0) == 21.0
    assert await c.total(ref) == MIB
    assert await a.kept() == MIB
    here = await ref
    here.zero_()
    assert await c.total(ref) == MIB


async def test_two_calls_at_once_with_one_ref_do_not_share_its_memory(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(Keeper), await rt.spawn(Keeper)
    ref = a.make(MIB, 1.0)
    assert await asyncio.gather(*(b.add_in_place(ref, 1.0) for _ in range(6))) == [2.0] * 6


async def test_reused_memory_shows_the_new_value_where_a_consumer_wrote(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(Keeper), await rt.spawn(Keeper)
    for value in range(8):
        ref = a.make(MIB, float(value))
        assert await b.add_in_place(ref, 100.0) == value + 100.0
        del ref
        gc.collect()
    assert await b.total(a.make(MIB, 5.0)) == 5.0 * MIB


async def test_an_actor_keeps_what_it_got_after_all_others_dropped_it(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(Keeper), await rt.spawn(Keeper)
    await b.keep(a.make(MIB, 4.0))
    for value in range(4):
        await a.make(MIB, float(value)).ready()
    assert await b.kept() == 4.0 * MIB
    await rt.stop(a)
    assert await b.kept() == 4.0 * MIB


async def test_a_large_argument_from_here(rt: aiodaft.Runtime) -> None:
    a = await rt.spawn(Keeper)
    x = torch.arange(8 * MIB, dtype=torch.float32)
    first = a.total(x)
    second = a.total(torch.ones(3))
    assert await second == 3.0
    assert await first == float(x.sum())


async def test_a_result_is_whole_while_other_calls_of_the_actor_write_to_it(rt: aiodaft.Runtime) -> None:
    a = await rt.spawn(Keeper)
    await a.make(4 * MIB, 0.0).ready()
    writing = a.background(1.0, 0.5)
    for _ in range(5):
        tensor = await a.make(4 * MIB, 0.0)
        assert tensor.min() == tensor.max()
    await writing


async def test_a_shared_tensor_is_not_copied(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(Keeper), await rt.spawn(Keeper)
    ref = a.make_shared(4 * MIB, 2.0)
    assert await b.total(ref) == 8.0 * MIB
    assert await b.add_in_place(ref, 1.0) == 3.0
    assert await a.kept() == 8.0 * MIB
    mine = aiodaft.memory.empty(2, MIB, dtype=torch.int32).fill_(3)
    assert await b.total(mine) == 6.0 * MIB
    assert aiodaft.memory.empty((3, 0)).shape == (3, 0)


async def test_writing_to_a_lent_tensor_is_found_out_by_its_reader(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(Keeper), await rt.spawn(Keeper)
    for make in (a.lend, a.make_shared):
        ref = make(MIB, 1.0)
        await ref.ready()
        await a.overwrite(5.0)
        with pytest.raises(aiodaft.exceptions.BorrowError):
            await b.total(ref)


async def test_the_lender_learns_when_no_process_reads_any_more(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(Keeper), await rt.spawn(Keeper)
    ref = a.lend(MIB, 1.0)
    await b.keep(ref)
    returned = a.wait_returned()
    await ref.ready()
    await a.address()
    assert not returned.done()
    del ref
    gc.collect()
    await b.keep(torch.zeros(1))
    assert await returned


async def test_released_at_the_caller_waits_for_readers(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(Keeper), await rt.spawn(Keeper)
    ref = a.make_shared(MIB, 1.0)
    await b.keep(ref)
    if peer_of(rt).store.transport.name == "shm":
        waiting = asyncio.get_running_loop().create_task(ref.released())
        await a.address()
        assert not waiting.done()
        await b.keep(torch.zeros(1))
        await waiting
    else:
        # Over TCP the reader has a copy of its own, so no process reads the original.
        await ref.released()
    await a.overwrite(2.0)


async def test_released_waits_for_what_an_await_gave_and_not_for_the_ref_itself(rt: aiodaft.Runtime) -> None:
    a = await rt.spawn(Keeper)
    ref = a.make_shared(MIB, 1.0)
    here = await ref
    waiting = asyncio.get_running_loop().create_task(ref.released())
    await a.address()
    # An await of it now does not make it wait for the ref either.
    assert (await ref).sum() == MIB
    # Over other transports than `shm`, the reader has a copy of its own.
    assert not (waiting.done() and peer_of(rt).store.transport.name == "shm")
    del here
    await waiting
    assert torch.equal(await ref, torch.ones(MIB))
    await ref.released()
    await a.overwrite(2.0)


async def test_modules_compose_across_processes(rt: aiodaft.Runtime) -> None:
    first, second = await rt.spawn(Layer, 64, 128, seed=1), await rt.spawn(Layer, 128, 8, seed=2)
    torch.manual_seed(1)
    one = torch.nn.Linear(64, 128)
    torch.manual_seed(2)
    two = torch.nn.Linear(128, 8)
    for rows in (1, 7, 300):
        x = torch.randn(rows, 64)
        with torch.no_grad():
            assert torch.equal(await second.forward(first.forward(x)), two(one(x)))
    state = await first.state()
    assert torch.equal(state["weight"], one.weight)


async def test_a_box_with_a_large_tensor_ref_travels_as_a_ref(rt: aiodaft.Runtime) -> None:
    a, b = await rt.spawn(Keeper), await rt.spawn(Keeper)
    box = await b.echo(Box(a.make(MIB, 1.0)))
    assert float((await box.ref).sum()) == MIB


async def test_threads_of_torch_are_where_they_belong(rt: aiodaft.Runtime) -> None:
    # A process forked after torch had started its threads would hang here.
    a = await rt.spawn(Layer, 512, 512, seed=0)
    x = torch.randn(2048, 512)
    assert (await a.forward(x)).shape == (2048, 512)
    assert os.getpid() != (await rt.info(a)).pid


async def test_torch_computes_with_as_many_threads_as_the_actors_environment_says(
    rt: aiodaft.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The fork server has loaded torch, which read its environment then.
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    keeper = await rt.on(cpus=1, restart=aiodaft.Restart(backoff=AT_ONCE)).spawn(Keeper)
    assert await keeper.threads() == (3, "3")
    os.kill((await rt.info(keeper)).pid, signal.SIGKILL)
    while not (await rt.info(keeper)).restarts:
        pass
    assert await keeper.threads() == (3, "3")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert await (await rt.on(cpus=1).spawn(Keeper)).threads() == (1, "1")


# The tests of data parallelism, which look at the traffic.


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


async def test_dp1_sizes_change_with_every_call_and_are_not_declared(rt: aiodaft.Runtime) -> None:
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


async def test_only_a_whole_result_can_be_lent(rt: aiodaft.Runtime) -> None:
    keeper = await rt.spawn(Keeper)
    lent = aiodaft.borrow(torch.ones(3))
    for argument in (lent, [lent]):
        with pytest.raises(
            aiodaft.exceptions.SerializationError, match=r"borrow\(\) is for the whole result of a method: pass the"
        ):
            await keeper.echo(argument)


async def test_a_group_gets_a_tensor_in_parts_along_its_first_dimension(rt: aiodaft.Runtime) -> None:
    group = await rt.group(2, Keeper)
    batch = torch.arange(3 * MIB, dtype=torch.float32).reshape(3, MIB)
    parts = await group.split(Keeper.echo, batch)
    assert [part.shape[0] for part in parts] == [2, 1]
    assert torch.equal(torch.cat(parts), batch)


async def test_groups_in_the_same_processes_hand_over_tensors_without_a_copy(rt: aiodaft.Runtime) -> None:
    trainers = await rt.group(2, Keeper)
    generators = await rt.on(with_=trainers).group(2, Keeper)
    made = trainers.all(Keeper.make, 4 * MIB, 1.5)
    await generators.each(Keeper.keep, made)
    # The same memory, in processes of their own.
    assert await generators.all(Keeper.address) == await trainers.all(Keeper.address)
    assert await generators.each(Keeper.is_mine, made) == [True, True]
    assert await generators.all(Keeper.kept) == [4 * MIB * 1.5] * 2
