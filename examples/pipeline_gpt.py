"""Train a GPT in a pipeline: the schedule is data, and the result is bit for bit that of one process.

    python examples/pipeline_gpt.py --schedule zbv --ranks 2 --microbatches 4 --dp 2 --skip 1:0 2:3

A rank has one stage of the model, or several, and is a group of replicas. The first replicas of all ranks are one
pipeline, the second ones another: `pipeline.drive` makes the calls that the schedule lists, activations and gradients
go from rank to rank. Then each rank adds up the gradients of its replicas, in their order: (g0 + g1) + g2.
"""

import argparse
import asyncio
import functools
import runpy
from collections.abc import Collection
from pathlib import Path

import torch
from byte_gpt import Stage, batches
from pp_ranks import Rank, adam, add, gradients, loss_of, update
from torch import nn

import aiodaft
from aiodaft import pipeline

NAMES = "gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_h2", "zbv"
OWN = "a file with a function `schedule(ranks, microbatches)`"


def schedule_of(name: str, ranks: int, microbatches: int, skips: Collection[tuple[int, int]]) -> pipeline.Schedule:
    make = getattr(pipeline, name) if name in NAMES else runpy.run_path(name)["schedule"]
    return [
        [task for task in tasks if (task.stage, task.microbatch) not in skips] for tasks in make(ranks, microbatches)
    ]


def step(schedule: pipeline.Schedule, ranks: list[aiodaft.Group[Rank]], batch: object) -> list[aiodaft.Ref[float]]:
    pipelines = [pipeline.drive(schedule, replicas, batch) for replicas in zip(*ranks, strict=True)]
    totals = [aiodaft.all_reduce(refs, add) for refs in zip(*pipelines, strict=True)]
    return [loss for rank, total in zip(ranks, totals, strict=True) for loss in rank.each(Rank.learn, total)]


def train_in_one(
    stages: list[Stage],
    microbatches: int,
    dp: int = 1,
    skips: Collection[tuple[int, int]] = (),
    steps: int | None = None,
) -> list[float]:
    """Gradient accumulation, micro-batch after micro-batch, for each part of the batch; then the sum over the parts."""
    torch.set_num_threads(1)
    model, losses = nn.ModuleList(stages), []
    optimizer = adam(model)
    for batch in batches(2 * microbatches * dp, steps):
        of_parts = []
        losses.append(0.0)
        for x_BL, y_BL in zip(*(both.chunk(dp) for both in batch), strict=True):
            optimizer.zero_grad()
            for mb, (x, y) in enumerate(zip(x_BL.chunk(microbatches), y_BL.chunk(microbatches), strict=True)):
                path = [stage for number, stage in enumerate(stages) if (number, mb) not in skips]
                loss = loss_of(nn.Sequential(*path)(x), y, microbatches * dp)
                losses[-1] += loss.item()
                loss.backward()
            of_parts.append(gradients(model))
        update(optimizer, model, functools.reduce(add, of_parts))
    return losses


async def main(
    name: str,
    ranks: int,
    microbatches: int,
    dp: int,
    skips: list[tuple[int, int]],
    compiled: bool,
    picture: Path | None,
) -> None:
    schedule = schedule_of(name, ranks, microbatches, skips)
    timeline = pipeline.simulate(schedule)
    of = 1 + max(task.stage for tasks in schedule for task in tasks)
    split = any(task.kind is pipeline.Kind.W for task in schedule[0])
    async with aiodaft.Runtime() as rt:
        stages = [sorted({task.stage for task in tasks}) for tasks in schedule]
        groups = [await rt.group(dp, Rank, mine, of, microbatches, split) for mine in stages]
        eager = functools.partial(step, schedule, groups)
        run = aiodaft.compile(eager, timed=True) if compiled else eager
        losses = [sum([await loss for loss in run(batch)]) for batch in batches(2 * microbatches * dp)]
        if isinstance(run, aiodaft.Graph) and picture:
            await run.times()
            await asyncio.to_thread(picture.write_text, run.draw())
        parameters = [await rank.parameters() for group in groups for rank in group]
    whole = [Stage(stage, of) for stage in range(of)]
    expected = train_in_one(whole, microbatches, dp, skips)
    assert losses == expected
    for stage, found in (item for rank in parameters for item in rank.items()):
        assert all(torch.equal(a, b) for a, b in zip(whole[stage].parameters(), found, strict=True))
    print(f"{name} on {ranks} ranks of {dp}, {microbatches} micro-batches{', compiled' if compiled else ''}:")
    print(f"  idle at most {max(timeline.idle):g} of {timeline.makespan:g}, activations held {timeline.held}")
    print(f"  loss {losses[0]:.4f} -> {losses[-1]:.4f}; losses and parameters equal those of one process, bit for bit")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="zbv", metavar="NAME", help=f"{', '.join(NAMES)}, or your own: {OWN}")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--dp", type=int, default=1, help="replicas of each rank")
    parser.add_argument(
        "--skip", nargs="*", default=[], metavar="STAGE:MICROBATCH", help="the micro-batches that skip a stage"
    )
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument(
        "--draw", type=Path, metavar="FILE", help="with --compiled: draw the graph and its last run, as Mermaid"
    )
    options = parser.parse_args()
    if options.draw and not options.compiled:
        parser.error("--draw needs --compiled")
    skips = [(int(stage), int(microbatch)) for stage, microbatch in (skip.split(":") for skip in options.skip)]
    shape = options.schedule, options.ranks, options.microbatches, options.dp
    aiodaft.run(main(*shape, skips, options.compiled, options.draw))
