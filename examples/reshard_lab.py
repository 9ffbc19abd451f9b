"""One state, four placements: trained by tensor parallelism over 4 workers, sampled in 2 stages of 2 while it trains,
saved, and trained on by 3 workers that have a third of each tensor.

    python examples/reshard_lab.py

`load(plan, state=step)` moves each part once, from the worker that has it to the one that needs it; the controller sees
no weights. The losses and the tokens are those of one process.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from train_gpt import DATA, MEGATRON, batches, parts, train

import aiodaft
from aiodaft import tensor
from aiodaft.tensor import Strategy


def next_token(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)[:, -1].argmax(-1)


async def generate(step: tensor.Step, x: Tensor, count: int) -> Tensor:
    for _ in range(count):
        x = torch.cat([x[:, 1:], (await step(x)).unsqueeze(1)], 1)
    return x[:, -count:]


async def main(steps: int, tokens: int) -> None:
    data = batches(2 * steps)
    x, y = data[0]
    model, optimizer, _ = parts()
    training = tensor.capture(train, model, optimizer, x, y)
    sampling = tensor.capture(next_token, model, x)
    parallel = training.plan(Strategy(params=MEGATRON), {"tp": 4})
    stages = sampling.plan(Strategy(params=MEGATRON, stages=("blocks.0",)), {"pp": 2, "tp": 2})
    sharded = training.plan(Strategy(params=DATA, inputs=DATA, use={"*": {}}), {"dp": 3})
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        async with (
            aiodaft.Runtime() as rt,
            tensor.workers(rt, parallel.axes) as trainers,
            tensor.workers(rt, stages.axes) as generators,
        ):
            step = await trainers.load(parallel, model.state_dict())
            for x, y in data[:steps]:
                losses.append((await step(x, y)).item())
            sampler = await generators.load(stages, state=step)
            made = await generate(sampler, data[0][0], tokens)
            torch.save(await step.state(), path)
            print(f"{parallel.size} trainers: loss {losses[-1]:.4f}; {stages.size} generators: {made[0].tolist()}")
        async with aiodaft.Runtime() as rt, tensor.workers(rt, sharded.axes) as workers:
            step = await workers.load(sharded, torch.load(path))
            for x, y in data[steps:]:
                losses.append((await step(x, y)).item())
            print(f"{sharded.size} workers went on from the checkpoint: loss {losses[-1]:.4f}")

    alone, expected = [], torch.empty(0)
    for at, (x, y) in enumerate(data):
        alone.append(train(model, optimizer, x, y).item())
        if at == steps - 1:
            window = data[0][0]
            with torch.no_grad():
                for _ in range(tokens):
                    window = torch.cat([window[:, 1:], next_token(model, window).unsqueeze(1)], 1)
            expected = window[:, -tokens:]
    worst = max(abs(one - other) for one, other in zip(losses, alone, strict=True))
    print(f"one process: the losses differ by at most {worst:.1e}, the tokens are equal: {torch.equal(made, expected)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=6, help="before the checkpoint, and as many after it")
    parser.add_argument("--tokens", type=int, default=8)
    options = parser.parse_args()
    aiodaft.run(main(options.steps, options.tokens))
