"""Members of groups that grow, shrink and heal."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import aiodaft
from aiodaft import Actor, method


class Peer(Actor):
    """Has a state that others take over."""

    def __init__(self, state: Any = None) -> None:
        self.state = state
        self.gate = asyncio.Event()
        self.made_as = aiodaft.current_group().rank

    @method
    async def pid(self) -> int:
        return os.getpid()

    @method
    async def get(self) -> Any:
        return self.state

    @method
    async def load(self, state: Any) -> int:
        """Takes over a state, and says which rank it was made for."""
        self.state = state
        return self.made_as

    @method
    async def size_of_state(self) -> int:
        return len(self.state)

    @method
    async def seat(self) -> tuple[int, int, int]:
        group = aiodaft.current_group()
        return group.epoch, group.rank, group.size

    @method
    async def coords(self) -> dict[str, int]:
        return dict(aiodaft.current_group().coords)

    @method
    async def watch(self, epoch: int) -> list[tuple[int, int, int]]:
        """The epochs of its group that it sees, up to one of them."""
        group: aiodaft.typing.CurrentGroup[Peer] = aiodaft.current_group()
        seen: list[tuple[int, int, int]] = []
        self.gate.set()
        while group.epoch < epoch:
            group = await group.changed()
            seen.append((group.epoch, group.rank, len(group.members)))
        return seen

    @method
    async def watching(self) -> None:
        await self.gate.wait()

    @method
    async def held(self) -> int:
        await self.gate.wait()
        return self.made_as

    @method
    async def open(self) -> None:
        self.gate.set()

    @method
    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.Event().wait()


class Laborer(Actor):
    """Notes each call in a file, which outlives the process."""

    def __init__(self, notes: str) -> None:
        self.notes = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, what: object) -> None:
        os.write(self.notes, f"{what}\n".encode())

    @method
    async def work(self, item: str, size: int = 0) -> tuple[str, int]:
        self.note(item)
        await asyncio.sleep(0)
        return item, size

    @method
    def toil(self, item: str, size: int = 0) -> bytes:
        """In the thread, one at a time; the result may be so large that it stays here until it is taken."""
        self.note(item)
        return item.encode().ljust(size)


class Plain:
    """Knows nothing of actors."""

    def pid(self) -> int:
        return os.getpid()


class Loner(Actor):
    """Is in no group."""

    @method
    async def size(self, value: bytes) -> int:
        return len(value)
