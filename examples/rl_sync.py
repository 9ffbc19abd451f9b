"""The way of the weights of `rl_grpo.py`: from the trainers, of which each has rows, to those that need all of them."""

import asyncio

from rl_policy import Rollouts, Weights, rows_of, whole_of
from rl_trainer import Trainer
from rl_workers import Generator, NoWeights

import aiodaft
from aiodaft.resharding import Sharded, reshard


class WeightSync:
    """Plans of moves from worker to worker: each gets each element that it lacks once, and none comes here."""

    def __init__(
        self, trainers: aiodaft.Group[Trainer], generators: aiodaft.Group[Generator], weights: Weights
    ) -> None:
        self.trainers, self.generators, self.version = trainers, generators, 0
        self.layout = rows_of(weights, len(trainers))
        self.to_trainers = reshard(self.layout, whole_of(weights, len(trainers)), colocated=True)
        # One plan, carried out for each generator: one that dies holds up no other.
        self.to_generator = reshard(self.layout, whole_of(weights, 1, "policy."))

    @property
    def bytes(self) -> int:
        """Bytes of all moves of a version."""
        return self.to_trainers.bytes + len(self.generators) * self.to_generator.bytes

    def rows(self) -> Sharded:
        """The weights after the calls that the trainers have got."""
        return Sharded(self.trainers.all(Trainer.shard), self.layout)

    async def to_all(self, version: int) -> set[int]:
        """Send a new version to all workers; returns the digests of the generators that have it."""
        self.version, rows = version, self.rows()
        sending = self.to_trainers.move(rows, to=self.trainers)
        new, digests = await asyncio.gather(sending, self.to_generators(rows))
        await self.trainers.each(Trainer.load, new)
        return digests

    async def to_generators(self, rows: Sharded) -> set[int]:
        version, places = self.version, range(len(self.generators))
        digests = await asyncio.gather(*(self.to_one(place, rows, version) for place in places))
        return {digest for digest in digests if digest is not None}

    async def to_one(self, place: int, rows: Sharded, version: int) -> int | None:
        """None if the generator dies. It is started again, and asks for weights with the next chunk."""
        try:
            new = await self.to_generator.move(rows, to=self.generators[place : place + 1])
            return await self.generators[place].load(new[0], version)
        except aiodaft.ActorDied:
            return None

    async def rollouts(self, chunk: int) -> aiodaft.Ref[Rollouts]:
        """Have a generator answer the prompts of a chunk, and another one if it dies."""
        while True:
            rollouts = self.generators.any(Generator.rollout, chunk)
            await rollouts.ready()
            if not isinstance(rollouts.exception(), NoWeights | aiodaft.ActorDied):
                return rollouts
            await self.to_generators(self.rows())
