"""Training in a pipeline computes the values of one process, and holds as much as the schedule says (row TR2)."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import byte_gpt
import pipeline_gpt
import pytest
import torch
from pipeline_training import CountingRank

import aiodaft
from aiodaft import pipeline

pytestmark = [pytest.mark.programs, pytest.mark.asyncio(loop_scope="module")]
STAGES, MICROBATCHES = 4, 8
Step = Callable[[Any], Any]


async def train(
    rt: aiodaft.Runtime, *schedules: pipeline.Schedule, skips: Collection[tuple[int, int]] = (), dp: int = 1
) -> None:
    """Train for one step with each schedule, interpreted and compiled, and compare with one process."""
    of = 1 + max(task.stage for tasks in schedules[0] for task in tasks)
    stages = [sorted({task.stage for task in tasks}) for tasks in schedules[0]]
    ranks: list[Any] = [rt.group(dp, CountingRank, mine, of, MICROBATCHES, False) for mine in stages]
    ranks = await asyncio.gather(*ranks)
    actors = [replica for rank in ranks for replica in rank]
    batches = byte_gpt.batches(2 * MICROBATCHES * dp)
    await fail_in_the_last_replica(schedules[0], ranks)
    for actor in actors:
        await actor.take_most_held()
    losses: list[float] = []
    for schedule in schedules:
        step: Step = functools.partial(pipeline_gpt.step, schedule, ranks)
        for run in (step, aiodaft.compile(step)):
            losses.append(sum([await loss for loss in run(next(batches))]))
            held = [await actor.take_most_held() for actor in actors]
            assert held == [most for most in pipeline.simulate(schedule).held for _ in range(dp)]
            assert [await actor.held_now() for actor in actors] == [0] * len(actors)
    whole = [byte_gpt.Stage(stage, of) for stage in range(of)]
    assert pipeline_gpt.train_in_one(whole, MICROBATCHES, dp, skips) == losses
    for actor in actors:
        for number, found in (await actor.parameters()).items():
            assert all(torch.equal(a, b) for a, b in zip(whole[number].parameters(), found, strict=True))


async def fail_in_the_last_replica(schedule: pipeline.Schedule, ranks: list[Any]) -> None:
    """The last sequence has no byte: then no replica of any rank changes its parameters."""
    x, y = next(byte_gpt.batches(2 * MICROBATCHES * len(ranks[0])))
    x[-1] = 256
    outcomes = await asyncio.gather(*pipeline_gpt.step(schedule, ranks, (x, y)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [IndexError] * len(ranks) * len(ranks[0])


@pytest.mark.timeout(120)
async def test_four_stages_and_eight_microbatches_equal_accumulation_and_hold_what_the_schedule_says(
    module_rt: aiodaft.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_gpt, "STEPS", 4)
    await train(module_rt, pipeline.gpipe(STAGES, MICROBATCHES), pipeline.one_f_one_b(STAGES, MICROBATCHES))


MINE = """
from aiodaft.pipeline import Kind, Task

def schedule(ranks, microbatches):
    return [[Task(rank, mb, kind) for kind in (Kind.F, Kind.B) for mb in range(microbatches)] for rank in range(ranks)]
"""


async def test_a_schedule_of_ones_own_is_a_file(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    assert pipeline_gpt.schedule_of(str(mine), 3, 4, skips=()) == pipeline.gpipe(3, 4)
    with pytest.raises(FileNotFoundError, match="zbx"):
        pipeline_gpt.schedule_of("zbx", 3, 4, skips=())


@pytest.mark.timeout(120)
async def test_two_replicas_of_ranks_whose_stages_micro_batches_skip_do_too(
    module_rt: aiodaft.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row TR3: next to one process in which the same micro-batches skip the same stages."""
    monkeypatch.setattr(byte_gpt, "STEPS", 2)
    skips = {(1, 0), (2, 0), (2, 5), (1, 7)}
    schedule = pipeline_gpt.schedule_of("interleaved", 2, MICROBATCHES, skips)
    assert sum(map(len, schedule)) == 2 * (4 * MICROBATCHES - len(skips))
    await train(module_rt, schedule, skips=skips, dp=2)
