"""Members whose methods run one at a time and meet in collectives, and another caller of their group."""

from __future__ import annotations

import asyncio
import os
import signal

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

    @method(concurrency=1, ordered=False)
    async def step_in_any_order(self, x: int) -> int:
        total: int = await aiodaft.current_group().all_reduce(x, key="k")
        return total

    @method
    def alone(self, x: int) -> int:
        return x

    @method(concurrency=1)
    async def step_after_asking(self) -> None:
        """The second member first asks the first one, which waits for it."""
        group = aiodaft.current_group()
        if group.rank == 1:
            await group.members[0].step_after_asking()
        await group.barrier()

    @method(ordered=False)
    async def ping(self) -> None: ...

    @method(ordered=False)
    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


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

    @method
    async def follow(self, group: Group[Gang], epoch: int) -> None:
        """Wait until the change of the group has come here."""
        while group.epoch < epoch:
            await asyncio.sleep(0)

    @method
    async def drive_each(self, group: Group[Gang], holder: Other) -> list[int]:
        refs = group.each(Gang.alone, [1, holder.held(2)])
        await group[0].ping()
        self.is_sent.set()
        return await refs

    @method
    async def drive_often(self, group: Group[Gang], name: str, rounds: int) -> int:
        """The sum of all results."""
        return sum([sum(await group.all(getattr(Gang, name), 10)) for _ in range(rounds)])

    @method(ordered=False)
    async def drive_without_waiting(self, group: Group[Gang], name: str, rounds: int) -> int:
        refs = [group.all(getattr(Gang, name), 10) for _ in range(rounds)]
        return sum([sum(await one) for one in refs])

    @method
    def drive_from_thread(self, group: Group[Gang], name: str, rounds: int) -> int:
        refs = [group.all(getattr(Gang, name), 10) for _ in range(rounds)]
        return sum(one.result() for refs in refs for one in refs)

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
