"""CUDA tensors between actors, on real GPUs: `pytest -m gpu` (row DP8)."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from clusters import cluster_of
from cuda_actors import GpuKeeper
from on_gpu import MIB, ON_BOTH_LOOPS, all_given_back, keepers

import aiodaft
from aiodaft_transport import Unreachable

pytestmark = ON_BOTH_LOOPS


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(shared_runtime: aiodaft.Runtime) -> list[GpuKeeper]:
    """Three actors on one GPU, for all tests."""
    return await keepers(shared_runtime, 3)


async def test_a_tensor_goes_from_gpu_to_gpu_and_no_host_copy_is_in_the_trace(
    shared: list[GpuKeeper], shared_runtime: aiodaft.Runtime
) -> None:
    async with shared_runtime.scope() as scope:
        a, b = await keepers(scope, 2)
        assert (await b.where(a.make(16 * MIB, 1.0)))[0] == "cuda"
        await asyncio.gather(a.start_trace(), b.start_trace())
        before = await a.traffic()
        for make in (a.make, a.make_on_thread):
            await b.overwrite(0.0)
            await b.echo(make(16 * MIB, 3.0)).ready()
        traces = await asyncio.gather(a.stop_trace(), b.stop_trace())
        copies = [name for trace in traces for name in trace if "Memcpy" in name]
        assert [name for name in copies if "DtoD" not in name and "PtoP" not in name] == []
        assert len(copies) >= 2
        payload, direct = [now - earlier for now, earlier in zip(await a.traffic(), before, strict=True)]
        assert payload == direct >= 2 * 16 << 20


async def test_a_tensor_comes_to_the_controller_and_goes_back(shared: list[GpuKeeper]) -> None:
    a = shared[0]
    here = await a.make(MIB, 2.0)
    assert here.is_cuda
    assert float(here.sum()) == 2.0 * MIB
    assert (await a.where(here + 1))[2] == 3.0 * MIB
    target = torch.zeros(MIB, device="cuda")
    torch.cuda.synchronize()
    ref = a.make(MIB, 6.0)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        # Work that is queued for the current stream comes before the value.
        target.fill_(9.0)
        assert await ref.into(target) is target
        assert target.min() == target.max() == 6.0
    assert torch.equal(await ref.into(torch.zeros(MIB)), target.cpu())


async def test_a_tensor_goes_from_node_to_node_through_memory_of_the_host(tmp_path: Path) -> None:
    with cluster_of(tmp_path / "key", "n1", "n2") as cluster:
        async with aiodaft.Runtime(cluster.address, key_file=cluster.key_file) as rt:
            a, b = [await rt.on(node=name).spawn(GpuKeeper) for name in ("n1", "n2")]
            kind, _, total = await b.where(a.make(16 * MIB, 1.0))
            assert (kind, total) == ("cuda", 16.0 * MIB)
            payload, direct = await a.traffic()
            assert payload == 16 << 20
            assert direct == 0


async def test_parts_here_and_there_gaps_views_and_parameters(shared: list[GpuKeeper]) -> None:
    a, b, _ = shared
    host, base, part, strided, empty, parameter = await b.echo(a.several(100_000))
    assert [tensor.device.type for tensor in (host, base, part, strided, parameter)] == ["cpu", *["cuda"] * 4]
    assert [float(tensor.sum()) for tensor in (host, base, strided)] == [300_000.0, 100_000.0, 25_000.0]
    assert empty.shape == (0,)
    base[10] = 7.0
    assert part[0] == 7.0
    assert type(parameter) is torch.nn.Parameter
    assert parameter.requires_grad


@pytest.mark.parametrize("make", ["make_late", "make_on_side_stream"])
async def test_a_consumer_sees_what_a_stream_makes_after_a_long_kernel(
    shared: list[GpuKeeper], shared_runtime: aiodaft.Runtime, make: str
) -> None:
    async with shared_runtime.scope() as scope:
        # Its thread goes on to use the side stream.
        (a,) = await keepers(scope, 1)
        ref = getattr(a, make)(4 * MIB, 5.0)
        # Comes after the snapshot in the stream, and long before its end in time.
        await a.overwrite(9.0)
        for consumer in shared[:2]:
            assert (await consumer.where(ref))[2] == 5.0 * 4 * MIB


async def test_no_loop_waits_for_a_gpu(
    shared: list[GpuKeeper],
) -> None:
    a, b, _ = shared
    # The kernels are loaded.
    await a.make_on_thread(1, 5.0)
    total = b.where(a.make_late(MIB, 5.0))
    for _ in range(20):
        await asyncio.gather(a.traffic(), b.traffic())
    assert not total.done()
    assert (await total)[2] == 5.0 * MIB


async def test_arguments_are_those_of_the_stream_that_was_current(shared: list[GpuKeeper]) -> None:
    a = shared[0]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.zeros(MIB, device="cuda")
        torch.cuda._sleep(500_000_000)
        x.fill_(3.0)
        ref = a.where(x)
        # Python's objects, so many that a helper thread encodes them, around the result of the side stream.
        long = a.echo([list(range(200_000)), x])
        x2 = x.fill_(8.0)
    assert (await ref)[2] == 3.0 * MIB
    assert float((await long)[1][0]) in (3.0, 8.0)
    del x2


async def test_consumers_may_write_and_no_other_process_sees_it(shared: list[GpuKeeper]) -> None:
    a, b, c = shared
    ref = a.make(MIB, 1.0)
    assert await asyncio.gather(*(b.add_in_place(ref, 10.0) for _ in range(6))) == [11.0] * 6
    assert (await c.where(ref))[2] == MIB
    here = await ref
    here.zero_()
    assert (await c.where(ref))[2] == MIB


async def test_memory_of_the_caching_allocator_and_of_the_pool_is_never_reused_too_early(
    shared: list[GpuKeeper],
) -> None:
    a, b, _ = shared
    for value in range(200):
        ref = a.make_on_thread(MIB, float(value))
        total = b.where(ref)
        # The memory that it was made from is given away, and so is that of earlier values of consumers.
        churn = [a.churn(3), b.churn(3)]
        assert (await total)[2] == float(value) * MIB
        await asyncio.gather(*churn)
        del ref, total
    gc.collect()
    await all_given_back(a)


async def test_expandable_segments_are_copied_and_cannot_be_lent(
    shared: list[GpuKeeper], shared_runtime: aiodaft.Runtime
) -> None:
    async with shared_runtime.scope() as scope:
        a, b = await keepers(scope, 2, expandable=True)
        assert (await b.where(a.make(4 * MIB, 2.0)))[2] == 8.0 * MIB
        with pytest.raises(Unreachable, match="expandable_segments:False"):
            await b.where(a.lend(4 * MIB, 2.0))
        assert (await b.where(a.make(4 * MIB, 2.0)))[2] == 8.0 * MIB


async def test_what_is_lent_is_read_where_it_is(
    shared: list[GpuKeeper],
) -> None:
    a, b, _ = shared
    await all_given_back(a)
    ref = a.lend(64 * MIB, 4.0)
    assert (await b.where(ref))[2] == 4.0 * 64 * MIB
    await ref.released()
    # It was read where it lies, and no copy of it is kept.
    assert await a.blocks() == 0
    ref = a.lend(MIB, 4.0)
    await ref.ready()
    await a.overwrite(1.0)
    with pytest.raises(aiodaft.exceptions.BorrowError):
        await b.where(ref)


async def test_who_asks_for_a_transport_gets_it(
    shared: list[GpuKeeper],
) -> None:
    a, b, _ = shared
    before = await a.traffic()
    assert (await b.where(a.make_for_the_host(MIB, 1.0)))[::2] == ("cuda", MIB)
    payload, direct = [now - earlier for now, earlier in zip(await a.traffic(), before, strict=True)]
    assert (payload, direct) == (4 * MIB, 0)


async def test_a_graph_can_be_captured_while_values_come_and_go(
    shared: list[GpuKeeper],
) -> None:
    a, b, _ = shared
    captured = b.capture_graph(3000)
    values = [b.echo(a.make(MIB, float(value))) for value in range(30)]
    assert await captured == 3000.0
    assert [float((await value)[0]) for value in values] == list(range(30))


async def test_two_gpus_and_processes_that_see_only_one_of_them(
    shared: list[GpuKeeper], shared_runtime: aiodaft.Runtime
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    async with shared_runtime.scope() as scope:
        one, two = [await scope.on(gpus=1).spawn(GpuKeeper) for _ in range(2)]
        await check_two_gpus(one, two)


async def check_two_gpus(one: GpuKeeper, two: GpuKeeper) -> None:
    first, second = [await keeper.where(keeper.make(MIB, 1.0)) for keeper in (one, two)]
    assert first[1] != second[1]
    # Each gets it on its own, which both call number 0.
    assert await two.where(one.make(16 * MIB, 3.0)) == ("cuda", second[1], 48.0 * MIB)
    assert await one.where(two.make_late(16 * MIB, 3.0)) == ("cuda", first[1], 48.0 * MIB)
    # This process sees both, and gets it on the one it is on.
    here = await two.make(MIB, 1.0)
    assert str(torch.cuda.get_device_properties(here.device).uuid) == second[1]
