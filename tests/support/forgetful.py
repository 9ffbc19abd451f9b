"""Actors with calls that fail while nothing awaits them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from aiodaft import Actor, method


class Gated(Actor):
    """Fails at once, or when it is told to."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    @method
    async def fail(self, text: str) -> None:
        raise ValueError(text)

    @method
    async def fail_later(self, text: str) -> None:
        await self.gate.wait()
        raise ValueError(text)

    @method
    async def open_gate(self) -> None:
        self.gate.set()


class Responder(Actor):
    """Makes calls that fail, in methods of its own."""

    def __init__(self, gated: Gated) -> None:
        self.gated = gated
        self.held: Any = None

    @method
    async def hold(self) -> None:
        """Ends without having waited for anything."""
        self.held = self.gated.fail_later("forgotten")

    @method
    async def catch(self) -> None:
        with suppress(ValueError):
            await self.gated.fail("caught")

    @method
    async def drop(self) -> None:
        self.held = None
