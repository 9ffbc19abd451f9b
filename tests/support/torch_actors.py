"""Actors that hold tensors."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import torch
from here import copied_bytes
from torch import Tensor

import aiodaft
from aiodaft import Actor, method


class Keeper(Actor):
    """Makes, keeps and changes tensors."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(0)
        self.lent: Any = None

    @method
    def threads(self) -> tuple[int, str | None]:
        """The number of threads with which torch computes, and the environment's number."""
        return torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")

    @method
    async def make(self, size: int, value: float) -> Tensor:
        self.tensor = torch.full((size,), value)
        return self.tensor

    @method
    def make_on_thread(self, size: int, value: float) -> Tensor:
        self.tensor = torch.full((size,), value)
        return self.tensor

    @method
    async def make_shared(self, size: int, value: float) -> Tensor:
        self.tensor = aiodaft.memory.empty(size).fill_(value)
        return self.tensor

    @method
    async def lend(self, size: int, value: float) -> Tensor:
        self.tensor = torch.full((size,), value)
        self.lent = aiodaft.borrow(self.tensor)
        return self.lent

    @method
    async def make_both(self, size: int, value: float) -> tuple[Tensor, Tensor]:
        """One tensor in shared memory, and one that is not."""
        self.tensor = torch.full((size,), value)
        return aiodaft.memory.empty(size).fill_(value), self.tensor

    @method
    async def stored_bytes(self) -> int:
        """The memory that values of this process take besides their tensors."""
        return copied_bytes()

    @method
    async def wait_returned(self) -> bool:
        await self.lent.released()
        return True

    @method
    async def overwrite(self, value: float) -> None:
        self.tensor.fill_(value)

    @method
    def overwrite_on_thread(self, value: float) -> None:
        self.tensor.fill_(value)

    @method
    async def address(self) -> int:
        return self.tensor.data_ptr()

    @method
    async def is_mine(self, tensor: Tensor) -> bool:
        return tensor.data_ptr() == self.tensor.data_ptr()

    @method
    async def total(self, tensor: Tensor) -> float:
        return float(tensor.sum())

    @method
    async def add_in_place(self, tensor: Tensor, value: float) -> float:
        tensor.add_(value)
        return float(tensor[0])

    @method
    async def keep(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @method
    async def kept(self) -> float:
        return float(self.tensor.sum())

    @method
    async def echo(self, value: Any) -> Any:
        return value

    @method
    async def background(self, value: float, seconds: float) -> None:
        """Goes on writing while other calls run."""
        end = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < end:
            self.tensor.add_(value)
            await asyncio.sleep(0)

    @method
    async def double(self, box: Any) -> Any:
        """Nested containers in, nested containers out."""
        return {"out": [box["in"][0] * 2]}


class Layer(Actor):
    """A torch module, unchanged, in an actor."""

    def __init__(self, inputs: int, outputs: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.module = torch.nn.Linear(inputs, outputs)

    @method
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.module(x)

    @method
    def state(self) -> dict[str, Tensor]:
        return self.module.state_dict()
