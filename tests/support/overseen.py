"""Actors that call each other, fail, store values and print, to be looked at."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import Any

from aiodaft import Actor, method


class Source(Actor):
    """Makes values, and fails."""

    @method
    async def make(self, size: int) -> bytes:
        return bytes(size)

    @method
    async def fail(self, text: str) -> None:
        raise ValueError(text)

    @method
    async def say(self, text: str) -> None:
        print(text)
        logging.getLogger("overseen").warning("logged: %s", text)

    @method
    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @method
    async def wait(self) -> None:
        await asyncio.Event().wait()

    @method
    def take(self, value: Any) -> int:
        return len(value)


class Middle(Actor):
    """Calls a source."""

    def __init__(self, source: Source) -> None:
        self.source = source

    @method
    async def pass_on(self, text: str) -> None:
        await self.source.fail(text)

    @method
    async def wrap(self, text: str) -> None:
        try:
            await self.source.fail(text)
        except ValueError as error:
            raise RuntimeError("no way") from error

    @method
    async def kill(self) -> None:
        await self.source.die()

    @method
    async def ask(self, times: int) -> None:
        for _ in range(times):
            await self.source.take(b"1")


class Gate(Actor):
    """Calls a middle."""

    def __init__(self, middle: Middle) -> None:
        self.middle = middle

    @method
    async def enter(self, text: str) -> None:
        await self.middle.wrap(text)


class Unmade(Actor):
    """Cannot be made."""

    def __init__(self) -> None:
        raise OSError("no disk")
