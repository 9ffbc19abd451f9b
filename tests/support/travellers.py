"""Actors of tests with several nodes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import aiodaft


class Traveller(aiodaft.Actor):
    """Says where it is, and calls others."""

    @aiodaft.method
    async def increment(self, number: int) -> int:
        return number + 1

    @aiodaft.method
    async def pid(self) -> int:
        return os.getpid()

    @aiodaft.method
    async def ask(self, other: Traveller, number: int) -> int:
        """Have another actor increment a number."""
        return await other.increment(number)

    @aiodaft.method
    async def keep(self, value: Any) -> int:
        """The length of a value that was brought here."""
        return len(value)

    @aiodaft.method
    async def make(self, size: int) -> bytes:
        return bytes(range(256)) * (size // 256)

    @aiodaft.method
    async def count(self, number: int) -> AsyncIterator[int]:
        for item in range(number):
            yield item

    @aiodaft.method
    async def send_all(self, channel: aiodaft.Channel[int], number: int) -> None:
        for item in range(number):
            await channel.send(item)

    @aiodaft.method
    async def receive_all(self, channel: aiodaft.Channel[int], number: int) -> list[int]:
        return [await channel.recv() for _ in range(number)]
