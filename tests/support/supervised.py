"""Actors that are restarted."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiodaft
from aiodaft import Actor, Restart, method

# At once, so that no test waits.
AT_ONCE = aiodaft.Backoff(base=0)


class Mortal(Actor):
    """Counts, dies when told to, and notes its lives in a file."""

    def __init__(self, start: Any = 0, notes: str = "", *, fails_in: tuple[int, ...] = (), gate: str = "") -> None:
        """From the second life on, the constructor waits until the test opens the gate, a FIFO."""
        self.value = start
        self.notes = notes
        self.note("made")
        life = self.noted().count("made") if notes else 1
        if gate and life > 1:
            with open(gate, encoding="utf-8"):
                pass
        if life in fails_in:
            raise ValueError(f"cannot be made in life {life}")

    def note(self, what: str) -> None:
        """Append a line to the file, which outlives the process."""
        if self.notes:
            with open(self.notes, "a", encoding="utf-8") as file:
                file.write(f"{what}\n")

    def noted(self) -> list[str]:
        return Path(self.notes).read_text(encoding="utf-8").splitlines()

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
        await asyncio.Event().wait()
        return "never"

    @method
    async def die(self, how: int = signal.SIGKILL) -> None:
        os.kill(os.getpid(), how)
        await asyncio.Event().wait()

    @method
    async def fail(self) -> None:
        self.note("failing")
        raise aiodaft.ActorDied("raised by the method itself")

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
        attempt = aiodaft.supervision.current_attempt()
        self.note(f"attempt {attempt}")
        if attempt <= lives:
            os.kill(os.getpid(), signal.SIGKILL)
            await asyncio.Event().wait()
        return attempt, os.getpid(), value


class Member(Mortal):
    """One of several siblings: says when it comes and goes."""

    def __init__(self, name: str, notes: str) -> None:
        self.name = name
        super().__init__(0, notes)

    def note(self, what: str) -> None:
        super().note(f"{self.name} {what}")

    async def __aenter__(self) -> Member:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.note("left")


class Heir(Mortal, restart=Restart(intensity=5, backoff=AT_ONCE)):
    """Gets back its count."""

    async def on_restart(self, epoch: int) -> None:
        self.value = f"epoch {epoch}"


class ThreadedHeir(Mortal):
    """The same in a def method, which may refuse."""

    def on_restart(self, epoch: int) -> None:
        if self.value == "refuse":
            raise RuntimeError("the checkpoint is gone")
        self.value = f"epoch {epoch} on a thread"


class Responder(Actor):
    """Holds handles of others."""

    def __init__(self, other: Any = None) -> None:
        self.other = other

    @method
    async def keep(self, other: Any) -> None:
        self.other = other

    @method
    async def ask(self, name: str, *args: Any) -> Any:
        return await getattr(self.other, name)(*args)


class Late(Mortal, restart=Restart(intensity=5, backoff=AT_ONCE)):
    """Comes back when the test opens the gate, a FIFO."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.path = gate

    def on_restart(self, epoch: int) -> None:
        with open(self.path, encoding="utf-8"):
            pass


class Lingerer(Actor, gpus=1):
    """Says that it is being stopped, and does not leave."""

    def __init__(self, notes: str) -> None:
        self.notes = notes

    async def __aenter__(self) -> Lingerer:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        with open(self.notes, "a", encoding="utf-8") as file:
            file.write("leaving\n")
        await asyncio.Event().wait()


class Balancer(Actor):
    """Calls a group from a process of its own."""

    def __init__(self, group: aiodaft.Group[Mortal]) -> None:
        self.group = group

    @method
    async def pids(self, count: int) -> list[int]:
        return [await self.group.any(Mortal.pid) for _ in range(count)]

    @method
    async def ask_first(self) -> int:
        return await self.group[0].pid()
