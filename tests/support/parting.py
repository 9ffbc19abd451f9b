"""Members of groups that leave collectives before they are over."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import Any

from keyed_members import Keyer

import aiodaft
from aiodaft import method


class Parting(Keyer):
    @method(idempotent=True, retries=3)
    async def gather_and_die(self, fails: bool) -> list[int]:
        """Fail; or die when the collective with the one that fails has ended."""
        if fails:
            raise ValueError("a bad batch")
        try:
            return await self.group.all_gather(1, key="again")
        except aiodaft.CallCancelled:
            os.kill(os.getpid(), signal.SIGKILL)
            raise

    @method(idempotent=True, retries=3)
    def gather_and_die_in_thread(self, fails: bool) -> list[int]:
        if fails:
            raise ValueError("a bad batch")
        try:
            return self.group.all_gather(1, key="again").result()
        except aiodaft.CallCancelled:
            os.kill(os.getpid(), signal.SIGKILL)
            raise

    @method(idempotent=True, retries=3)
    async def gather_then_die(self, how: tuple[bool, str]) -> list[int]:
        """Gather; in the first life, then die when the calls of the others have returned."""
        dies, gate = how
        gathered = await self.group.all_gather(self.group.rank, key="again")
        if dies:
            with open(gate, encoding="utf-8"):
                os.kill(os.getpid(), signal.SIGKILL)
        return gathered

    @method
    async def gather_in_replica(self, failing: int | None) -> list[int]:
        """Gather the places in a replica, unless this member is the failing one."""
        replica: aiodaft.typing.CurrentGroup[Any] = self.group.along("tp")
        if replica.rank == failing:
            raise ValueError("a bad batch")
        return await replica.all_gather(replica.rank, key="x")

    @method
    async def leave(self, value: Any, key: Any, by: str) -> None:
        """Come to a collective, and stop waiting for it in one of several ways. Whether the call fails is up to it."""
        gather = self.group.all_gather
        if by == "cancel":
            gather(value, key=key).cancel()
        elif by == "deadline":
            async with aiodaft.deadline(0.02):
                await gather(value, key=key)
        elif by == "timeout":
            async with asyncio.timeout(0.02):
                await gather(value, key=key)
        else:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(gather(value, key=key).value())
                await asyncio.sleep(0)
                raise ValueError("a bad batch")

    @method
    async def leave_and_go_on(self, value: Any, key: Any, by: str) -> None:
        with suppress(TimeoutError, ExceptionGroup):
            await self.leave(value, key, by)

    @method
    async def late_value(self) -> Any:
        return await self.group.recv()

    @method
    async def leave_with_late_value(self, key: Any, by: str) -> None:
        """Stop waiting for a collective before the value is there."""
        with suppress(TimeoutError):
            async with aiodaft.deadline(0.02) if by == "deadline" else asyncio.timeout(0.02):
                await self.group.all_gather(self.late, key=key)

    @method
    async def expect(self) -> None:
        """Ask for the value without a deadline."""
        self.late = self.group.members[self.group.rank].late_value()
