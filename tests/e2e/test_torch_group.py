"""torch.distributed over the collectives and messages of aiodaft: `process_group("aiodaft")`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from spmd_actors import batch, model, train
from supervised import AT_ONCE
from torch_ranks import TorchRank

import aiodaft

# Imported once. An optimizer of torch needs torch._dynamo.
PRELOAD = ("torch_ranks", "torch._dynamo")
pytestmark = [pytest.mark.timeout(90), pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


async def opened(rt: aiodaft.Runtime, size: int) -> aiodaft.Group[TorchRank]:
    ranks = await rt.group(size, TorchRank)
    # There is no store of torch, and no port.
    assert await ranks.all(TorchRank.open) == [("aiodaft", size, set())] * size
    return ranks


async def errors_of(refs: aiodaft.Refs[None]) -> list[BaseException | None]:
    return [
        one if isinstance(one, BaseException) else None for one in await asyncio.gather(*refs, return_exceptions=True)
    ]


async def test_what_torch_distributes_gives_the_values_of_one_process(rt: aiodaft.Runtime, tmp_path: Path) -> None:
    ranks, expected = await opened(rt, 2), train(model(), *batch())
    for losses in (*await ranks.all(TorchRank.replicated), *await ranks.all(TorchRank.sharded)):
        assert losses == pytest.approx(expected, rel=1e-12)
    _, last = await ranks.all(TorchRank.in_stages)
    assert sum(last) / 4 == pytest.approx(expected[0])
    assert await ranks.all(TorchRank.saved_and_loaded, str(tmp_path)) == [True, True]
    assert await ranks.all(TorchRank.in_threads) == [[2.0, 4.0]] * 2
    for nbytes in (64, 1 << 17, 1 << 23):
        assert await ranks.all(TorchRank.reuse, nbytes) == [0, 0]
    assert await ranks.all(TorchRank.close) == [False, False]


async def test_all_operations_work_among_all_ranks_and_among_some(rt: aiodaft.Runtime) -> None:
    ranks = await opened(rt, 4)
    for losses in await ranks.all(TorchRank.sharded_in_two_ways):
        assert losses == pytest.approx(train(model(), *batch()), rel=1e-12)
    for rank, found in enumerate(await ranks.all(TorchRank.collected)):
        assert found == {
            "RedOpType.SUM": [10.0, 10.0],
            "RedOpType.MAX": [4.0, 4.0],
            "RedOpType.AVG": [2.5, 2.5],
            "BOR": 15,
            "reduce_scatter": 6.0 + 40.0 * rank,
            "all_gather": [0.0, 1.0, 2.0, 3.0],
            "all_to_all": [float(source) for source in range(4) for _ in range(rank + 1)],
            "objects": [0, 1, 2, 3],
            "functional": [12.0, 12.0],
            "sparse": [1.0] * 4,
        }
    for rank, (first, second, received, ends) in enumerate(await ranks.all(TorchRank.together)):
        assert (first, second, received) == (4.0, 8.0, (rank - 1) % 4)
        assert ends == (3.0 if rank in {0, 3} else rank)
    assert await ranks.all(TorchRank.close) == [False] * 4


async def test_wrong_uses_are_errors_that_say_what_to_do(rt: aiodaft.Runtime) -> None:
    ranks = await opened(rt, 2)
    for error in await errors_of(ranks.each(TorchRank.reduce_shape, [2, 3])):
        assert "rank 0 has value torch.float32 (2,)" in str(error)
        assert "rank 1 has value torch.float32 (3,)" in str(error)
    for error in await errors_of(ranks.all(TorchRank.use_meta)):
        assert isinstance(error, ValueError)
        assert "is for tensors of the CPU, not of meta: use process_group('nccl')" in str(error)
    for error in await errors_of(ranks.all(TorchRank.use_gloo_beside)):
        assert isinstance(error, RuntimeError)
        assert "has no store that processes share" in str(error)
    for error in await errors_of(ranks.all(TorchRank.open)):
        assert isinstance(error, RuntimeError)
        assert "has a process group already" in str(error)
    # It still works; in a new epoch of the group, it has to be opened again.
    await ranks.all(TorchRank.reduce_for_ever, 1)
    await ranks.renew()
    for error in await errors_of(ranks.all(TorchRank.reduce_for_ever, 1)):
        assert isinstance(error, aiodaft.GroupChanged)
    await errors_of(ranks.all(TorchRank.close))
    assert await ranks.all(TorchRank.sum_ranks) == [1.0, 1.0]


@pytest.mark.parametrize("operation", ["barrier", "all_gather", "all_reduce"])
async def test_a_member_that_leaves_while_others_wait_for_it_is_named(rt: aiodaft.Runtime, operation: str) -> None:
    ranks = await rt.group(2, TorchRank)
    for error in await errors_of(ranks.all(TorchRank.stay_behind, operation)):
        assert isinstance(error, ValueError | RuntimeError)
        # In the order in which they came.
        assert "rank 0 has operation reduce" in str(error)
        assert f"rank 1 has operation {operation}" in str(error)


@pytest.mark.parametrize("operation", ["recv", "recv from any"])
async def test_a_wait_for_a_message_of_a_member_that_has_left_fails(rt: aiodaft.Runtime, operation: str) -> None:
    ranks = await rt.group(2, TorchRank)
    for error in await errors_of(ranks.all(TorchRank.stay_behind, operation)):
        assert isinstance(error, ValueError | RuntimeError)
        assert "[0] of TorchRank" in str(error)
        assert "has left the block: no message of it comes any more" in str(error)


async def test_messages_of_a_member_that_has_left_are_received(rt: aiodaft.Runtime) -> None:
    ranks = await rt.group(2, TorchRank)
    for nbytes in (64, 4 << 20):
        assert await ranks.all(TorchRank.send_and_leave, nbytes) == [[], [0.0, 0.0]]


async def test_the_end_of_a_member_ends_the_waiting_of_the_others_and_is_named(rt: aiodaft.Runtime) -> None:
    ranks = await rt.on(restart=aiodaft.Restart(intensity=99, backoff=AT_ONCE)).group(3, TorchRank)
    for how in ("dies", "fails", "sends nothing"):
        for ends in (0, 2):
            for rank, error in enumerate(await errors_of(ranks.all(TorchRank.train_and_end, ends, how))):
                if how != "fails":
                    assert isinstance(error, aiodaft.ActorDied)
                    assert "SIGKILL" in str(error)
                elif rank == ends:
                    assert isinstance(error, ValueError)
                else:
                    assert isinstance(error, RuntimeError | aiodaft.CallCancelled)
                    assert "ValueError: a bad batch" in str(error)
            while len(set(await ranks.all(TorchRank.epoch))) > 1:
                pass
            # The same processes open it again, with the new one.
            assert await ranks.all(TorchRank.sum_ranks) == [3.0] * 3
