"""The actors of a chaos run. Each call that runs is noted in a file, where it outlives its actor."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

from aiodaft.actor import Actor
from aiodaft.channel import Channel
from aiodaft.methods import method

__all__ = ["Victim", "made"]


def made(number: int, size: int) -> bytes:
    """The bytes that call `number` makes."""
    return random.Random(number).randbytes(size)


class Victim(Actor):
    """Does a little of everything."""

    def __init__(self, notes: Path) -> None:
        # A write of a few bytes to the end of a file is done or not, also when the writer is killed.
        self._notes = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def _note(self, number: int) -> None:
        os.write(self._notes, f"{number}\n".encode())

    @method
    async def make(self, number: int, size: int) -> bytes:
        """Bytes that depend on the number of the call."""
        self._note(number)
        return made(number, size)

    @method
    def flip(self, number: int, data: bytes) -> bytes:
        """The same bytes backwards."""
        self._note(number)
        return data[::-1]

    @method
    async def nap(self, number: int, hundredths: int) -> int:
        """Sleep, and give back for how long."""
        self._note(number)
        await asyncio.sleep(hundredths / 100)
        return hundredths

    @method
    async def count(self, number: int, items: int) -> AsyncIterator[int]:
        """A stream."""
        self._note(number)
        for item in range(items):
            yield item

    @method
    async def ask(self, number: int, other: Victim, size: int) -> bytes:
        """Have another actor make something, as the call after this one."""
        self._note(number)
        return await other.make(number + 1, size)

    @method
    async def send(self, number: int, channel: Channel[int], items: int) -> None:
        """Fill a channel, and close it."""
        self._note(number)
        for item in range(items):
            await channel.send(item)
        await channel.aclose()

    @method
    async def receive(self, number: int, channel: Channel[int]) -> list[int]:
        """Empty a channel."""
        self._note(number)
        return [item async for item in channel]
