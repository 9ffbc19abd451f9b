"""Members of groups that leave collectives before they are over."""

from __future__ import annotations

import os
import signal
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

    @method
    async def gather_in_replica(self, failing: int | None) -> list[int]:
        """Gather the places in a replica, unless this member is the failing one."""
        replica: aiodaft.CurrentGroup[Any] = self.group.along("tp")
        if replica.rank == failing:
            raise ValueError("a bad batch")
        return await replica.all_gather(replica.rank, key="x")
