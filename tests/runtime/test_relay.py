"""The output of actors on its way to a program on another machine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import pytest
from log_ear import listening

from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.logs.console import Console, ConsoleThread, Relay
from aiodaft._runtime.logs.options import Entry, Life, Line, Source, Written
from aiodaft._runtime.platform.tasks import TaskOwner
from aiodaft._runtime.process import Env, Process
from aiodaft.exceptions import PeerLost
from aiodaft.logs import Logs

SOURCE = Source(PeerId("worker-1"), "Model-1", "Model-1", 7, "n1")


class Node:
    """The part of their process that a relay and a console use."""

    closed: str | None = None

    def __init__(self) -> None:
        self.env = Env()
        self.loop = asyncio.get_running_loop()
        self.tasks = TaskOwner("node")

    def call_soon(self, callback: Callable[[], object]) -> None:
        self.loop.call_soon_threadsafe(callback)


class Program:
    """Shows its input, when `takes` is set; and has the lines that a node shows in its place."""

    def __init__(self) -> None:
        self.came: list[str] = []
        self.kept: list[str] = []
        self.asked = asyncio.Event()
        self.takes = asyncio.Event()
        self.is_gone = False

    async def show(self, written: list[Written]) -> None:
        self.asked.set()
        await self.takes.wait()
        if self.is_gone:
            raise PeerLost("the program is gone")
        self.came += texts(written)

    def write(self, source: Source, entries: Sequence[Entry]) -> None:
        self.kept += texts([(source, entries)])


def texts(written: Sequence[Written]) -> list[str]:
    return [entry.text for _, entries in written for entry in entries if isinstance(entry, Line)]


def relay_to(program: Program) -> Relay:
    send = cast("Callable[[list[Written]], Awaitable[object]]", program.show)
    return Relay(cast("Process", Node()), send, program)


def lines(*numbers: int) -> list[Line]:
    return [Line(1, str(number), 0.0) for number in numbers]


async def test_lines_come_in_order_and_only_when_the_earlier_ones_were_shown() -> None:
    program = Program()
    relay = relay_to(program)
    await asyncio.to_thread(relay.write, SOURCE, lines(0))
    await program.asked.wait()
    for number in range(1, 2_500):
        relay.write(SOURCE, lines(number))
    assert program.came == []
    program.takes.set()
    await relay.wait_idle()
    assert program.came == [str(number) for number in range(2_500)]
    assert program.kept == []


async def test_lines_that_a_program_cannot_take_in_time_are_counted() -> None:
    program = Program()
    relay = relay_to(program)
    relay.write(SOURCE, lines(*range(30_000)))
    # It has to know the living, even if all else is left out.
    relay.write(SOURCE, [Life(begins=False)])
    program.takes.set()
    with listening() as ear:
        await relay.wait_idle()
        assert (await ear.hears("left out")).startswith("10000 lines")
    assert program.came == [str(number) for number in range(20_000)]


async def test_a_node_shows_what_a_lost_program_cannot_and_tries_again() -> None:
    program = Program()
    relay = relay_to(program)
    program.is_gone = True
    program.takes.set()
    relay.write(SOURCE, lines(1, 2))
    await relay.wait_idle()
    assert (program.came, program.kept) == ([], ["1", "2"])
    program.is_gone = False
    relay.write(SOURCE, lines(3))
    await relay.wait_idle()
    assert (program.came, program.kept) == (["3"], ["1", "2"])


async def test_a_program_that_attaches_shows_lines_of_ranks_that_have_waited(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = ConsoleThread(cast("Process", Node()), Console(Logs(merge=0.01)))
    ranks = [SOURCE._replace(process=PeerId(f"w{rank}"), names=f"T-1[{rank}]", pid=rank) for rank in range(3)]
    await console.show([(rank, [Life(begins=True)]) for rank in ranks])
    await console.show([(rank, lines(5)) for rank in ranks[:2]])
    text = ""
    while not text:
        await asyncio.sleep(0)
        text = capsys.readouterr().out
    await console.show([(ranks[2], lines(6))])
    await console.aclose()
    assert text + capsys.readouterr().out == "(T-1 x2 ranks 0-1) 5\n(T-1[2] pid=2) 6\n"
