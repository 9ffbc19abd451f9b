"""CUDA tensors between actors, on real GPUs: `pytest -m gpu` (row DP8)."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import cluster_of
from cuda_actors import GpuKeeper
from dtypes import DTYPES, as_bytes

import aiodaft
from aiodaft_transport import PeerGone, Unreachable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.timeout(120),
    pytest.mark.asyncio(loop_scope="module"),
]

MIB = 1 << 18  # elements of float32


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def keepers(rt: aiodaft.Runtime, count: int, *devices: int, **options: Any) -> list[GpuKeeper]:
    made = [await rt.spawn(GpuKeeper, *devices, **options) for _ in range(count)]
    # torch is loaded, and there is a context, before anything is counted.
    await asyncio.gather(*(keeper.make(1, 0.0).ready() for keeper in made))
    return made


async def test_a_tensor_goes_from_gpu_to_gpu_and_no_host_copy_is_in_the_trace(rt: aiodaft.Runtime) -> None:
    a, b = await keepers(rt, 2)
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
    assert payload == direct >= 2 * 64 << 20


async def test_a_tensor_comes_to_the_controller_and_goes_back(rt: aiodaft.Runtime) -> None:
    (a,) = await keepers(rt, 1)
    here = await a.make(MIB, 2.0)
    assert here.is_cuda
    assert float(here.sum()) == 2.0 * MIB
    assert (await a.where(here + 1))[2] == 3.0 * MIB
    target = torch.zeros(MIB, device="cuda")
    torch.cuda.synchronize()
    ref = a.make(MIB, 6.0)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        # What is queued for the current stream comes before the value.
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
            assert payload == 64 << 20
            assert direct == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
async def test_every_dtype_in_every_shape(rt: aiodaft.Runtime, dtype: torch.dtype) -> None:
    (a,) = await keepers(rt, 1)
    values: list[torch.Tensor] = []
    for shape in ((), (0,), (1,), (3, 5), (2, 0, 4), (4, 3, 2)):
        raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8, device="cuda")
        tensor = raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype, device="cuda")
        values += [tensor, tensor.T if tensor.dim() == 2 else tensor]
    got = await a.echo(values)
    for sent, came in zip(values, got, strict=True):
        assert (came.dtype, came.shape, came.device.type) == (sent.dtype, sent.shape, "cuda")
        if sent.numel():
            assert as_bytes(came) == as_bytes(sent)


async def test_parts_here_and_there_gaps_views_and_parameters(rt: aiodaft.Runtime) -> None:
    a, b = await keepers(rt, 2)
    host, base, part, strided, empty, parameter = await b.echo(a.several(100_000))
    assert [tensor.device.type for tensor in (host, base, part, strided, parameter)] == ["cpu", *["cuda"] * 4]
    assert [float(tensor.sum()) for tensor in (host, base, strided)] == [300_000.0, 100_000.0, 25_000.0]
    assert empty.shape == (0,)
    base[10] = 7.0
    assert part[0] == 7.0
    assert type(parameter) is torch.nn.Parameter
    assert parameter.requires_grad


@pytest.mark.parametrize("make", ["make_late", "make_on_side_stream"])
async def test_a_consumer_sees_what_a_stream_makes_after_a_long_kernel(rt: aiodaft.Runtime, make: str) -> None:
    a, b = await keepers(rt, 2)
    ref = getattr(a, make)(4 * MIB, 5.0)
    # Comes after the snapshot in the stream, and long before its end in time.
    await a.overwrite(9.0)
    assert (await b.where(ref))[2] == 5.0 * 4 * MIB
    assert (await b.where(ref))[2] == 5.0 * 4 * MIB


async def test_no_loop_waits_for_a_gpu(rt: aiodaft.Runtime) -> None:
    a, b = await keepers(rt, 2)
    total = b.where(a.make_late(MIB, 5.0))
    for _ in range(20):
        await asyncio.gather(a.traffic(), b.traffic())
    assert not total.done()
    assert (await total)[2] == 5.0 * MIB


async def test_arguments_are_those_of_the_stream_that_was_current(rt: aiodaft.Runtime) -> None:
    (a,) = await keepers(rt, 1)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.zeros(MIB, device="cuda")
        torch.cuda._sleep(500_000_000)
        x.fill_(3.0)
        ref = a.where(x)
        # Python's objects, so many that a helper thread encodes them, around what the side stream made.
        long = a.echo([list(range(200_000)), x])
        x2 = x.fill_(8.0)
    assert (await ref)[2] == 3.0 * MIB
    assert float((await long)[1][0]) in (3.0, 8.0)
    del x2


async def test_consumers_may_write_and_no_other_process_sees_it(rt: aiodaft.Runtime) -> None:
    a, b, c = await keepers(rt, 3)
    ref = a.make(MIB, 1.0)
    assert await asyncio.gather(*(b.add_in_place(ref, 10.0) for _ in range(6))) == [11.0] * 6
    assert (await c.where(ref))[2] == MIB
    here = await ref
    here.zero_()
    assert (await c.where(ref))[2] == MIB


async def test_memory_of_the_caching_allocator_and_of_the_pool_is_never_reused_too_early(rt: aiodaft.Runtime) -> None:
    a, b = await keepers(rt, 2)
    for value in range(200):
        ref = a.make_on_thread(MIB, float(value))
        total = b.where(ref)
        # What it was made from is given away, and so is what consumers got before.
        churn = [a.churn(3), b.churn(3)]
        assert (await total)[2] == float(value) * MIB
        await asyncio.gather(*churn)
        del ref, total
    gc.collect()
    while await a.blocks():
        await asyncio.sleep(0)


async def test_many_transfers_leave_no_memory_of_the_gpu_behind(rt: aiodaft.Runtime) -> None:
    a, b = await keepers(rt, 2)

    async def send(count: int) -> int:
        for _ in range(count):
            await b.where(a.make(8 * MIB, 1.0))
        gc.collect()
        return torch.cuda.mem_get_info()[0]

    free = await send(20)
    assert await send(200) >= free - (256 << 20)


async def test_expandable_segments_are_copied_and_cannot_be_lent(rt: aiodaft.Runtime) -> None:
    a, b = (await keepers(rt, 1, expandable=True))[0], (await keepers(rt, 1, expandable=True))[0]
    assert (await b.where(a.make(4 * MIB, 2.0)))[2] == 8.0 * MIB
    with pytest.raises(Unreachable, match="expandable_segments:False"):
        await b.where(a.lend(4 * MIB, 2.0))
    assert (await b.where(a.make(4 * MIB, 2.0)))[2] == 8.0 * MIB


async def test_what_is_lent_is_read_where_it_is(rt: aiodaft.Runtime) -> None:
    a, b = await keepers(rt, 2)
    ref = a.lend(64 * MIB, 4.0)
    assert (await b.where(ref))[2] == 4.0 * 64 * MIB
    await ref.released()
    # A quarter of a gigabyte is too much for the pool to have kept a copy of it unseen.
    assert await a.blocks() == 0
    ref = a.lend(MIB, 4.0)
    await ref.ready()
    await a.overwrite(1.0)
    with pytest.raises(aiodaft.BorrowError):
        await b.where(ref)


async def test_who_asks_for_a_transport_gets_it(rt: aiodaft.Runtime) -> None:
    a, b = await keepers(rt, 2)
    before = await a.traffic()
    assert (await b.where(a.make_for_the_host(MIB, 1.0)))[::2] == ("cuda", MIB)
    payload, direct = [now - earlier for now, earlier in zip(await a.traffic(), before, strict=True)]
    assert (payload, direct) == (4 * MIB, 0)


async def test_a_graph_can_be_captured_while_values_come_and_go(rt: aiodaft.Runtime) -> None:
    a, b = await keepers(rt, 2)
    captured = b.capture_graph(3000)
    values = [b.echo(a.make(MIB, float(value))) for value in range(30)]
    assert await captured == 3000.0
    assert [float((await value)[0]) for value in values] == list(range(30))


async def test_two_gpus_and_processes_that_see_only_one_of_them(rt: aiodaft.Runtime) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    one, two = [await rt.on(gpus=1).spawn(GpuKeeper) for _ in range(2)]
    first, second = [await keeper.where(keeper.make(MIB, 1.0)) for keeper in (one, two)]
    assert first[1] != second[1]
    # Each gets it on its own, which both call number 0.
    assert await two.where(one.make(16 * MIB, 3.0)) == ("cuda", second[1], 48.0 * MIB)
    assert await one.where(two.make_late(16 * MIB, 3.0)) == ("cuda", first[1], 48.0 * MIB)
    # This process sees both, and gets it on the one it is on.
    here = await two.make(MIB, 1.0)
    assert str(torch.cuda.get_device_properties(here.device).uuid) == second[1]


@pytest.mark.asyncio(loop_scope="function")
async def test_a_producer_that_dies_in_the_middle_harms_no_other_process() -> None:
    async with aiodaft.Runtime() as rt:
        a, b, c = await keepers(rt, 3)
        kept = await a.make(16 * MIB, 1.0)
        waiting = b.where(a.make_late(16 * MIB, 5.0))
        await a.traffic()
        a.die.tell()
        with pytest.raises((aiodaft.ActorDied, PeerGone)):
            await waiting
        assert float(kept.sum()) == 16.0 * MIB
        assert (await b.where(c.make(16 * MIB, 2.0)))[2] == 32.0 * MIB
        del kept


@pytest.mark.asyncio(loop_scope="function")
async def test_a_consumer_that_dies_in_the_middle_gives_everything_back() -> None:
    async with aiodaft.Runtime() as rt:
        a, b, c = await keepers(rt, 3)
        ref = a.make(64 * MIB, 1.0)
        await ref.ready()
        waiting = [b.where(ref) for _ in range(10)]
        b.die.tell()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert any(isinstance(error, aiodaft.ActorDied) for error in ended)
        assert (await c.where(ref))[2] == 64.0 * MIB
        del ref
        gc.collect()
        while await a.blocks():
            await asyncio.sleep(0)
