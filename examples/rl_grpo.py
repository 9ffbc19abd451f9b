"""Reinforcement learning: generators, data-parallel trainers, a reference, and rewards in sandboxes.

    python examples/rl_grpo.py --mode async --place split --algo grpo --plot run.png

A mode is two numbers: the batches under way, and the versions that a token may be old when it is learned from.
"""

import argparse
import asyncio
import math
import time
from types import SimpleNamespace

from rl_plot import Spans, draw
from rl_policy import SAMPLES, Rollouts, weights_of
from rl_sandbox import Faults, Sandbox
from rl_sync import WeightSync
from rl_trainer import Experience, Trainer, learned
from rl_workers import Generator, Reference, Worker

import aiodaft

MODES = {"sync": (1, 0), "onestep": (2, 1), "async": (2, 2)}
CHUNKS, TARGET = 8, 0.9  # chunks in a batch


class Learning:
    """The algorithm. It moves no data: chunks, gradients and weights go from worker to worker."""

    def __init__(self, sync: WeightSync, sandboxes: aiodaft.Group[Sandbox], reference: Reference) -> None:
        self.sync, self.trainers, self.generators = sync, sync.trainers, sync.generators
        self.sandboxes, self.reference = sandboxes, reference
        self.free = asyncio.Queue[Sandbox]()
        for sandbox in sandboxes:
            self.free.put_nowait(sandbox)
        self.version, self.curve, self.dropped = 0, list[float](), list[tuple[int, int]]()

    async def run(self, batches: int, staleness: int, steps: int) -> None:
        """Learn from batches of chunks, the oldest first, while others are generated."""
        under_way: dict[asyncio.Task[Experience], int] = {}  # in the order of their begin, with the version then
        begun = 0
        async with asyncio.TaskGroup() as tasks:
            while self.version < steps and self.reward <= TARGET:
                while len(under_way) < batches * CHUNKS:
                    under_way[tasks.create_task(self.experience(begun))] = self.version
                    begun += 1
                while not self.can_learn(under_way, staleness):
                    pending = [chunk for chunk in under_way if not chunk.done()]
                    await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                batch = [chunk for chunk in under_way if chunk.done()][:CHUNKS]
                for chunk in batch:
                    del under_way[chunk]
                await self.learn([chunk.result() for chunk in batch])

    def can_learn(self, under_way: dict[asyncio.Task[Experience], int], staleness: int) -> bool:
        # Chunks that would be too old for the next batch have to be in this one.
        too_old_next = [chunk for chunk, version in under_way.items() if version <= self.version - staleness]
        return sum(chunk.done() for chunk in under_way) >= CHUNKS and all(chunk.done() for chunk in too_old_next)

    async def experience(self, chunk: int) -> Experience:
        rollouts = await self.sync.rollouts(chunk)
        reference = self.reference.log_probabilities(rollouts)
        return aiodaft.typing.lazy(rollouts), await self.score(chunk, rollouts), aiodaft.typing.lazy(reference)

    async def score(self, chunk: int, rollouts: aiodaft.Ref[Rollouts]) -> list[float]:
        """The rewards. A sandbox that dies is asked again sample by sample, and a sample that kills it is dropped."""
        sandbox = await self.free.get()  # for this chunk alone
        try:
            return await sandbox.score(rollouts, range(SAMPLES))
        except aiodaft.ActorDied:
            rewards: list[float] = []
            for sample in range(SAMPLES):
                try:
                    rewards += await sandbox.score(rollouts, [sample])
                except aiodaft.ActorDied:
                    rewards.append(math.nan)
                    self.dropped.append((chunk, sample))
            return rewards
        finally:
            self.free.put_nowait(sandbox)

    async def learn(self, batch: list[Experience]) -> None:
        rewards = [reward for _, scores, _ in batch for reward in scores if not math.isnan(reward)]
        gradients = self.trainers.split(Trainer.gradient, batch, len(rewards))
        stepped = self.trainers.each(Trainer.step, aiodaft.reduce_scatter(gradients))
        self.version += 1
        loaded = await self.sync.to_all(self.version)
        # The rows of the trainers are the weights of each generator, bit for bit.
        assert loaded <= {sum(await stepped) % (1 << 256)}
        self.curve.append(sum(rewards) / len(rewards))

    @property
    def reward(self) -> float:
        return self.curve[-1] if self.curve else 0.0


def sum_of(spans: dict[str, Spans], workers: str) -> float:
    return sum(end - began for name, busy in spans.items() if name.startswith(workers) for began, end in busy)


async def set_up(rt: aiodaft.Runtime, options: SimpleNamespace, generator: type[Generator] = Generator) -> Learning:
    _, staleness = MODES[options.mode]
    faults: Faults = {(3, 5): "crash", (6, 7): "hang"} if options.faults else {}
    trainers = await rt.group(2, Trainer, options.model, options.algo, options.seed, options.lr, staleness)
    place = rt.on(with_=trainers) if options.place == "colocated" else rt
    count = len(trainers) if options.place == "colocated" else 3
    generators = await place.group(count, generator, options.model, options.seed, options.tail)
    sync = WeightSync(trainers, generators, weights_of(learned(options.model, options.algo, options.seed)))
    sandboxes = await rt.group(2, Sandbox, faults)
    return Learning(sync, sandboxes, await rt.spawn(Reference, options.model, options.seed))


async def main(options: SimpleNamespace) -> None:
    async with aiodaft.Runtime() as rt:
        learning = await set_up(rt, options)
        began = time.monotonic()
        await learning.run(*MODES[options.mode], options.steps)
        seconds, traffic = time.monotonic() - began, rt.traffic()
        ages = await learning.trainers.all(Trainer.ages_seen)
        workers: list[Worker] = [*learning.trainers, *learning.generators, *learning.sandboxes, learning.reference]
        spans = {(await rt.info(worker)).name: await worker.busy_spans() for worker in workers}
    steps, resumed = learning.version, sum(each.resumed for each in ages)
    print(f"{options.algo}, {options.mode}, {options.place}: mean reward {learning.reward:.3f} after {steps} steps")
    print(f"  tokens at most {max(each.oldest for each in ages)} versions old; {resumed} answers of two versions")
    print(f"  dropped samples: {learning.dropped or 'none'}")
    print(f"  the controller: {traffic.payload} payload bytes, {traffic.control // steps} bytes of messages a step")
    print(f"  weights: {learning.sync.bytes} bytes a step, each element once to each worker that lacks it")
    print(f"  {seconds:.1f} s, of which a trainer is busy for {sum_of(spans, 'Trainer') / 2 / seconds:.0%}")
    if options.plot:
        draw(options.plot, learning.curve, spans, began)


def options_of(arguments: list[str] | None = None) -> SimpleNamespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, default="sync")
    parser.add_argument("--place", choices=["colocated", "split"], default="split")
    parser.add_argument("--algo", choices=["grpo", "ppo"], default="grpo")
    parser.add_argument("--model", default="window", help="or a class of transformers, such as LlamaForCausalLM")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150, help="at most; it ends at a mean reward of 0.9")
    parser.add_argument("--tail", type=float, default=0.0, help="seconds by which one chunk in eight takes longer")
    parser.add_argument("--faults", action="store_true", help="a sample that crashes its sandbox, and one that hangs")
    parser.add_argument("--plot", metavar="FILE", help="draw the reward, and who was busy when")
    return parser.parse_args(arguments, SimpleNamespace())


if __name__ == "__main__":
    aiodaft.run(main(options_of()))
