"""Actors at which only so many calls may wait."""

from __future__ import annotations

from collections.abc import AsyncIterator

from actors import WithGate

from aiodaft import Actor, method


class Bounded(WithGate):
    """One of its methods has a bound."""

    @method(concurrency=1, max_queue=3)
    async def hold(self, value: int) -> int:
        await self.gate.wait()
        return value

    @method(ordered=False)
    async def echo(self, value: int) -> int:
        return value


class OnThread(Actor, max_queue=1):
    """All of its calls have one."""

    @method
    def hold(self, fifo: str) -> str:
        with open(fifo, encoding="utf-8") as file:
            return file.read()

    @method
    async def size(self, data: bytes) -> int:
        return len(data)

    @method
    async def numbers(self) -> AsyncIterator[int]:
        yield 1

    @method
    def double(self, value: int) -> int:
        return 2 * value


class Plain:
    """Knows nothing of aiodaft."""

    def hold(self, fifo: str) -> str:
        with open(fifo, encoding="utf-8") as file:
            return file.read()
