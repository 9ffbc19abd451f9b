"""Training in a pipeline computes what one process computes, and holds what the schedule says (row TR2)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import byte_gpt
import pipeline_gpt
import pytest
import torch
from pipeline_training import CountingRank

import aiodaft
from aiodaft import pipeline

pytestmark = pytest.mark.asyncio(loop_scope="module")
STAGES, MICROBATCHES = 4, 8
Step = Callable[[Any], Any]


async def train(rt: aiodaft.Runtime, *schedules: pipeline.Schedule) -> None:
    """Train for one step with each schedule, interpreted and compiled, and compare with one process."""
    of = 1 + max(task.stage for tasks in schedules[0] for task in tasks)
    stages = [sorted({task.stage for task in tasks}) for tasks in schedules[0]]
    ranks: list[Any] = [rt.spawn(CountingRank, mine, of, MICROBATCHES, False) for mine in stages]
    ranks = await asyncio.gather(*ranks)
    batches = byte_gpt.batches(2 * MICROBATCHES)
    losses: list[float] = []
    for schedule in schedules:

        def step(batch: Any, schedule: pipeline.Schedule = schedule) -> list[aiodaft.Ref[float]]:
            return pipeline.drive(schedule, ranks, batch)

        steps: list[Step] = [step, aiodaft.compile(step)]
        for run in steps:
            losses.append(sum([await loss for loss in run(next(batches))]))
            held = [await rank.take_most_held() for rank in ranks]
            assert held == list(pipeline.simulate(schedule).held)
            assert [await rank.held_now() for rank in ranks] == [0] * STAGES
    whole = [byte_gpt.Stage(stage, of) for stage in range(of)]
    assert pipeline_gpt.train_in_one(whole, MICROBATCHES) == losses
    parameters = {stage: found for rank in ranks for stage, found in (await rank.parameters()).items()}
    for number, stage in enumerate(whole):
        assert all(torch.equal(a, b) for a, b in zip(stage.parameters(), parameters[number], strict=True))


@pytest.mark.timeout(60)
async def test_four_stages_and_eight_microbatches_equal_accumulation_and_hold_what_the_schedule_says(
    module_rt: aiodaft.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_gpt, "STEPS", 4)
    await train(module_rt, pipeline.gpipe(STAGES, MICROBATCHES), pipeline.one_f_one_b(STAGES, MICROBATCHES))


@pytest.mark.timeout(60)
async def test_two_stages_on_each_of_four_ranks_do_too(
    module_rt: aiodaft.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_gpt, "STEPS", 2)
    await train(module_rt, pipeline.interleaved(STAGES, MICROBATCHES))
