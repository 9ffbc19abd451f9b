"""Workers that have methods of a user."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from typing import Any

import torch

from aiodaft import current_group, method
from aiodaft._runtime.groups import line
from aiodaft.tensor import worker
from aiodaft.tensor.worker import Worker


class Extended(Worker):
    """A worker with methods of a user."""

    @method
    def live_apart(self) -> None:
        """From now on, this member takes others for those of other hosts."""
        line.can_share_memory = lambda first, second: False

    @method
    def pid(self) -> int:
        return os.getpid()

    @method
    def shape(self, step: str, name: str) -> tuple[int, ...]:
        """The shape of the local part of a parameter."""
        return tuple(self.state(step)[name].shape)

    @method
    def modules(self) -> list[str]:
        """The modules of torch that planning alone needs, and that are here."""
        return [name for name in sys.modules if name.startswith(("torch.distributed.tensor", "aiodaft.tensor.plan"))]

    @method
    def rows(self, by_rank: list[int]) -> torch.Tensor:
        """As many rows as this rank has in a list."""
        rank = current_group().rank
        return torch.full((by_rank[rank], 3), float(rank))

    @method
    def counts(self) -> tuple[int, int]:
        """The numbers of tensors and of programs of all controllers."""
        sessions = self._sessions.values()
        return sum(len(one.tensors) for one in sessions), sum(len(one.loaded) for one in sessions)

    @method
    def double(self, number: int) -> int:
        return 2 * number

    @method
    def collectives(self) -> dict[str, int]:
        """The number of collectives that all controllers have begun, by axis."""
        rows = [row for session in self._sessions.values() for row in session._rows.items()]  # noqa: SLF001 - counts of a worker
        return {axis: sum(row.begun for name, row in rows if name == axis) for axis in dict(rows)}


class Held(Worker):
    """A worker that copies its state when it is told to."""

    @method
    async def hold(self) -> None:
        """Make no copy until `go_on`. For steps that are loaded after this."""
        self._gate, self._update = threading.Event(), asyncio.Event()
        copy, wait, loop = worker._copy, worker._Session.wait_copied, asyncio.get_running_loop()  # noqa: SLF001 - of steps

        def held(*args: Any) -> None:
            self._gate.wait()
            copy(*args)

        def told(session: Any) -> None:
            loop.call_soon_threadsafe(self._update.set)
            wait(session)

        vars(worker)["_copy"], worker._Session.wait_copied = held, told  # type: ignore[method-assign]  # noqa: SLF001 - as above

    @method
    async def wait_update(self) -> None:
        await self._update.wait()

    @method
    async def go_on(self) -> None:
        self._gate.set()


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x
