"""The common part of actors with tensors on an accelerator."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import aiodaft
from aiodaft import Actor, method


class TensorKeeper(Actor):
    """Makes tensors in every way there is."""

    def _make(self, size: int, value: float) -> Tensor:
        """Make a tensor on the accelerator, and keep it."""
        raise NotImplementedError

    @method
    async def make(self, size: int, value: float) -> Tensor:
        return self._make(size, value)

    @method
    def make_on_thread(self, size: int, value: float) -> Tensor:
        return self._make(size, value)

    @method(transport="shm")
    async def make_for_the_host(self, size: int, value: float) -> Tensor:
        return self._make(size, value)

    @method
    async def lend(self, size: int, value: float) -> Tensor:
        return aiodaft.borrow(self._make(size, value))

    @method
    async def echo(self, value: Any) -> Any:
        return value
