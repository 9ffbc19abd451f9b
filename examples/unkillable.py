"""Train a GPT on several ranks, and kill processes at random: the parameters are those of a run without deaths.

    python examples/unkillable.py --ranks 4 --kills 5 --seed 0

Each rank has a part of the parameters and of the optimizer's state (ZeRO). After each step, it keeps a copy of its
part, and XOR parity of the parts of the others. When a rank dies, a spare that runs already rebuilds its part.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import torch
from byte_gpt import batches
from dp_ranks import Batch
from killer import Killer
from torch import Tensor
from unkillable_ranks import Rank

import aiodaft
from aiodaft.exceptions import OutcomeUnknown

PRELOAD = ("torch", "torch._dynamo")  # the first optimizer of a process imports this, for seconds
STARTS = 5  # of which one has to succeed: a rank that cannot start at all is an error


async def deaths(refs: list[aiodaft.Ref[Any]]) -> list[int]:
    """The places of these values that a death has taken, when all are there. Other errors are raised."""
    await asyncio.gather(*(ref.ready() for ref in refs))
    errors = [ref.exception() for ref in refs]
    for error in errors:
        if error is not None and not isinstance(error, OutcomeUnknown):
            raise error
    return [place for place, error in enumerate(errors) if error is not None]


class Training:
    """Steps, checkpoints and the replacement of ranks. Parts, gradients and parity go from rank to rank."""

    def __init__(self, count: int, spawn: Callable[[], Awaitable[Rank]], data: list[Batch]) -> None:
        self.count, self.spawn, self.data = count, spawn, data
        self.ranks, self.spare, self.spares = list[Rank](), list[Rank](), asyncio.Queue[Rank]()
        self.saved, self.saving = 0, list[aiodaft.Ref[None]]()  # the last checkpoint, and the one that is being taken
        self.losses = [0.0] * len(data)

    async def run(self, before_step: Callable[[int, list[Rank]], Awaitable[None]]) -> Tensor:
        """Train to the end, and give the parameters."""
        self.ranks = await asyncio.gather(*(self.start() for _ in range(self.count)))
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(self.keep_spare())
            while True:
                with suppress(OutcomeUnknown):  # a process has died: back to the last checkpoint
                    await self.recover()
                    for step in range(self.saved, len(self.data)):
                        await before_step(step, [*self.ranks, *self.spare])
                        self.losses[step] = sum(await self.step(self.data[step]))
                        await self.end_checkpoint()
                        self.begin_checkpoint(step + 1)
                    parameters = torch.cat(await asyncio.gather(*(rank.part() for rank in self.ranks)))
                    keeping.cancel()
                    return parameters

    async def start(self) -> Rank:
        for _ in range(STARTS - 1):
            with suppress(OutcomeUnknown):  # killed while it started
                return await self.spawn()
        return await self.spawn()

    async def step(self, batch: Batch) -> list[float]:
        parts = aiodaft.all_gather([rank.part() for rank in self.ranks])
        tokens, shares = batch[1].numel(), zip(*(half.tensor_split(self.count) for half in batch), strict=True)
        gradients = [
            rank.gradient(part, share, tokens) for rank, part, share in zip(self.ranks, parts, shares, strict=True)
        ]
        totals = aiodaft.reduce_scatter(gradients)
        return await asyncio.gather(*(rank.update(total) for rank, total in zip(self.ranks, totals, strict=True)))

    def begin_checkpoint(self, step: int) -> None:
        """Make the calls. Nothing waits for them: parity travels during the next step."""
        parities = aiodaft.reduce_scatter([rank.copy(step) for rank in self.ranks], torch.bitwise_xor)
        self.saving = [rank.keep(parity, step) for rank, parity in zip(self.ranks, parities, strict=True)]

    async def end_checkpoint(self) -> None:
        """A checkpoint counts when all ranks have it."""
        saving = self.saving
        await asyncio.gather(*(ref.ready() for ref in saving))
        self.saving = []
        await asyncio.gather(*saving)
        self.saved += bool(saving)

    async def recover(self) -> None:
        """Bring all ranks to the last checkpoint, also one that has died."""
        with suppress(OutcomeUnknown):
            await self.end_checkpoint()
        known = [rank.roll_back(number, self.count, self.saved) for number, rank in enumerate(self.ranks)]
        dead = await deaths(known)
        if len(dead) > 1:
            raise RuntimeError(f"ranks {dead} died before one of them was replaced, and parity makes up for one")
        for number in dead:
            del known[number]
            spare = await self.spares.get()
            await spare.take_over(number, self.count, self.saved, [aiodaft.typing.lazy(ref) for ref in known])
            self.ranks[number] = spare

    async def keep_spare(self) -> None:
        """Have a spare in advance; make the next one when it has taken over, or has died."""
        while True:
            self.spare = [await self.start()]
            self.spares.put_nowait(*self.spare)
            with suppress(OutcomeUnknown):
                await self.spare[0].stand_by()
            self.spare = []


async def train(rt: aiodaft.Runtime, ranks: int, data: list[Batch], killer: Killer) -> tuple[list[float], Tensor]:
    async with rt.scope() as scope, killer:
        place = scope.on(restart="temporary")  # the death of a rank is no error of the program
        training = Training(ranks, lambda: place.spawn(Rank), data)
        parameters = await training.run(killer.before_step)
    return training.losses, parameters


async def main(ranks: int, steps: int, kills: int, seed: int) -> None:
    data = list(batches(2 * ranks, steps))
    async with aiodaft.Runtime(preload=PRELOAD) as rt:
        killer = Killer(rt, kills, steps, seed)
        expected_losses, expected = await train(rt, ranks, data, Killer(rt, kills=0))
        losses, parameters = await train(rt, ranks, data, killer)
        payload = rt.traffic().payload - expected.nbytes - parameters.nbytes
    assert len(killer.seconds) == kills
    assert losses == expected_losses
    assert torch.equal(parameters, expected)
    print(f"{ranks} ranks, {steps} steps, {kills} kills: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    print("losses and parameters are those of a run without kills, bit for bit")
    print(f"the controller: {payload} payload bytes besides the final parameters")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, choices=range(2, 17), metavar="2..16")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    aiodaft.run(main(options.ranks, options.steps, options.kills, options.seed))
