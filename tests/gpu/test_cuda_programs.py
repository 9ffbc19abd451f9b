"""Programs of users on a GPU in an actor: compiled code, CUDA graphs, NCCL, streams, collectives: `pytest -m gpu`."""

from __future__ import annotations

import asyncio
import shutil

import pytest
import pytest_asyncio
import torch
from cuda_programs import Programmer, Replayer, formula
from on_gpu import MIB, ON_ONE_LOOP

import aiodaft
from aiodaft import Ref

pytestmark = ON_ONE_LOOP


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(shared_runtime: aiodaft.Runtime) -> aiodaft.Group[Programmer]:
    """Two members on one GPU, for all tests."""
    return await shared_runtime.group(2, Programmer)


@pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="torch.compile needs a compiler of C for the GPU's code"
)
async def test_compiled_code_takes_values_of_actors_and_makes_some(shared: aiodaft.Group[Programmer]) -> None:
    a, b = shared
    x = torch.randn(64, 128, device="cuda")
    for _ in range(2):
        made = a.compiled(x)
        assert (await b.total(made))[0] == "cuda"
        torch.testing.assert_close(await made, formula(x))


async def test_the_output_of_a_cuda_graph_is_as_it_was_when_it_was_returned(
    shared: aiodaft.Group[Programmer], shared_runtime: aiodaft.Runtime
) -> None:
    _, b = shared
    async with shared_runtime.spawn(Replayer, MIB) as replayer:
        for replay in (replayer.replay, replayer.replay_on_thread):
            refs = [replay(float(value)) for value in range(20)]
            await refs[-1].ready()
            # All were overwritten but the last one.
            assert [await b.total(ref) for ref in refs] == [("cuda", (2.0 * value + 1) * MIB) for value in range(20)]
        x = b.make(MIB, 4.0)
        for expected in (9.0, 19.0, 39.0):
            x = replayer.replay_with(x)
            assert await b.total(x) == ("cuda", expected * MIB)
        lent = replayer.lend()
        assert await b.total(lent) == ("cuda", 39.0 * MIB)
        await lent.released()


async def test_a_process_group_has_nccl_for_tensors_of_a_gpu(shared_runtime: aiodaft.Runtime) -> None:
    async with shared_runtime.on(gpus=1).group(1, Programmer) as group:
        # It can be opened again, and torch can be told or choose.
        for backend, devices in ((None, ("cuda",)), ("cpu:gloo,cuda:nccl", ("cuda", "cpu")), ("nccl", ("cuda",))):
            ((backends, sums),) = await group.all(Programmer.reduce_with_torch, MIB, backend, *devices)
            assert "cuda:nccl" in backends
            assert sums == [float(MIB)] * len(devices)
        assert await group[0].total(group[0].make(MIB, 2.0)) == ("cuda", 2.0 * MIB)


async def test_members_on_one_gpu_for_which_nccl_is_not_made_get_its_error(
    shared: aiodaft.Group[Programmer], shared_runtime: aiodaft.Runtime
) -> None:
    group = await shared_runtime.on(restart="temporary").group(2, Programmer)
    try:
        calls = group.all(Programmer.reduce_with_torch, 16, "nccl", "cuda")
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(error, RuntimeError | aiodaft.DaftError) for error in ended] == [True, True], ended
    finally:
        await shared_runtime.stop(group)


async def test_values_of_several_streams_and_of_methods_of_both_kinds(shared: aiodaft.Group[Programmer]) -> None:
    a, b = shared
    made = a.on_streams(4, MIB)
    expected = [float(number) * MIB for number in range(4)]
    assert await b.totals(made) == await b.totals_on_thread(made) == await a.totals_on_thread(made) == expected


async def test_gradients_of_what_came_from_another_process(shared: aiodaft.Group[Programmer]) -> None:
    a, b = shared
    assert await a.total(b.grads(a.make(MIB, 3.0))) == ("cuda", 6.0 * MIB)


@pytest.mark.parametrize("size", [16, 4 * MIB])
async def test_collectives_of_members_and_on_refs_stay_on_the_gpu(shared: aiodaft.Group[Programmer], size: int) -> None:
    assert await shared.all(Programmer.reduce_by_name, size) == [("cuda", 3.0 * size)] * 2
    for op, expected in (("sum", 3.0), ("max", 2.0), (torch.mul, 2.0)):
        refs = [member.make(size, float(rank + 1)) for rank, member in enumerate(shared)]
        for result, member in zip(aiodaft.all_reduce(refs, op), shared, strict=True):
            assert await member.total(result) == ("cuda", expected * size)
    refs = [member.make(size, float(rank + 1)) for rank, member in enumerate(shared)]
    gathered = await aiodaft.all_gather(refs)
    assert [[float(part.sum()) for part in parts] for parts in gathered] == [[size, 2.0 * size]] * 2
    (copy,) = aiodaft.broadcast(refs[0], [shared[1]])
    assert await shared[1].total(copy) == ("cuda", size)
    halves = aiodaft.reduce_scatter(refs)
    assert [await member.total(half) for half, member in zip(halves, shared, strict=True)] == [
        ("cuda", 3.0 * size / 2)
    ] * 2


@pytest.mark.parametrize("size", [16, MIB])
async def test_messages_channels_and_streams_carry_them(shared: aiodaft.Group[Programmer], size: int) -> None:
    a, b = shared
    assert await shared.all(Programmer.pass_round, size) == [("cuda", 1.0), ("cuda", 0.0)]
    items = [(item.device.type, float(item[-1])) async for item in a.items(5, size)]
    assert items == [("cuda", float(number)) for number in range(1, 6)]
    channel = aiodaft.Channel[torch.Tensor](2)
    sending = a.send(channel, 5, size)
    assert await b.receive(channel) == items
    await sending
    # To the controller, too.
    channel = aiodaft.Channel[torch.Tensor](2)
    sending = b.send(channel, 3, size)
    assert [float(item.sum()) async for item in channel] == [1.0 * size, 2.0 * size, 3.0 * size]
    await sending


async def test_runs_of_a_compiled_dataflow_carry_them(shared: aiodaft.Group[Programmer]) -> None:
    a, b = shared

    def flow(size: Ref[int], given: Ref[torch.Tensor]) -> list[Ref[torch.Tensor]]:
        made = a.make(size, 3.0)
        return [made, b.grads(made), a.grads(b.grads(given)), b.grads(b.grads(made))]

    async with aiodaft.compile(flow) as graph:
        runs = [graph(MIB, torch.full((MIB,), float(run), device="cuda")) for run in range(8)]
        for run, results in enumerate(runs):
            values = [await result for result in results]
            assert [value.device.type for value in values] == ["cuda"] * 4
            assert [float(value[0]) for value in values] == [3.0, 6.0, 4.0 * run, 12.0]
            assert [float(value[-1]) for value in values] == [3.0, 6.0, 4.0 * run, 12.0]
