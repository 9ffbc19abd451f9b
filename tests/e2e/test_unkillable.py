"""Training that survives kills (rows FT1, FT3): the points at which a process may end, the parity, and the examples."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import reduce
from itertools import chain, repeat
from typing import Any

import pytest
import torch
import unkillable
from byte_gpt import Stage, batches
from mortal import LateRank, MortalRank, MortalReplica, StillbornRank, add, xor
from pipeline_gpt import train_in_one
from run_example import run_example
from swarm import MICROBATCHES, STAGES, Swarm
from swarm_replica import Replica
from unkillable import Training
from unkillable_ranks import Rank, rows_of, state_of

import aiodaft

pytestmark = pytest.mark.programs

PRELOAD = unkillable.PRELOAD
in_module_loop = pytest.mark.asyncio(loop_scope="module")

RANKS = 3


@pytest.fixture
def rt(module_rt: aiodaft.Runtime) -> aiodaft.Runtime:
    return module_rt


@pytest.mark.parametrize("sizes", [(5, 5), (7, 6), (7, 7, 6), (9, 9, 8, 8), (3, 3, 2, 2, 2), (1, 1, 1, 0)])
def test_what_any_rank_had_follows_from_the_others_bit_for_bit(sizes: Sequence[int]) -> None:
    ranks, width = len(sizes), -(-max(sizes) // (len(sizes) - 1))
    states = [torch.randn(size) for size in sizes]
    states[0][0] = -0.0
    rows = [rows_of(state, rank, ranks, width) for rank, state in enumerate(states)]
    parity = reduce(torch.bitwise_xor, rows)
    for dead, state in enumerate(states):
        known = [rows[rank].index_copy(0, torch.tensor([rank]), parity[rank][None]) for rank in range(ranks)]
        del known[dead]
        lost = reduce(torch.bitwise_xor, known)
        assert torch.equal(state_of(lost, dead, len(state)).view(torch.int32), state.view(torch.int32))
        assert torch.equal(lost[dead], parity[dead])


def start(scope: aiodaft.Scope, steps: int, kind: type[Rank] = MortalRank) -> Training:
    place = scope.on(restart="temporary")
    # One of the ranks and one of the spares die while they start.
    kinds: Iterator[type[Rank]] = chain([StillbornRank], repeat(kind, RANKS), [StillbornRank], repeat(MortalRank))
    return Training(RANKS, lambda: place.spawn(next(kinds)), list(batches(RANKS, steps)))


async def calm(step: int, alive: Sequence[Any]) -> None:
    """Nobody dies."""


# Ranks, or -1 for the spare, that end in every second step: a death in a checkpoint is met in the step after.
PLAN: list[list[tuple[int, str]]] = [
    [(0, "part")],
    [(1, "gradient")],
    [(2, "sum of gradients")],
    [(-1, "at once")],
    [(0, "before update")],
    [(1, "after update")],
    [(-1, "take over"), (2, "gradient")],
    [(0, "copy")],
    [(1, "parity")],
    [(2, "keep")],
]


@in_module_loop
@pytest.mark.timeout(120)
async def test_a_process_may_end_at_any_point_and_nothing_changes(
    rt: aiodaft.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {2 * index: dooms for index, dooms in enumerate(PLAN)}
    steps = 2 * len(plan)
    async with rt.scope() as scope:
        undisturbed = start(scope, steps)
        expected = await undisturbed.run(calm)
    scatter = aiodaft.reduce_scatter
    monkeypatch.setattr(aiodaft, "reduce_scatter", lambda refs, op=None: scatter(refs, xor if op else add))
    async with rt.scope() as scope:
        training = start(scope, steps)
        members: set[Rank] = set()

        async def doom(step: int, alive: Sequence[Any]) -> None:
            members.update(() if members else training.ranks)
            for place, point in plan.pop(step, []):
                while not training.spare:
                    await asyncio.sleep(0)
                with suppress(aiodaft.ActorDied):
                    await [*training.ranks, *training.spare][place].doom(point)

        before = rt.traffic()
        parameters = await training.run(doom)
        moved = rt.traffic().payload_received - before.payload_received
    assert not plan
    assert torch.equal(parameters, expected)
    assert training.losses == undisturbed.losses
    assert moved <= parameters.nbytes  # nothing but the parameters at the end
    assert len(members) == RANKS
    assert not members & set(training.ranks)


@in_module_loop
@pytest.mark.timeout(120)
async def test_the_next_step_does_not_wait_for_a_checkpoint(
    rt: aiodaft.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    scatter = aiodaft.reduce_scatter
    async with rt.scope() as scope:
        training = start(scope, 3, LateRank)

        def late(refs: Any, op: Any = None) -> Any:
            return [rank.parity(rows) for rank, rows in zip(training.ranks, refs, strict=True)] if op else scatter(refs)

        monkeypatch.setattr(aiodaft, "reduce_scatter", late)
        await training.run(calm)
        assert training.saved == 2


@in_module_loop
@pytest.mark.timeout(120)
async def test_two_deaths_at_a_time_are_an_error_and_no_wrong_number(rt: aiodaft.Runtime) -> None:
    async with rt.scope() as scope:
        training = start(scope, 3)

        async def doom(step: int, alive: Sequence[Any]) -> None:
            if step == 1:
                await asyncio.gather(*(rank.doom("gradient") for rank in training.ranks[1:]))

        with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match=r"ranks \[1, 2\] died before one")):
            await training.run(doom)


@in_module_loop
@pytest.mark.timeout(120)
async def test_ranks_that_die_whenever_they_start_are_an_error(rt: aiodaft.Runtime) -> None:
    async with rt.scope() as scope:
        place = scope.on(restart="temporary")
        training = Training(2, lambda: place.spawn(StillbornRank), list(batches(2, 1)))
        with pytest.raises(aiodaft.ActorDied, match="SIGKILL"):
            await training.run(calm)


@in_module_loop
@pytest.mark.timeout(120)
async def test_another_replica_of_its_stage_does_what_the_dead_one_had(rt: aiodaft.Runtime) -> None:
    plan = [(1, "forward"), (2, "gradients"), (5, "collect"), (0, "update")]
    async with rt.scope() as scope:
        place = scope.on(restart="temporary")
        swarm = Swarm([await place.group(2, MortalReplica, stage) for stage in range(STAGES)])
        losses = []
        for (victim, point), batch in zip(plan, batches(2 * MICROBATCHES, len(plan)), strict=True):
            await swarm.refill()
            replicas = swarm.members()
            assert len(replicas) == 2 * STAGES
            await replicas[victim].doom(point)
            losses.append(await swarm.step(batch))
        await swarm.refill()
        states = [await group.all(Replica.state) for group in swarm.stages]
        for replica in swarm.stages[0]:
            with suppress(aiodaft.ActorDied):
                await replica.doom("at once")
        with pytest.raises(RuntimeError, match="all replicas of a stage have died"):
            await swarm.refill()
    whole = [Stage(stage, STAGES) for stage in range(STAGES)]
    assert losses == train_in_one(whole, MICROBATCHES, steps=len(plan))
    for stage, copies in zip(whole, states, strict=True):
        for weights, _ in copies:
            assert all(torch.equal(value, weights[name]) for name, value in stage.state_dict().items())


def run_with_kills(example: str, *options: str) -> list[float]:
    """Run a whole example; returns for how many seconds each kill has held it up."""
    output = run_example(f"{example}.py", *options)
    assert "bit for bit" in output
    return [float(seconds) for seconds in re.findall(r"goes on ([\d.]+) s after the kill", output)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("example", ["unkillable", "swarm"])
def test_a_random_kill_changes_nothing(example: str) -> None:
    assert len(run_with_kills(example, "--steps", "8", "--kills", "1")) == 1


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("example", ["unkillable", "swarm"])
def test_random_kills_change_nothing_and_training_goes_on_within_two_seconds(example: str, seed: int) -> None:
    assert max(run_with_kills(example, "--seed", str(seed))) < 2.0
