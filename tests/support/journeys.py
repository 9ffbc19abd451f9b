"""Actors of the ten journeys: models, trainers, samplers with real tensors, as users write them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import torch
from torch import Tensor

from aiodaft import Actor, Channel, method

# The calls that ran in this process; the controller's copy must stay empty.
RAN: list[str] = []


class Model(Actor, gpus=1):
    """Multiplies."""

    def __init__(self, gain: float) -> None:
        RAN.append("Model")
        self.gain = gain

    @method
    async def execute(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        RAN.append("execute")
        return x * self.gain * scale

    @method
    async def ran(self) -> list[str]:
        return RAN


class Trainer(Actor, gpus=1):
    """A member of a data-parallel group."""

    def __init__(self, lr: float) -> None:
        RAN.append("Trainer")
        self.lr = lr
        self.w = torch.zeros(1)

    @method
    async def load(self, w: float) -> None:
        self.w.fill_(w)

    @method
    def step(self, batch: list[int]) -> float:
        self.w += self.lr * sum(batch)
        return self.w.item()

    @method
    async def square(self, batch: list[int]) -> list[int]:
        return [item * item for item in batch]

    @method
    async def weights(self) -> Tensor:
        return self.w


class Sampler(Actor, gpus=1):
    """Generates with the weights it was given last."""

    def __init__(self) -> None:
        RAN.append("Sampler")
        self.w = torch.zeros(1)
        self.gate = asyncio.Event()

    @method
    async def generate(self, prompt: str) -> Tensor:
        """The prompt's length, and the weights it was generated with."""
        return torch.cat([torch.tensor([float(len(prompt))]), self.w])

    @method
    async def update(self, w: Tensor) -> None:
        self.w = w

    @method
    async def tokens(self, prompt: str) -> AsyncIterator[str]:
        for word in prompt.split():
            await asyncio.sleep(0)
            yield word

    @method
    async def generate_after_gate(self, prompt: str) -> str:
        await self.gate.wait()
        return prompt

    @method
    async def open_gate(self) -> None:
        self.gate.set()


class Reward(Actor):
    """Scores the work of all samplers."""

    @method
    async def score(self, samples: list[Tensor]) -> list[int]:
        return [int(sample[0]) for sample in samples]


class Producer(Actor):
    """The sending end of a channel."""

    @method
    async def run(self, out: Channel[Tensor], n: int, size: int) -> None:
        for index in range(n):
            await out.send(torch.full((size,), float(index)))
        await out.aclose()


class Consumer(Actor):
    """The receiving end of a channel."""

    @method
    async def run(self, inp: Channel[Tensor]) -> list[float]:
        """The mean of each tensor, in the order of arrival."""
        return [tensor.mean().item() async for tensor in inp]
