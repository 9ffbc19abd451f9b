"""Programs on three hosts under seeded schedules of partitions, resets, and hosts that die: also the coordinator's.

Beside the checks of `test_simulation`: every node is there again, and of use, once the faults are over; a supervised
actor comes back; an epoch has one holder; nothing is left of programs that have ended, on any node; and nodes end.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
from seeds import of_the_day
from sim_hosts import HostProgram
from sim_program import failures, finds

from aiodaft._protocol.coordination.registry import Registry
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.node.nodes import CoordinatorContact, LocalNode
from aiodaft._runtime.peer import Replies
from aiodaft.exceptions import DaftError


@pytest.fixture(scope="module", autouse=True)
def little_to_collect() -> None:
    """Each schedule collects garbage several times; the objects of earlier tests would take seconds."""
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize("part", range(2))
def test_schedules_of_the_day_of_three_hosts_keep_every_promise(part: int) -> None:
    assert failures(of_the_day(10, 5_000, part), HostProgram) == {}


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(10))
def test_five_thousand_schedules_of_three_hosts_keep_every_promise(part: int) -> None:
    assert failures(range(500 * part, 500 * (part + 1)), HostProgram) == {}


# Bugs that are planted, each in one place, and their effects.


async def look_nowhere(contact: CoordinatorContact) -> bool:
    """Never find the successor of a coordinator."""
    return True


def forget_calls(replies: Replies, connection: Connection, error: DaftError) -> None:
    """Never tell that a call is lost."""
    connection.session.calls.clear()


@pytest.mark.parametrize(
    ("where", "name", "bug", "seen"),
    [
        (CoordinatorContact, "find_again", look_nowhere, "of no use"),
        # It takes half a minute.
        pytest.param(
            *(LocalNode, "_owner_lost", lambda node, connection, reason: None, "workers are left"),
            marks=pytest.mark.soak,
        ),
        (Registry, "release", lambda registry, peer, actor: [], "still has"),
        (Replies, "connection_lost", forget_calls, "a task waits"),
    ],
)
def test_a_planted_bug_of_hosts_is_found(
    monkeypatch: pytest.MonkeyPatch, where: type, name: str, bug: Callable[..., Any], seen: str
) -> None:
    monkeypatch.setattr(where, name, bug)
    assert finds(seen, HostProgram)
