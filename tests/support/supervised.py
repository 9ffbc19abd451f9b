"""Actors that are restarted."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiodaft
from aiodaft import Actor, Backoff, Restart, method

# At once, so that no test waits.
AT_ONCE = Backoff(base=0)


class Mortal(Actor):
    """Counts, dies when told to, and notes its lives in a file."""

    def __init__(self, start: Any = 0, path: str = "", *, deaths: int = 0) -> None:
        self.value = start
        self.path = path
        self.note("made")
        if path and self.lives() <= deaths:
            raise ValueError(f"cannot be made in life {self.lives()}")
        self.gate = asyncio.Event()

    def note(self, what: str) -> None:
        """Append a line to the file, which outlives the process."""
        if self.path:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(f"{what}\n")

    def lives(self) -> int:
        return Path(self.path).read_text(encoding="utf-8").count("made\n")

    @method
    async def pid(self) -> int:
        return os.getpid()

    @method
    async def visible(self) -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    @method
    async def get(self) -> Any:
        return self.value

    @method
    async def add(self, value: Any) -> Any:
        self.value += value
        return self.value

    @method
    async def wait(self) -> str:
        self.note("waiting")
        await self.gate.wait()
        return "waited"

    @method
    async def die(self, how: int = signal.SIGKILL) -> None:
        os.kill(os.getpid(), how)
        await asyncio.Event().wait()

    @method
    async def exit(self, code: int) -> None:
        os._exit(code)

    @method
    async def count(self, n: int) -> AsyncIterator[int]:
        for index in range(n):
            yield index

    @method(idempotent=True, retries=3)
    async def survive(self, lives: int, value: Any = None) -> tuple[int, int, Any]:
        """Dies in its first lives."""
        attempt = aiodaft.current_attempt()
        self.note(f"attempt {attempt}")
        if attempt <= lives:
            os.kill(os.getpid(), signal.SIGKILL)
            await asyncio.Event().wait()
        return attempt, os.getpid(), value


class Heir(Mortal, restart=Restart(intensity=5, backoff=AT_ONCE)):
    """Gets back what it had counted."""

    async def on_restart(self, epoch: int) -> None:
        self.value = f"epoch {epoch}"


class Caller(Actor):
    """Holds handles of others."""

    def __init__(self, other: Any = None) -> None:
        self.other = other

    @method
    async def keep(self, other: Any) -> None:
        self.other = other

    @method
    async def add(self, value: Any) -> Any:
        return await self.other.add(value)

    @method
    async def ask(self, name: str, *args: Any) -> Any:
        return await getattr(self.other, name)(*args)
