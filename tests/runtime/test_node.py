"""Who hears of a process that ended by accident."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aiodaft import ActorDied
from aiodaft._protocol.ids import FIRST_USER_ACTOR, ActorId, PeerId
from aiodaft._protocol.ledger import Ledger
from aiodaft._runtime.logs import WorkerOutput
from aiodaft._runtime.node import Node, Worker
from aiodaft._runtime.nursery import Child, Ending

WORKER = PeerId("worker-1")
KILLED = Ending(0, None, "SIGKILL")


class Clock:
    """A loop whose timers go off when the test says so."""

    def __init__(self) -> None:
        self._due: list[Callable[[], object]] = []

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> None:
        self._due.append(lambda: callback(*args))

    def go_off(self) -> None:
        for callback in self._due:
            callback()
        self._due.clear()


class Surroundings:
    """What a node needs of its process and of its fork server."""

    def __init__(self) -> None:
        self.loop = Clock()
        self.on_ended: Callable[[Child, Ending], object] = lambda child, ending: None


class Machine:
    """A node with one worker, and what it has told."""

    def __init__(self) -> None:
        self.around = Surroundings()
        around: Any = self.around
        self.node = Node(around, around, Ledger(cpus=1, gpus=0), uvloop=False)
        self.told: list[ActorId] = []
        self.node.on_died = lambda peer, actor, error: self.told.append(actor)
        self.child = Child(1, WorkerOutput(), asyncio.get_running_loop())
        worker = Worker(WORKER, self.child, pid=1000)
        worker.add(FIRST_USER_ACTOR, "Echo-1")
        self.node._workers[WORKER] = worker

    def end(self) -> None:
        """The fork server reports the end of the process."""
        self.child.ended.set_result(KILLED)
        self.around.on_ended(self.child, KILLED)


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("asked_first", [True, False])
async def test_the_scope_hears_of_a_death_unless_a_call_failed_of_it(in_flight: int, asked_first: bool) -> None:
    machine = Machine()
    if asked_first:
        asking = asyncio.get_running_loop().create_task(machine.node.explain(WORKER, in_flight))
        await asyncio.sleep(0)
        machine.end()
    else:
        machine.end()
        asking = asyncio.get_running_loop().create_task(machine.node.explain(WORKER, in_flight))
    error = await asking
    assert isinstance(error, ActorDied)
    assert "Echo-1 (pid 1000) was killed by SIGKILL" in str(error)
    machine.around.loop.go_off()
    assert machine.told == ([] if in_flight else [FIRST_USER_ACTOR])


async def test_a_death_that_nobody_asks_about_is_told_once_and_remembered() -> None:
    machine = Machine()
    machine.end()
    machine.around.loop.go_off()
    assert machine.told == [FIRST_USER_ACTOR]
    assert isinstance(await machine.node.explain(WORKER, 1), ActorDied)
    assert machine.told == [FIRST_USER_ACTOR]
