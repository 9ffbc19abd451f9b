"""An actor with calls that do much before they wait for the first time."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from typing import Any

from aiodaft import Actor, method

variable: ContextVar[str] = ContextVar("variable", default="of no call")


class FirstSteps(Actor):
    """Calls itself, and waits for events of others."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.gate = threading.Event()
        self.shared: asyncio.Future[int] | None = None

    @method
    def block(self) -> None:
        self.gate.wait()

    @method
    async def note(self, item: str, then: FirstSteps | None = None) -> None:
        self.seen.append(item)
        if then is not None:
            then.note.tell(f"after {item}")

    @method
    async def begin_together(self, me: FirstSteps) -> list[str]:
        """Has two calls of itself wait for a third that waits for the thread, and lets them go."""
        waiting: list[Any] = [me.block(), me.block(), me.note("first", me), me.note("second")]
        self.gate.set()
        await asyncio.gather(*waiting)
        await me.note("last")
        return self.seen

    @method(concurrency=1)
    async def put_into_context(self, value: str) -> str:
        """The value that another call has put there."""
        before = variable.get()
        variable.set(value)
        await asyncio.sleep(0)
        return before

    @method
    async def wait_shared(self) -> int:
        self.shared = self.shared or asyncio.get_running_loop().create_future()
        return await self.shared

    @method
    async def settle_shared(self) -> None:
        assert self.shared is not None
        self.shared.set_result(7)
