"""Data-parallel training of a GPT: DDP, ZeRO-1 or ZeRO-3, next to the same training in one process.

    python examples/data_parallel.py --variant zero3 --ranks 4 --trace run.json

All calls of a step are made at once, and wait for their arguments only: the gradient of a layer goes from rank to rank
while the layers before it are still in `backward`.
"""

import argparse
from contextlib import nullcontext

import torch
from byte_gpt import Stage, batches
from dp_ranks import LAYERS, Batch, Replica, Shard, adam, loss_of
from torch import nn

import aiodaft

TOLERANCE = 1e-6
BACKWARD = range(LAYERS - 1, -1, -1)


async def replicas_step(ranks: aiodaft.Group[Replica], parts: list[Batch], tokens: int, variant: str) -> float:
    ranks.each(Replica.learn, parts, tokens)
    combine = aiodaft.all_reduce if variant == "ddp" else aiodaft.reduce_scatter
    # Before any `take`: the calls of a rank begin in the order in which they are made.
    gradients = [combine(ranks.all(Replica.gradient, layer)) for layer in BACKWARD]
    for layer, gradient in zip(BACKWARD, gradients, strict=True):
        ranks.each(Replica.take, gradient, layer)
    losses = ranks.all(Replica.step)
    if variant == "zero1":
        for layer in range(LAYERS):
            ranks.each(Replica.replace, aiodaft.all_gather(ranks.all(Replica.part, layer)), layer)
    return sum(await losses)


async def shards_step(ranks: aiodaft.Group[Shard], parts: list[Batch], tokens: int) -> float:
    ranks.each(Shard.start, parts, tokens)
    for layer in range(LAYERS - 1):  # awaited, so that a rank has one layer at a time
        await ranks.each(Shard.forward, aiodaft.all_gather(ranks.all(Shard.part, layer)), layer)
    for layer in BACKWARD:
        gradients = ranks.each(Shard.backward, aiodaft.all_gather(ranks.all(Shard.part, layer)), layer)
        await ranks.each(Shard.take, aiodaft.reduce_scatter(gradients), layer)
    return sum(await ranks.all(Shard.step))


async def train(
    ranks: aiodaft.Group[Replica] | aiodaft.Group[Shard], variant: str, size: int, steps: int
) -> list[float]:
    losses = []
    for x_BL, y_BL in batches(size, steps):
        parts = list(zip(x_BL.tensor_split(len(ranks)), y_BL.tensor_split(len(ranks)), strict=True))
        if variant == "zero3":
            losses.append(await shards_step(ranks, parts, y_BL.numel()))
        else:
            losses.append(await replicas_step(ranks, parts, y_BL.numel(), variant))
    return losses


def train_in_one(size: int, steps: int) -> list[float]:
    torch.set_num_threads(1)
    model = nn.Sequential(*(Stage(layer, LAYERS) for layer in range(LAYERS)))
    optimizer, losses = adam(list(model.parameters())), []
    for x_BL, y_BL in batches(size, steps):
        optimizer.zero_grad()
        loss = loss_of(model(x_BL), y_BL, y_BL.numel())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


async def make(rt: aiodaft.Runtime, variant: str, count: int) -> aiodaft.Group[Replica] | aiodaft.Group[Shard]:
    return await (rt.group(count, Shard) if variant == "zero3" else rt.group(count, Replica, variant))


def difference(losses: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True))


async def main(variant: str, count: int, size: int, steps: int, trace: str | None) -> None:
    async with aiodaft.Runtime() as rt:
        ranks = await make(rt, variant, count)
        async with rt.trace(trace) if trace else nullcontext():
            losses = await train(ranks, variant, size, steps)
        payload = rt.traffic().payload
        if variant == "zero3":
            note = f"a rank has at most {max(await ranks.all(Shard.peak_bytes))} bytes of parameters at a time"
        else:
            early = sum(await ranks.all(Replica.early_gradients)) / (count * LAYERS * steps)
            note = f"{early:.0%} of the gradients were combined before `backward` ended"
    worst = difference(losses, train_in_one(size, steps))
    assert worst <= TOLERANCE, worst
    print(f"{variant} on {count} ranks: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(f"  no loss differs by more than {worst:.1e} from that of one process")
    print(f"  {note}")
    print(f"  the controller: {payload} payload bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=["ddp", "zero1", "zero3"], default="ddp")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="sequences; ranks may have one more than others")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--trace", metavar="FILE", help="record the training for ui.perfetto.dev")
    options = parser.parse_args()
    aiodaft.run(main(options.variant, options.ranks, options.batch, options.steps, options.trace))
