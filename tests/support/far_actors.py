"""Actors of tests with several hosts."""

from __future__ import annotations

import asyncio
import os

import aiodaft


class Far(aiodaft.Actor):
    """Tells its place, keeps its messages, waits, and calls others."""

    def __init__(self) -> None:
        self.told: list[int] = []

    @aiodaft.method
    async def where(self) -> tuple[str, int]:
        """The name of the host, and the pid."""
        return os.uname().nodename, os.getpid()

    @aiodaft.method
    async def tell(self, number: int) -> int:
        self.told.append(number)
        return number

    @aiodaft.method
    async def heard(self) -> list[int]:
        return self.told

    @aiodaft.method
    async def relay(self, other: Far, number: int) -> int:
        """Have another actor be told."""
        return await other.tell(number)

    @aiodaft.method
    async def make(self, nbytes: int) -> bytes:
        return bytes(nbytes)

    @aiodaft.method
    async def length(self, value: bytes) -> int:
        return len(value)

    @aiodaft.method(ordered=False)
    async def wait(self) -> None:
        """Never return."""
        await asyncio.Event().wait()

    @aiodaft.method(ordered=False)
    async def wait_for(self, other: Far) -> None:
        """Wait for another actor, which never returns."""
        await other.wait()
