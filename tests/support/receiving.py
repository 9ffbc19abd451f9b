"""An actor that looks at how the values for its calls come."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import torch
from here import current_peer

from aiodaft import Actor, method
from aiodaft.state import Traffic
from aiodaft_transport.tcp import TcpTransport


class Receiver(Actor):
    """Its process can be watched while it fetches."""

    def __init__(self) -> None:
        self._targets: list[memoryview] = []
        self._fetched = threading.Event()
        self._opened = asyncio.Event()
        self._tasks = 0

    @method
    async def make(self, *sizes: int) -> list[torch.Tensor]:
        return [torch.full((size,), float(size)) for size in sizes]

    @method
    async def ones(self, size: int) -> torch.Tensor:
        return torch.ones(size)

    @method
    async def ones_once_opened(self, size: int) -> torch.Tensor:
        await self._opened.wait()
        return torch.ones(size)

    @method(ordered=False)
    async def open(self) -> None:
        self._opened.set()

    @method(ordered=False)
    async def count_tasks(self) -> int:
        """The number of tasks that this process has made since the last call of this."""
        made, self._tasks = self._tasks, 0

        def make(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
            self._tasks += 1
            return asyncio.Task(coro, loop=loop, **options)

        asyncio.get_running_loop().set_task_factory(make)
        return made

    @method
    async def echo(self, value: Any) -> Any:
        return value

    @method
    async def total(self, *values: torch.Tensor) -> float:
        return sum(float(value.sum()) for value in values)

    @method
    async def total_of(self, values: list[torch.Tensor]) -> float:
        return sum(float(value.sum()) for value in values)

    @method
    def total_on_thread(self, value: torch.Tensor) -> float:
        return float(value.sum())

    @method
    async def traffic(self) -> Traffic:
        """The traffic of this process."""
        return current_peer().connections.traffic()

    @method
    async def fetch_together(self, count: int) -> None:
        """From now on a fetch goes on only when so many have begun."""
        transport: Any = current_peer().store.transport
        fetch, begun = transport.fetch, asyncio.Barrier(count)

        async def fetch_with_others(grant: Any, control: Any) -> memoryview:
            await begun.wait()
            view: memoryview = await fetch(grant, control)
            return view

        transport.fetch, transport.fetch_now = fetch_with_others, lambda grant, control: None

    @method
    async def watch_fetches(self) -> None:
        """Note when a fetch has ended."""
        transport: Any = current_peer().store.transport
        fetch, fetch_now = transport.fetch, transport.fetch_now

        def noted_fetch_now(grant: Any, control: Any) -> memoryview | None:
            view: memoryview | None = fetch_now(grant, control)
            if view is not None:
                self._fetched.set()
            return view

        async def noted_fetch(grant: Any, control: Any) -> memoryview:
            view: memoryview = await fetch(grant, control)
            self._fetched.set()
            return view

        transport.fetch, transport.fetch_now = noted_fetch, noted_fetch_now

    @method
    async def run_until_fetched(self) -> None:
        """Be under way until the value for another call is here."""
        while not self._fetched.is_set():
            await asyncio.sleep(0)

    @method
    def run_on_thread_until_fetched(self) -> bool:
        """The same on the actor's thread."""
        return self._fetched.wait(20)

    @method
    async def watch_pulls(self) -> None:
        """Remember where values that come over TCP are written to."""
        transport: Any = current_peer().store.transport
        assert isinstance(transport, TcpTransport)
        pull = transport._pull  # noqa: SLF001 - the seam of this test

        async def watched_pull(peer: str, remote: Any, number: int, target: memoryview, *part: int) -> None:
            if not (part and part[0]):
                target[:1] = target[-1:] = b"\0"
                self._targets.append(target)
            await pull(peer, remote, number, target, *part)

        transport._pull = watched_pull  # noqa: SLF001

    @method(ordered=False)
    async def kill_in_the_middle(self, pid: int) -> bool:
        """Kill a process when part of its value is here; returns whether the last byte was not."""
        while not (self._targets and self._targets[0][0]):
            await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        target = self._targets.pop()
        return not target[-1]

    @method
    async def pid(self) -> int:
        return os.getpid()

    @method
    async def bytes_of(self, value: int, count: int) -> torch.Tensor:
        """So many bytes of one value."""
        return torch.full((count,), value, dtype=torch.uint8)

    @method
    async def landing_blocks(self) -> int:
        """Blocks that values have come to, or are coming to."""
        transport = current_peer().store.transport
        assert isinstance(transport, TcpTransport)
        return transport.landing.live_blocks()
