"""Programs of torch.distributed in the methods of a group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from spmd_actors import Rank, batch, model, train

import aiodaft

# torch.distributed takes seconds to import.
pytestmark = pytest.mark.timeout(90)


@pytest.fixture
async def rt() -> AsyncIterator[aiodaft.Runtime]:
    """Imports torch.distributed once, not in each member."""
    async with aiodaft.Runtime(preload=("torch.distributed", "torch.distributed.fsdp", "spmd_actors")) as rt:
        yield rt


def told(error: BaseException | None) -> str:
    """What an error says of the member that is lost.

    gloo rarely misses the end of its connections; then the process is ended, and its last lines say why.
    """
    if isinstance(error, aiodaft.ActorDied) and error.exit_code == 1:
        return " ".join(error.last_lines)
    return f"{error!r} {getattr(error, '__notes__', [])}"


async def failures(refs: aiodaft.Refs[None]) -> list[BaseException | None]:
    results = await asyncio.gather(*refs, return_exceptions=True)
    return [result if isinstance(result, BaseException) else None for result in results]


async def test_programs_for_torchrun_work_in_methods(rt: aiodaft.Runtime) -> None:
    ranks = await rt.group(4, Rank)
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
    expected = train(model(), *batch())
    for losses in (*await ranks.all(Rank.train_ddp), *await ranks.all(Rank.train_fsdp)):
        assert losses == pytest.approx(expected, rel=1e-12)


async def test_a_death_ends_the_waiting_of_all_others_and_is_named(rt: aiodaft.Runtime) -> None:
    ranks = await rt.on(restart=aiodaft.Restart("permanent", intensity=9, period=60)).group(3, Rank)
    for dies in (1, 0):
        for error in await failures(ranks.all(Rank.wait_for_each_other, dies)):
            assert isinstance(error, aiodaft.ActorDied)
            assert f"Rank-1[{dies}] " in told(error)
            assert "SIGKILL" in told(error)
        # The next block has the new incarnation.
        assert await ranks.all(Rank.sum_ranks) == [3.0] * 3


@pytest.mark.parametrize("dies", [0, 1])
async def test_a_death_before_the_block_begins_is_named(rt: aiodaft.Runtime, dies: int) -> None:
    ranks = await rt.group(3, Rank)
    for error in await failures(ranks.all(Rank.die_first, dies)):
        assert isinstance(error, aiodaft.ActorDied)
        assert error.signal == "SIGKILL"


async def test_the_error_of_one_reaches_the_others_and_who_does_not_come_is_named(rt: aiodaft.Runtime) -> None:
    ranks = await rt.on(restart="permanent").group(4, Rank)
    errors = await failures(ranks.all(Rank.fail, 1))
    assert isinstance(errors[1], ValueError)
    for rank in (0, 2, 3):
        assert "Rank-1[1], rank 1 of" in told(errors[rank])
        assert "left by an error: ValueError: a bad batch" in told(errors[rank])
    for come, missing in (((0, 1), "2, 3 of 4"), ((1, 2), "rank 0, ")):
        for error in await failures(aiodaft.Refs(ranks[rank].come(0.3) for rank in come)):
            assert isinstance(error, TimeoutError)
            assert missing in str(error)
    # Nothing of it is left.
    assert await ranks.all(Rank.sum_ranks) == [6.0] * 4


async def test_wrong_uses_are_refused(rt: aiodaft.Runtime) -> None:
    (alone,) = await rt.group(1, Rank)
    with pytest.raises(RuntimeError, match="is for `def` methods"):
        await alone.come_on_the_loop()
    with pytest.raises(RuntimeError, match="has a process group already"):
        await alone.come_twice()
    with pytest.raises(ValueError, match="there is no interface 'nowhere0' here: there are .*lo"):
        await alone.come_over("nowhere0")
    assert await alone.sum_ranks() == 0.0
    with pytest.raises(RuntimeError, match="is no member of a group"):
        await (await rt.spawn(Rank)).sum_ranks()
