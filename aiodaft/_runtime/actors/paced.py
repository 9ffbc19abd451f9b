"""A stream gives as many items as its consumer has room for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any


class Paced:
    """A call that gives items, paced by its consumer."""

    # The number of items that the consumer still takes.
    credit = 0
    # The step of its generator that is on the actor's thread, or waits for it.
    step: asyncio.Future[Any] | None = None
    # Its generator was told to end: the awaits of its cleanup are not cancelled with the call.
    closes = False
    _credit_wanted: asyncio.Event | None = None

    def add_credit(self, count: int) -> None:
        self.credit += count
        if self._credit_wanted is not None:
            self._credit_wanted.set()

    async def wait_credit(self) -> None:
        while self.credit <= 0:
            if self._credit_wanted is None:
                self._credit_wanted = asyncio.Event()
            self._credit_wanted.clear()
            await self._credit_wanted.wait()
        self.credit -= 1

    async def give_items(self, items: AsyncGenerator[Any, None], give: Callable[[Any, Any], Awaitable[None]]) -> None:
        """Give each item as `give(call, item)` when there is room for it."""
        try:
            await self.wait_credit()
            async for item in items:
                await give(self, item)
                await self.wait_credit()
        finally:
            # The end of the `async for` does not close the generator, and garbage collection closes it too late.
            await items.aclose()
