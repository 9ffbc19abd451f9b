"""Programs of torch.distributed in the methods of a group: over gloo, and over the collectives of aiodaft."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from spmd_actors import Rank, batch, model, train
from supervised import AT_ONCE
from torch_ranks import TorchRank

import aiodaft

# Imported once, which takes seconds; an optimizer of torch needs torch._dynamo.
PRELOAD = ("torch_ranks", "torch._dynamo")
pytestmark = [pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]


def told(error: BaseException | None) -> str:
    """The text of an error about the member that is lost.

    gloo rarely misses the end of its connections; then the process is ended, and its last lines say why.
    """
    if isinstance(error, aiodaft.ActorDied) and error.exit_code == 1:
        return " ".join(error.last_lines)
    return f"{error!r} {getattr(error, '__notes__', [])}"


async def failures(refs: aiodaft.Refs[None]) -> list[BaseException | None]:
    results = await asyncio.gather(*refs, return_exceptions=True)
    return [result if isinstance(result, BaseException) else None for result in results]


async def all_know_restarts(ranks: aiodaft.Group[Rank]) -> None:
    """Wait until the members know the restarts of the others: a member that comes to a block before gets a
    GroupChanged.
    """
    while len(set(await ranks.all(Rank.epoch))) > 1:
        pass


async def test_programs_for_torchrun_work_in_methods(module_rt: aiodaft.Runtime) -> None:
    ranks = await module_rt.group(4, Rank)
    for rank, (inside, after, initialized) in enumerate(await ranks.all(Rank.variables)):
        assert inside == {
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "4",
            "MASTER_ADDR": "127.0.0.1",
        }
        assert (after, initialized) == ({}, False)
    for _ in range(3):
        assert await ranks.all(Rank.sum_ranks) == [6.0] * 4
    assert all(await ranks.all(Rank.multiply_dtensors))
    expected = train(model(), *batch())
    for losses in (*await ranks.all(Rank.train_ddp), *await ranks.all(Rank.train_fsdp)):
        assert losses == pytest.approx(expected, rel=1e-12)


async def test_a_death_at_any_point_ends_the_waiting_of_all_others_and_is_named(module_rt: aiodaft.Runtime) -> None:
    restart = aiodaft.Restart(intensity=99, period=60, backoff=aiodaft.Backoff(base=0.001, factor=1))
    ranks = await module_rt.on(restart=restart).group(3, Rank)
    points = (("init", 0), ("init", 1), ("connect", 0), ("forward", 1), ("backward", 0), ("recv", 1))
    for point, dies in points:
        for error in await failures(ranks.all(Rank.train_and_die, point, dies)):
            assert isinstance(error, aiodaft.ActorDied)
            assert re.search(rf"Rank-\d+\[{dies}\] .*SIGKILL", told(error))
        await all_know_restarts(ranks)
    # At its end all others have left the block.
    done = await failures(ranks.all(Rank.train_and_die, "destroy", 1))
    assert (done[0], type(done[1]), done[2]) == (None, aiodaft.ActorDied, None)
    await all_know_restarts(ranks)
    # The next block has the new incarnation.
    assert await ranks.all(Rank.sum_ranks) == [3.0] * 3


async def test_after_a_death_members_leave_a_block_that_they_have_kept_one_by_one(module_rt: aiodaft.Runtime) -> None:
    ranks = await module_rt.on(restart="temporary").group(3, Rank)
    await ranks.all(Rank.keep)
    for _ in range(2):
        assert await ranks.all(Rank.sum_in_kept) == [3.0] * 3
    await module_rt.kill(ranks[1])
    for survivor in (ranks[0], ranks[2]):
        with pytest.raises(RuntimeError):
            await survivor.sum_in_kept()
        assert not await survivor.leave_kept()
    await ranks.heal()
    await ranks.all(Rank.keep)
    assert await ranks.all(Rank.sum_in_kept) == [1.0] * 2
    assert await ranks.all(Rank.leave_kept) == [False] * 2


async def test_a_death_before_the_block_begins_is_named(module_rt: aiodaft.Runtime) -> None:
    for dies in (0, 1):
        ranks = await module_rt.on(restart="temporary").group(3, Rank)
        for error in await failures(ranks.all(Rank.train_and_die, "come", dies)):
            assert isinstance(error, aiodaft.ActorDied)
            assert error.signal == "SIGKILL"


async def test_what_waits_in_torch_for_no_connection_is_ended_and_says_why(module_rt: aiodaft.Runtime) -> None:
    ranks = await module_rt.on(restart="temporary").group(2, Rank)
    calls = ranks.all(Rank.wait_for_nobody)
    await ranks.all(Rank.wait_inside)
    pid = (await module_rt.info(ranks[0])).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    killed, ended = await failures(calls)
    assert isinstance(killed, aiodaft.ActorDied)
    assert isinstance(ended, aiodaft.ActorDied)
    assert (killed.signal, ended.exit_code) == ("SIGKILL", 1)
    assert re.search(
        r"torch does not return after a member was lost: Rank-\d+\[0\] .* was killed by SIGKILL", told(ended)
    )


async def test_the_error_of_one_reaches_the_others_and_who_does_not_come_is_named(module_rt: aiodaft.Runtime) -> None:
    ranks = await module_rt.on(restart="permanent").group(4, Rank)
    errors = await failures(ranks.all(Rank.fail, 1))
    assert isinstance(errors[1], ValueError)
    for rank in (0, 2, 3):
        # A member that has not yet come to the block hears of it from the caller.
        assert re.search(r"\[1\](, rank 1 of .* left by an error| failed): ValueError: a bad batch", told(errors[rank]))
    for come, missing in (((0, 1), "2, 3 of 4"), ((1, 2), "rank 0, ")):
        for error in await failures(aiodaft.Refs(ranks[rank].come(0.3) for rank in come)):
            assert isinstance(error, TimeoutError)
            assert missing in str(error)
    errors = await failures(ranks.each(Rank.sum_unless, [False, False, True, False]))
    assert isinstance(errors[2], ValueError)
    for rank in (0, 1, 3):
        assert isinstance(errors[rank], aiodaft.CallCancelled)
        assert re.search(r"sum_unless of Rank-\d+\[2\] failed: ValueError: a bad batch", str(errors[rank]))
    # Nothing of it is left.
    assert await ranks.all(Rank.gatherings) == [0] * 4
    assert await ranks.all(Rank.sum_ranks) == [6.0] * 4
    assert await ranks.all(Rank.gatherings) == [0] * 4


async def test_members_meet_in_no_block_of_another_call_of_the_group(module_rt: aiodaft.Runtime) -> None:
    ranks = await module_rt.group(2, Rank)
    # One comes in the first call, and the other one in the second.
    calls = ranks.each(Rank.come, [0.3, None]), ranks.each(Rank.come, [None, 0.3])
    for rank, call in enumerate(calls):
        error = (await failures(call))[rank]
        assert isinstance(error, TimeoutError)
        assert f"rank {1 - rank} of 2 did not come" in str(error)
    assert await ranks.all(Rank.gatherings) == [0] * 2


async def test_a_member_that_fails_lets_go_of_the_others_before_it_is_out_of_the_block(
    module_rt: aiodaft.Runtime,
) -> None:
    ranks = await module_rt.group(3, Rank)
    for fails in range(3):
        errors = await failures(ranks.all(Rank.fail_while_the_loop_is_held, fails))
        assert isinstance(errors.pop(fails), ValueError)
        for error in errors:
            # A member that is about to begin hears of it from the caller.
            assert isinstance(error, RuntimeError | aiodaft.CallCancelled)
            assert re.search(
                rf"\[{fails}\](, rank {fails} of .* left by an error| failed): ValueError: a bad batch", str(error)
            )
    assert await ranks.all(Rank.sum_ranks) == [3.0] * 3


async def test_groups_that_share_processes_open_no_two_blocks_at_the_same_time(module_rt: aiodaft.Runtime) -> None:
    ranks = await module_rt.group(2, Rank)
    beside = await module_rt.on(with_=ranks).group(2, Rank)
    first = ranks[0].sum_ranks()
    while not await ranks[0].gatherings():
        await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="has a process group already"):
        await beside[0].sum_ranks()
    assert await ranks[1].sum_ranks() == await first == 1.0
    assert await beside.all(Rank.sum_ranks) == [1.0] * 2
    assert [after for _, after, _ in await ranks.all(Rank.variables)] == [{}] * 2


async def test_nobody_waits_for_a_block_of_a_group_that_has_changed(module_rt: aiodaft.Runtime) -> None:
    ranks = await module_rt.group(2, Rank)
    await ranks.all(Rank.come_in_first_group)
    await ranks.renew()
    for member in ranks:
        with pytest.raises(aiodaft.GroupChanged, match="this is of epoch 1, it has epoch 2 now") as raised:
            await member.come_in_first_group()
        assert raised.value.group == ranks.id
    assert await ranks.all(Rank.sum_ranks) == [1.0] * 2


async def test_the_store_is_opened_in_two_attempts_where_no_server_of_names_answers(module_rt: aiodaft.Runtime) -> None:
    ranks = await module_rt.group(3, Rank)
    assert await ranks.all(Rank.connect_slowly) == [1, 2, 2]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one address of the machine itself")
async def test_the_store_listens_on_the_network_of_the_group_only(module_rt: aiodaft.Runtime) -> None:
    ranks = await module_rt.group(2, Rank)
    for error in await failures(ranks.all(Rank.connect_over_another_network)):
        assert isinstance(error, ConnectionRefusedError | RuntimeError | aiodaft.CallCancelled)
        assert "Connection refused" in told(error)


async def test_wrong_uses_are_refused(module_rt: aiodaft.Runtime) -> None:
    (alone,) = await module_rt.group(1, Rank)
    with pytest.raises(RuntimeError, match="is for `def` methods"):
        await alone.come_on_the_loop()
    with pytest.raises(RuntimeError, match="has a process group already"):
        await alone.come_twice()
    with pytest.raises(ValueError, match="there is no interface 'nowhere0' here: there are .*lo"):
        await alone.come_over("nowhere0")
    assert await alone.sum_ranks() == 0.0
    with pytest.raises(RuntimeError, match="is no member of a group"):
        await (await module_rt.spawn(Rank)).sum_ranks()


async def test_a_block_without_descriptors_says_so_and_the_next_one_works(module_rt: aiodaft.Runtime) -> None:
    (alone,) = await module_rt.group(1, Rank)
    for left in (0, 1):
        with pytest.raises(aiodaft.ResourceExhausted, match=r"process_group\(\) of .* no file descriptors .*ulimit"):
            await alone.come_without_descriptors(left)
    assert await alone.sum_ranks() == 0.0


# Over the collectives and messages of aiodaft: `process_group("aiodaft")`.


async def opened(module_rt: aiodaft.Runtime, size: int) -> aiodaft.Group[TorchRank]:
    ranks = await module_rt.group(size, TorchRank)
    # There is no store of torch, and no port.
    assert await ranks.all(TorchRank.open) == [("aiodaft", size, set())] * size
    return ranks


async def test_what_torch_distributes_gives_the_values_of_one_process(
    module_rt: aiodaft.Runtime, tmp_path: Path
) -> None:
    ranks, expected = await opened(module_rt, 2), train(model(), *batch())
    for losses in (*await ranks.all(TorchRank.replicated), *await ranks.all(TorchRank.sharded)):
        assert losses == pytest.approx(expected, rel=1e-12)
    _, last = await ranks.all(TorchRank.in_stages)
    assert sum(last) / 4 == pytest.approx(expected[0])
    assert await ranks.all(TorchRank.saved_and_loaded, str(tmp_path)) == [True, True]
    assert await ranks.all(TorchRank.in_threads) == [[2.0, 4.0]] * 2
    for nbytes in (64, 1 << 17, 1 << 23):
        assert await ranks.all(TorchRank.reuse, nbytes) == [0, 0]
    assert await ranks.all(TorchRank.close) == [False, False]


SCRIPT = """
import os

import torch
import torch.distributed as dist
from torch.distributed import destroy_process_group


def main() -> list[float]:
    dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
    pair, value = dist.new_group([0, 1]), torch.tensor([float(os.environ["LOCAL_RANK"])])
    dist.all_reduce(value, group=pair)
    destroy_process_group(pair)
    dist.all_reduce(value)
    destroy_process_group()
    return [*value.tolist(), dist.get_world_size()]


found = main() if __name__ == "__main__" else None
"""


@pytest.mark.parametrize("backend", ["aiodaft", "gloo"])
async def test_a_script_that_begins_and_ends_its_process_group_runs_as_it_is(
    module_rt: aiodaft.Runtime, tmp_path: Path, backend: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ranks = await module_rt.group(2, TorchRank)
    await ranks.all(TorchRank.open, backend)
    for _ in range(2):
        assert await ranks.all(TorchRank.script, str(script)) == [[2.0, 2]] * 2
    assert await ranks.all(TorchRank.close) == [False, False]


async def test_operations_that_are_repeated_send_no_message_and_end_without_a_wait(module_rt: aiodaft.Runtime) -> None:
    ranks = await opened(module_rt, 2)
    for nbytes in (64, 1 << 22):
        assert await ranks.all(TorchRank.sent_meanwhile, nbytes) == [0, 0]
        assert await ranks.all(TorchRank.waited_for_by_nobody, nbytes) == [[2.0, 2.0, 2.0, 2.0], [2.0, 2.0, 2.0, 0.0]]
    assert await ranks.all(TorchRank.close) == [False, False]


async def test_all_operations_work_among_all_ranks_and_among_some(module_rt: aiodaft.Runtime) -> None:
    ranks = await opened(module_rt, 4)
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


async def test_wrong_uses_are_errors_that_say_what_to_do(module_rt: aiodaft.Runtime) -> None:
    ranks = await opened(module_rt, 2)
    for error in await failures(ranks.each(TorchRank.reduce_shape, [2, 3])):
        assert "rank 0 has all_reduce sum float32 [[2]]" in str(error)
        assert "rank 1 has all_reduce sum float32 [[3]]" in str(error)
    for error in await failures(ranks.all(TorchRank.use_meta)):
        assert isinstance(error, ValueError)
        assert "is for tensors of the CPU, not of meta: use process_group('nccl')" in str(error)
    for error in await failures(ranks.all(TorchRank.use_gloo_beside)):
        assert isinstance(error, RuntimeError)
        assert "has no store that processes share" in str(error)
    for error in await failures(ranks.all(TorchRank.open)):
        assert isinstance(error, RuntimeError)
        assert "has a process group already" in str(error)
    # It still works; in a new epoch of the group, it has to be opened again.
    await ranks.all(TorchRank.reduce_for_ever, 1)
    await ranks.renew()
    for error in await failures(ranks.all(TorchRank.reduce_for_ever, 1)):
        assert isinstance(error, aiodaft.GroupChanged)
    await failures(ranks.all(TorchRank.close))
    assert await ranks.all(TorchRank.sum_ranks) == [1.0, 1.0]


@pytest.mark.parametrize("operation", ["barrier", "all_gather", "all_reduce"])
async def test_a_member_that_leaves_while_others_wait_for_it_is_named(
    module_rt: aiodaft.Runtime, operation: str
) -> None:
    ranks = await module_rt.group(2, TorchRank)
    for error in await failures(ranks.all(TorchRank.stay_behind, operation)):
        assert isinstance(error, ValueError | RuntimeError)
        # In the order in which they came.
        assert "rank 0 has reduce" in str(error)
        assert f"rank 1 has {operation}" in str(error)


@pytest.mark.parametrize("operation", ["recv", "recv from any"])
async def test_a_wait_for_a_message_of_a_member_that_has_left_fails(module_rt: aiodaft.Runtime, operation: str) -> None:
    ranks = await module_rt.group(2, TorchRank)
    for error in await failures(ranks.all(TorchRank.stay_behind, operation)):
        assert isinstance(error, ValueError | RuntimeError)
        assert "[0] of TorchRank" in str(error)
        assert "has left the block: no message of it comes any more" in str(error)


async def test_messages_of_a_member_that_has_left_are_received(module_rt: aiodaft.Runtime) -> None:
    ranks = await module_rt.group(2, TorchRank)
    for nbytes in (64, 4 << 20):
        assert await ranks.all(TorchRank.send_and_leave, nbytes) == [[], [0.0, 0.0]]


async def test_the_end_of_a_member_ends_the_waiting_of_the_others_and_is_named(module_rt: aiodaft.Runtime) -> None:
    ranks = await module_rt.on(restart=aiodaft.Restart(intensity=99, backoff=AT_ONCE)).group(3, TorchRank)
    for how in ("dies", "fails", "sends nothing"):
        for ends in (0, 2):
            for rank, error in enumerate(await failures(ranks.all(TorchRank.train_and_end, ends, how))):
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
