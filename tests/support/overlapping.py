"""Members of groups of which several calls are under way at the same time, with collectives of one key."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any, NamedTuple

import aiodaft
from aiodaft import Actor, method
from aiodaft._runtime.groups.keyed import Keyed
from aiodaft._runtime.process import current_process
from aiodaft.typing import CurrentGroup


class Step(NamedTuple):
    """The orders for a member.

    Attributes:
        name: Of the call.
        value: Its value in the collective.
        held: Whether it first waits for `go` or `fail`.
        turns: Of the loop, for which it waits first.
        fails: Whether it fails before its collective.
        timeout: Of the collective.
    """

    name: str
    value: Any
    held: bool = False
    turns: int = 0
    fails: bool = False
    timeout: float | None = None


class Stepper(Actor):
    """Takes part in a collective, always with the same key, when it is told to."""

    def __init__(self) -> None:
        self.gates: dict[str, asyncio.Future[None]] = {}
        self.begun: dict[str, asyncio.Event] = {}
        self.left: asyncio.Task[Any] | None = None

    @property
    def group(self) -> CurrentGroup[Stepper]:
        return aiodaft.current_group()

    def gate(self, name: str) -> asyncio.Future[None]:
        return self.gates.setdefault(name, asyncio.get_running_loop().create_future())

    @method
    async def step(self, step: Step) -> list[Any]:
        return await self.take(step)

    async def take(self, step: Step) -> list[Any]:
        if step.held:
            await self.gate(step.name)
        for _ in range(step.turns):
            await asyncio.sleep(0)
        if step.fails:
            raise ValueError("a bad batch")
        found = self.group.all_gather(step.value, key="g", timeout=step.timeout)
        self.begun.setdefault(step.name, asyncio.Event()).set()
        return await found

    @method
    async def go(self, name: str) -> None:
        """Have a call begin its collective; returns when it has."""
        self.gate(name).set_result(None)
        await self.begun.setdefault(name, asyncio.Event()).wait()

    @method
    async def fail(self, name: str) -> None:
        self.gate(name).set_exception(ValueError("a bad batch"))

    @method
    async def holds(self, name: str) -> None:
        """Wait until a call has come to its gate."""
        while name not in self.gates:
            await asyncio.sleep(0)

    @method
    async def leave(self, step: Step) -> None:
        """Leave a task behind that takes the step."""
        self.left = asyncio.get_running_loop().create_task(self.take(step))

    @method
    async def take_left(self) -> list[Any]:
        assert self.left is not None
        found: list[Any] = await self.left
        return found

    @method
    async def meetings(self) -> int:
        return current_process().part(Keyed).meetings

    @method
    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
