"""An actor that gets instances of classes that it cannot import."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

from actors import Echo

from aiodaft import method


class Taker(Echo):
    """Gives back its argument, and keeps nothing else."""

    def __init__(self, first: Any = None) -> None:
        self.first = first
        self._gate = asyncio.Event()

    @method
    async def size(self, value: Any) -> int:
        """The value's own answer."""
        return int(value.size())

    @method
    async def call(self, function: Any, value: Any) -> Any:
        return function(value)

    @method
    async def items(self, value: Any) -> AsyncIterator[Any]:
        yield value
        yield value

    @method
    async def wait(self) -> None:
        await self._gate.wait()

    @method(ordered=False)
    async def open_gate(self) -> None:
        self._gate.set()

    @method(ordered=False)
    async def classes(self, name: str) -> int:
        """The number of classes of a name in this process."""
        gc.collect()
        return sum(1 for found in gc.get_objects() if isinstance(found, type) and found.__name__ == name)

    @method
    async def first_size(self) -> int:
        return int(self.first.size())
