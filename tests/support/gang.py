"""Members whose methods run one at a time and meet in collectives, and another caller of their group."""

from __future__ import annotations

import asyncio

import aiodaft
from aiodaft import Actor, Group, method


class Gang(Actor):
    @method
    def step(self, x: int) -> int:
        total: int = aiodaft.current_group().all_reduce(x, key="k").result()
        return total

    @method(concurrency=1)
    async def step_on_loop(self, x: int) -> int:
        total: int = await aiodaft.current_group().all_reduce(x, key="k")
        return total

    @method(concurrency=1)
    async def step_after_asking(self) -> None:
        """The second member first asks the first one, which waits for it."""
        group = aiodaft.current_group()
        if group.rank == 1:
            await group.members[0].step_after_asking()
        await group.barrier()

    @method(ordered=False)
    async def ping(self) -> None: ...


class Other(Actor):
    """Another caller, with arguments that are late."""

    def __init__(self) -> None:
        self.is_sent, self.may_go = asyncio.Event(), asyncio.Event()

    @method
    async def drive(self, group: Group[Gang], name: str, x: int) -> list[int]:
        refs = group.all(getattr(Gang, name), x)
        # The last member has its call when it answers.
        await group[-1].ping()
        self.is_sent.set()
        return await refs

    @method(ordered=False)
    async def sent(self) -> None:
        """Wait until the members have the calls of `drive`."""
        await self.is_sent.wait()

    @method(ordered=False)
    async def held(self, x: int) -> int:
        """A value that comes after `go`."""
        await self.may_go.wait()
        return x

    @method(ordered=False)
    async def go(self) -> None:
        self.may_go.set()
