"""Tensors of every layout, and an actor that gives them by every transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from here import current_peer
from torch import Tensor

import aiodaft
from aiodaft import Actor, method


def counted(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """1, 2, 3, and so on. Most are above 64 KiB, to be payloads, and too small for torch to use threads."""
    return torch.arange(1, 1 + torch.Size(size).numel()).remainder(100).to(dtype).view(size)


VALUES: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: counted(130, 240),
    "bytes": lambda: counted(70_001, dtype=torch.uint8),
    "bfloat16": lambda: counted(300, 200, dtype=torch.bfloat16),
    "bool": lambda: counted(100_000).gt(50),
    "complex": lambda: counted(130, 240, dtype=torch.complex64),
    "transposed": lambda: counted(130, 240).t(),
    "channels last": lambda: counted(2, 3, 100, 100).to(memory_format=torch.channels_last),
    "one long": lambda: counted(1, 130, 1, 240).as_strided((1, 130, 1, 240), (7, 240, 5, 1)),
    "with gaps": lambda: counted(130, 240)[:, ::2],
    "expanded": lambda: counted(300, 1).expand(300, 100),
    "parameter": lambda: torch.nn.Parameter(counted(130, 240)),
    "small": lambda: counted(10),
    "nothing": lambda: counted(3, 0),
}


class Giver(Actor):
    """Gives tensors."""

    def __init__(self) -> None:
        self.cache = torch.zeros(0)

    @method(transport="tcp")
    async def by_tcp(self, name: str) -> Tensor:
        return VALUES[name]()

    @method(transport="shm")
    async def by_shm(self, name: str) -> Tensor:
        return VALUES[name]()

    @method
    async def echo(self, value: Any) -> Any:
        return value

    @method
    async def total(self, x: Tensor) -> float:
        return float(x.sum(dtype=torch.float64))

    @method(transport="shm")
    async def full_by_shm(self, size: int, value: float) -> Tensor:
        return torch.full((size,), value)

    @method(transport="tcp")
    async def full_by_tcp(self, size: int, value: float) -> Tensor:
        return torch.full((size,), value)

    @method(transport="ucx")
    async def full_by_ucx(self, size: int, value: float) -> Tensor:
        return torch.full((size,), value)

    @method
    async def register_cache(self, rows: int, columns: int) -> None:
        self.cache = counted(rows, columns)
        aiodaft.memory.register(self.cache)

    @method(transport="ucx")
    async def rows_by_ucx(self, start: int, end: int) -> Tensor:
        return self.cache[start:end]

    @method
    async def registrations(self) -> int:
        return current_peer().store.transport_named("ucx").registrations  # type: ignore[attr-defined, no-any-return]  # UCX has it
