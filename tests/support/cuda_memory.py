"""Actors that use much of the memory of a GPU."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from aiodaft import Actor, method


class Hoarder(Actor):
    """Keeps memory of a GPU from its constructor on."""

    def __init__(self, nbytes: int = 1, *, limit: int | None = None) -> None:
        """Keep `nbytes`. `limit` bounds the memory that torch may take of the GPU for this process."""
        if limit is not None:
            _, total = torch.cuda.mem_get_info()
            torch.cuda.set_per_process_memory_fraction(limit / total)
        self.kept = torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    @method
    async def size(self) -> int:
        return self.kept.nbytes

    @method
    async def give(self) -> Tensor:
        """A value as large as the kept one, which needs as much memory again for its snapshot."""
        return self.kept

    @method
    def take_more(self, nbytes: int) -> int:
        return torch.empty(nbytes, dtype=torch.uint8, device="cuda").nbytes

    @method
    async def make(self, nbytes: int, value: int) -> Tensor:
        return torch.full((nbytes,), value, dtype=torch.uint8, device="cuda")

    @method
    async def first(self, tensor: Tensor) -> int:
        return int(tensor[0])

    @method
    async def crash(self) -> None:
        os.abort()

    @method
    async def let_go(self) -> None:
        del self.kept
        torch.cuda.empty_cache()
