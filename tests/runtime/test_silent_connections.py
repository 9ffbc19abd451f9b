"""The messages of a process over connections to nodes of other machines in order to notice that one is silent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aiodaft._protocol.ids import PeerId
from aiodaft._protocol.node.worker import PERIOD
from aiodaft._runtime.connections.far import FarConnections
from aiodaft._runtime.process import Timeouts
from aiodaft.testing import AutojumpLoop

NODE = PeerId("node-1@a")


class Line:
    """A connection, and the process that has it."""

    def __init__(self, remote: PeerId) -> None:
        loop = asyncio.get_running_loop()
        self.remote = remote
        self.lost: Exception | None = None
        self.traffic = SimpleNamespace(control_received=0)
        self.session = SimpleNamespace(calls={1: "a call under way"})
        self.asked: list[float] = []
        self.silent: list[PeerId] = []
        # Whether it answers.
        self.lives = True
        process: Any = SimpleNamespace(
            loop=loop, closed=None, env=SimpleNamespace(timeouts=Timeouts()),
            create_task=lambda coro, name: self._tasks.append(loop.create_task(coro)),
        )  # fmt: skip
        self._tasks: list[asyncio.Task[None]] = []
        network: Any = SimpleNamespace(reached_by=(), packed=bytes)
        far = FarConnections(process, network, cast("Any", self))
        far.on_silent = self.silent.append
        far.attach(cast("Any", self), cast("Any", None))

    def is_awaited(self) -> bool:
        return True

    def attach(self, sock: None, *, far: bool) -> None: ...

    def close(self, reason: Exception) -> None:
        self.lost = reason

    async def is_answered(self, remote: PeerId) -> bool:
        self.asked.append(asyncio.get_running_loop().time())
        self.traffic.control_received += self.lives
        return self.lives


def in_virtual_time(remote: PeerId, use: Callable[[Line], Any]) -> Line:
    async def main() -> Line:
        line = Line(remote)
        await use(line)
        return line

    with asyncio.Runner(loop_factory=AutojumpLoop) as runner:
        return runner.run(main())


def test_a_connection_on_which_something_comes_costs_no_beat() -> None:
    async def use(line: Line) -> None:
        for _ in range(1000):
            line.traffic.control_received += 1
            await asyncio.sleep(PERIOD / 2)

    assert in_virtual_time(NODE, use).asked == []


def test_a_connection_on_which_nothing_is_awaited_costs_no_beat() -> None:
    async def use(line: Line) -> None:
        line.session.calls.clear()
        await asyncio.sleep(1000 * PERIOD)

    line = in_virtual_time(NODE, use)
    assert (line.asked, line.lost) == ([], None)


def test_while_a_call_waits_long_there_is_one_beat_in_two_periods() -> None:
    line = in_virtual_time(NODE, lambda line: asyncio.sleep(1000 * PERIOD))
    assert len(line.asked) == 500
    assert line.lost is None


def test_a_node_that_is_silent_loses_its_connection_once() -> None:
    async def use(line: Line) -> None:
        line.lives = False
        await asyncio.sleep(100)

    line = in_virtual_time(NODE, use)
    assert str(line.lost) == "node-1@a has not answered for more than 12 s"
    assert (len(line.asked), line.silent) == (1, [NODE])


@pytest.mark.parametrize("remote", ["worker-1@a", "controller-1@a"])
def test_processes_of_users_are_not_watched(remote: str) -> None:
    async def use(line: Line) -> None:
        line.lives = False
        await asyncio.sleep(100)

    line = in_virtual_time(PeerId(remote), use)
    assert (line.asked, line.lost) == ([], None)
