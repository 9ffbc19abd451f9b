"""Train a GPT in a pipeline whose stages have replicas. Kills change nothing: others repeat the work of the dead one.

    python examples/swarm.py --replicas 2 --kills 3 --seed 0

A replica of a stage gets every n-th micro-batch. When it dies in the middle of a step, its micro-batches go to others
of that stage, which make its activations and gradients again. The next step begins with a new replica in its place.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import torch
from byte_gpt import Stage, batches
from dp_ranks import Batch
from killer import Killer
from pipeline_gpt import train_in_one
from swarm_replica import MICROBATCHES, STAGES, Gradients, Replica
from unkillable import PRELOAD, deaths

import aiodaft
from aiodaft.exceptions import OutcomeUnknown


class Swarm:
    def __init__(self, stages: list[aiodaft.Group[Replica]]) -> None:
        self.stages, self.replicas = stages, len(stages[0])
        # The values made of the batch, and the replica that made each; by method, stage and micro-batch.
        self.made: dict[tuple[str, int, int], tuple[Replica, aiodaft.Ref[Any]]] = {}

    def members(self) -> list[Replica]:
        return [replica for group in self.stages for replica in group]

    async def step(self, batch: Batch) -> float:
        while await deaths(losses := self.calls(batch)):
            await asyncio.gather(*(group.heal() for group in self.stages))  # leaves out the dead
            alive = self.members()
            self.made = {
                key: (replica, ref)
                for key, (replica, ref) in self.made.items()
                if replica in alive and not (ref.done() and ref.exception())
            }
        self.made.clear()
        await deaths([replica.update() for replica in self.members()])  # a death takes only one of the copies
        return await losses[0]

    def calls(self, batch: Batch) -> list[aiodaft.Ref[float]]:
        """Make the calls of a step whose results are not there."""
        gradients: list[list[Gradients]] = [[] for _ in self.stages]
        for microbatch, (x, targets) in enumerate(zip(*(half.chunk(MICROBATCHES) for half in batch), strict=True)):
            xs = [x]
            for stage in range(STAGES - 1):
                xs.append(self.call("forward", stage, microbatch, xs[-1]))
            after = self.call("learn", STAGES - 1, microbatch, xs[-1], targets)
            gradients[-1].append(after)
            for stage in reversed(range(STAGES - 1)):
                after = self.call("backward", stage, microbatch, xs[stage], after)
                gradients[stage].append(after)
        return [
            replica.collect(parts) for group, parts in zip(self.stages, gradients, strict=True) for replica in group
        ]

    def call(self, method: str, stage: int, microbatch: int, *args: Any) -> Any:
        if (key := (method, stage, microbatch)) not in self.made:
            group = self.stages[stage]
            replica = group[microbatch % len(group)]
            self.made[key] = replica, getattr(replica, method)(*args)
        return aiodaft.typing.lazy(self.made[key][1])

    async def refill(self) -> None:
        """Make new replicas in place of the dead, with the state of others of their stage."""

        async def refill(group: aiodaft.Group[Replica]) -> None:
            async def load(new: list[Replica]) -> None:
                if len(new) == self.replicas:
                    raise RuntimeError("all replicas of a stage have died, and its parameters with them")
                state = group.any(Replica.state)
                await asyncio.gather(*(replica.load(state) for replica in new))

            try:
                await group.heal(self.replicas, prepare=load)
            except OutcomeUnknown:  # one more has died meanwhile
                await refill(group)

        await asyncio.gather(*map(refill, self.stages))


async def train(rt: aiodaft.Runtime, replicas: int, steps: int, killer: Killer) -> tuple[list[float], list[Any]]:
    async with rt.scope() as scope:
        place = scope.on(restart="temporary")  # the death of a replica is no error of the program
        swarm = Swarm([await place.group(replicas, Replica, stage) for stage in range(STAGES)])
        losses = []
        async with killer:
            for step, batch in enumerate(batches(2 * MICROBATCHES, steps)):
                await swarm.refill()
                await killer.before_step(step, swarm.members())
                losses.append(await swarm.step(batch))
        return losses, [await group.any(Replica.state) for group in swarm.stages]


async def main(replicas: int, steps: int, kills: int, seed: int) -> None:
    async with aiodaft.Runtime(preload=PRELOAD) as rt:
        killer = Killer(rt, kills, steps, seed)
        losses, states = await train(rt, replicas, steps, killer)
    whole = [Stage(stage, STAGES) for stage in range(STAGES)]
    assert len(killer.seconds) == kills
    assert losses == train_in_one(whole, MICROBATCHES, steps=steps)
    for stage, (state, _) in zip(whole, states, strict=True):
        assert all(torch.equal(a, state[name]) for name, a in stage.state_dict().items())
    print(f"{STAGES} stages of {replicas} replicas, {steps} steps, {kills} kills: {losses[0]:.4f} -> {losses[-1]:.4f}")
    print("losses and parameters are those of one process, bit for bit")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    aiodaft.run(main(options.replicas, options.steps, options.kills, options.seed))
