"""The whole control plane under seeded schedules: time, processes, sockets, threads and fate are simulated.

Every schedule is checked: no call runs twice, each ends in one way, no task waits for ever, `.executed` is true,
calls of one caller begin in order, values are right, and nothing is left of anything. To see one again, with all that
happened in it: `program = Program(seed)`, `program.run()`, and then `program.world.loop.trace`.
"""

from __future__ import annotations

import ast
import gc
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from seeds import of_the_day
from sim_channels import ChannelProgram, Impatient
from sim_program import Program, failures, finds
from sim_spawning import SpawningProgram
from simulated.simulated_loop import collect

from aiodaft._protocol.calls.mailbox import QUEUED, Mailbox
from aiodaft._protocol.channels.channel import ChannelId, Command, Kind, Message, Tell
from aiodaft._protocol.channels.channel_end import ChannelTable, End
from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.objects.ref_table import RefTable
from aiodaft._runtime.peer import Replies
from aiodaft.exceptions import DaftError

SUPPORT = Path(__file__).parent.parent / "support"


@pytest.fixture(scope="module", autouse=True)
def little_to_collect() -> None:
    """Each schedule collects garbage several times; the objects of earlier tests would take seconds."""
    gc.collect()
    gc.freeze()


def test_schedules_are_collected_with_all_that_their_processes_held() -> None:
    import anyio  # noqa: F401 - its scopes hold the tasks that they are in

    loops: list[weakref.ref[object]] = []
    for seed in range(10):
        program = SpawningProgram(seed)
        program.run()
        loops.append(weakref.ref(program.world.loop))
        del program
    gc.collect()
    assert [seed for seed, loop in enumerate(loops) if loop() is not None] == []


# In parts of a second each, so that also a machine with much else to do finishes one within the limit.
@pytest.mark.parametrize("part", range(3))
def test_schedules_of_the_day_keep_every_promise(part: int) -> None:
    assert failures(of_the_day(20, 10_000, part)) == {}


def test_schedules_of_the_day_keep_what_channels_promise() -> None:
    assert failures(of_the_day(20, 10_000), ChannelProgram) == {}


@pytest.mark.parametrize("part", range(2))
def test_schedules_of_the_day_of_actors_that_spawn_leave_no_process_and_no_name(part: int) -> None:
    assert failures(of_the_day(20, 10_000, part), SpawningProgram) == {}


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("program", [Program, ChannelProgram, SpawningProgram])
def test_ten_thousand_schedules_keep_every_promise(part: int, program: type[Program]) -> None:
    assert failures(range(1000 * part, 1000 * (part + 1)), program) == {}


def trace_of(seed: int) -> list[tuple[Any, ...]]:
    # The objects of an earlier program are not to end in the middle of this one.
    collect()
    program = Program(seed)
    program.run()
    return program.world.loop.trace


def test_a_seed_can_be_run_again() -> None:
    for seed in range(20):
        assert trace_of(seed) == trace_of(seed)


def test_a_seed_is_the_same_in_another_process(tmp_path: Path) -> None:
    # Hashes of strings differ there, and with them the order of sets; paths too, and the compiled and loaded modules.
    support = shutil.copytree(SUPPORT, tmp_path / "support", ignore=shutil.ignore_patterns("__pycache__"))
    code = "import sys; sys.path.insert(0, sys.argv[1]); from sim_program import Program; p = Program(7); p.run(); "
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", f"{code} print(p.world.loop.trace)", str(support)]
    there = ast.literal_eval(subprocess.check_output(command, env=environment, text=True))
    for index, both in enumerate(zip_longest(trace_of(7), there)):
        assert both[0] == both[1], f"event {index}"


# Bugs that are planted, each in one place, and their effects.


def start_again(mailbox: Mailbox[Any]) -> Iterator[Any]:
    for entry in startable(mailbox):
        yield entry
        entry.stage = QUEUED
        yield entry


startable = Mailbox.startable


def start_at_once(mailbox: Mailbox[Any], entry: Any) -> bool:
    if entry.stage is not QUEUED:
        return arrive(mailbox, entry)
    mailbox._start(entry)  # noqa: SLF001 - a planted bug
    return True


arrive = Mailbox.arrive


def forget_calls(replies: Replies, connection: Connection, error: DaftError) -> None:
    connection.session.calls.clear()


def say_it_did_not_run(replies: Replies, connection: Connection, error: DaftError) -> None:
    for number, state in list(connection.session.calls.items()):
        if not connection.session.withdraw(number):
            connection.session.settle(number)
        state.on_lost(type(error)(*error.args, executed=False))


@pytest.mark.parametrize(
    ("where", "name", "bug", "seen"),
    [
        (Mailbox, "startable", start_again, "ran 2 times"),
        (Mailbox, "arrive", start_at_once, "which was made later"),
        (Replies, "connection_lost", forget_calls, "a task waits"),
        (Replies, "connection_lost", say_it_did_not_run, "does not say whether it ran"),
        (RefTable, "take_back", lambda table, number, peer: None, "own refs"),
    ],
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, where: type, name: str, bug: Callable[..., Any], seen: str
) -> None:
    monkeypatch.setattr(where, name, bug)
    assert finds(seen, Program)


def without(kind: Kind) -> Callable[..., list[Command]]:
    """A table that keeps messages of one kind from other processes."""

    def run_without(table: ChannelTable, channel_id: ChannelId, commands: list[Command]) -> list[Command]:
        others = run(table, channel_id, commands)
        return [command for command in others if not (isinstance(command, Tell) and command.message.kind is kind)]

    return run_without


run = ChannelTable.run


def give_back_what_is_kept(end: End, sender: PeerId, message: Message) -> list[Command]:
    commands = handle(end, sender, message)
    if message.kind is not Kind.ITEM or end.was_handed_on:
        return commands
    # Once, or it would come again for ever.
    end.was_handed_on = True
    return [*commands, Tell(end.keeper, Message(Kind.BACK, 0, message.body))]


handle = End.handle


@pytest.mark.parametrize(
    ("where", "name", "bug", "seen", "program"),
    [
        (ChannelTable, "run", without(Kind.BACK), "items were lost", Impatient),
        (End, "handle", give_back_what_is_kept, "received twice", ChannelProgram),
        (ChannelTable, "run", without(Kind.MOVED), "a task waits", ChannelProgram),
        (End, "peer_lost", lambda end, peer: [], "a task waits", ChannelProgram),
        (ChannelTable, "drop", lambda table, channel_id: [], "channels", ChannelProgram),
        (End, "may_send", property(lambda end: False), "before it was closed", ChannelProgram),
    ],
)
def test_a_bug_planted_in_channels_is_found(
    monkeypatch: pytest.MonkeyPatch,
    where: type,
    name: str,
    bug: Callable[..., Any],
    seen: str,
    program: type[ChannelProgram],
) -> None:
    monkeypatch.setattr(where, name, bug)
    assert finds(seen, program)
