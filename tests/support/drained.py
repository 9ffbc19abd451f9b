"""Actors on nodes that are drained."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import aiodaft
from aiodaft import Restart, method


class Clerk(aiodaft.Actor, restart=Restart(intensity=1, period=600)):
    """Notes its work in a file, and waits at gates."""

    def __init__(self, notes: str = "") -> None:
        self.notes = notes
        self.epoch = 0

    async def on_restart(self, epoch: int) -> None:
        self.epoch = epoch

    def note(self, what: object) -> None:
        with open(self.notes, "a", encoding="utf-8") as file:
            file.write(f"{what}\n")

    @method
    async def pid(self) -> int:
        return os.getpid()

    @method
    async def echo(self, number: int) -> int:
        return number

    @method(concurrency=1)
    async def serve(self, number: int, extra: list[int], gate: str = "") -> tuple[int, int, list[int]]:
        """Wait until the test opens the gate, a FIFO, if there is one; which incarnation did so."""
        self.note(f"serves {number}")
        if gate == "never":
            await asyncio.Event().wait()
        elif gate:
            await asyncio.to_thread(Path(gate).read_text, encoding="utf-8")
        return self.epoch, number, extra

    @method
    def work(self, number: int, extra: list[int], gate: str = "") -> tuple[int, int, list[int]]:
        """As `serve`, on the actor's thread."""
        self.note(f"serves {number}")
        if gate:
            Path(gate).read_text(encoding="utf-8")
        return self.epoch, number, extra

    @method
    async def now(self) -> int:
        return self.epoch

    @method
    async def count(self, number: int, extra: list[int]) -> AsyncIterator[tuple[int, int, list[int]]]:
        self.note(f"counts to {number}")
        for item in range(number):
            yield self.epoch, item, extra

    @method
    async def visit(self, other: Clerk, gate: str) -> int:
        """Ask another clerk when the gate is open."""
        self.note("visits")
        await asyncio.to_thread(Path(gate).read_text, encoding="utf-8")
        return await other.now()

    @method
    async def make(self, size: int) -> bytes:
        return bytes(size)


class Colleague(aiodaft.Actor):
    """Calls a clerk from a process of its own."""

    def __init__(self, clerk: Clerk) -> None:
        self.clerk = clerk
        self._waiting = 0

    @method
    async def work(self, number: int, extra: list[int]) -> tuple[int, int, list[int]]:
        self._waiting += 1
        return await self.clerk.work(number, extra)

    @method
    async def waits(self, number: int) -> None:
        """Wait until so many calls are under way."""
        while self._waiting < number:
            await asyncio.sleep(0)
