"""Train a GPT in a pipeline: the schedule is data, and the result is bit for bit that of one process.

    python examples/pipeline_gpt.py --schedule zbv --ranks 2 --microbatches 4

Every rank is an actor that has one stage of the model, or several. `pipeline.drive` makes the calls that a schedule
lists; activations and gradients go from rank to rank.
"""

import argparse

import torch
from byte_gpt import Stage, batches
from torch import Tensor, nn

import aiodaft
from aiodaft import pipeline

NAMES = "gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_h2", "zbv"


def loss_of(logits_BLV: Tensor, y_BL: Tensor, microbatches: int) -> Tensor:
    return nn.functional.cross_entropy(logits_BLV.flatten(0, 1), y_BL.flatten()) / microbatches


def adam(stages: list[Stage]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(nn.ModuleList(stages).parameters(), lr=3e-3)


class Rank(aiodaft.Actor):
    def __init__(self, stages: list[int], of: int, microbatches: int, split: bool) -> None:
        torch.set_num_threads(1)  # one thread adds in the same order everywhere
        self.stages = {stage: Stage(stage, of) for stage in stages}
        self.optimizer = adam(list(self.stages.values()))
        self.microbatches, self.split = microbatches, split

    @aiodaft.method
    def start(self, batch: tuple[Tensor, Tensor] | None) -> None:
        self.xs, self.ys = ((), ()) if batch is None else (part.chunk(self.microbatches) for part in batch)
        self.saved: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor | None]] = {}
        self.loss = 0.0
        self.optimizer.zero_grad()

    @aiodaft.method
    def forward(self, stage: int, microbatch: int, x: Tensor | None) -> Tensor | None:
        x = self.xs[microbatch] if x is None else x.requires_grad_()
        y = self.stages[stage](x)
        if self.stages[stage].last:
            y = loss_of(y, self.ys[microbatch], self.microbatches)
            self.loss += y.item()
        self.saved[stage, microbatch] = x, y, None
        return None if self.stages[stage].last else y.detach()

    @aiodaft.method
    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        x, y, _ = self.saved.pop((stage, microbatch))
        if not self.split:
            y.backward(gradient)
            return x.grad
        self.saved[stage, microbatch] = x, y, gradient
        return None if self.stages[stage].first else torch.autograd.grad(y, x, gradient, retain_graph=True)[0]

    @aiodaft.method
    def weights(self, stage: int, microbatch: int) -> None:
        # Goes through the stage's activations once more; kernels that save them in `backward` need not.
        _, y, gradient = self.saved.pop((stage, microbatch))
        y.backward(gradient, inputs=list(self.stages[stage].parameters()))

    @aiodaft.method
    def finish(self, done: list[None]) -> float:
        self.optimizer.step()
        return self.loss

    @aiodaft.method
    def parameters(self) -> dict[int, list[Tensor]]:
        return {number: [p.detach() for p in stage.parameters()] for number, stage in self.stages.items()}


def train_in_one(stages: list[Stage], microbatches: int) -> list[float]:
    """Gradient accumulation, micro-batch after micro-batch."""
    torch.set_num_threads(1)
    optimizer, losses = adam(stages), []
    for x_BL, y_BL in batches(2 * microbatches):
        optimizer.zero_grad()
        losses.append(0.0)
        for x, y in zip(x_BL.chunk(microbatches), y_BL.chunk(microbatches), strict=True):
            loss = loss_of(nn.Sequential(*stages)(x), y, microbatches)
            losses[-1] += loss.item()
            loss.backward()
        optimizer.step()
    return losses


async def main(name: str, ranks: int, microbatches: int, compiled: bool) -> None:
    schedule = getattr(pipeline, name)(ranks, microbatches)
    timeline = pipeline.simulate(schedule)
    of = 1 + max(task.stage for tasks in schedule for task in tasks)
    split = any(task.kind is pipeline.Kind.W for task in schedule[0])
    async with aiodaft.Runtime() as rt:
        stages = [sorted({task.stage for task in tasks}) for tasks in schedule]
        actors = [await rt.spawn(Rank, mine, of, microbatches, split) for mine in stages]

        def step(batch: object) -> list[aiodaft.Ref[float]]:
            return pipeline.drive(schedule, actors, batch)

        run = aiodaft.compile(step) if compiled else step
        losses = [sum([await loss for loss in run(batch)]) for batch in batches(2 * microbatches)]
        parameters = {stage: p for actor in actors for stage, p in (await actor.parameters()).items()}
    whole = [Stage(stage, of) for stage in range(of)]
    assert losses == train_in_one(whole, microbatches)
    assert all(
        torch.equal(a, b)
        for s, stage in enumerate(whole)
        for a, b in zip(stage.parameters(), parameters[s], strict=True)
    )
    print(f"{name} on {ranks} ranks, {microbatches} micro-batches{', compiled' if compiled else ''}:")
    print(f"  idle at most {max(timeline.idle):g} of {timeline.makespan:g}, activations held {timeline.held}")
    print(f"  loss {losses[0]:.4f} -> {losses[-1]:.4f}; losses and parameters equal those of one process, bit for bit")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", choices=NAMES, default="zbv")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    aiodaft.run(main(options.schedule, options.ranks, options.microbatches, options.compiled))
