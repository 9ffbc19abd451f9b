"""The connections that a node makes between two of its processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.node.workers import Introductions
from aiodaft.exceptions import ActorDied, ResourceExhausted

NODE, A, B = PeerId("controller-1"), PeerId("worker-a"), PeerId("worker-b")


def made(refusals: list[OSError]) -> tuple[Introductions, list[int]]:
    """The introductions of a node, and a list with an item for each connection between its workers."""
    sockets: list[int] = []

    def introduce(_: object) -> None:
        if refusals:
            raise refusals.pop()
        sockets.append(1)

    connections: Any = SimpleNamespace(get=lambda _: None, to=lambda _: SimpleNamespace(introduce=introduce))
    nodes: Any = None
    return Introductions(NODE, connections, nodes, {A, B}, lambda peer: ActorDied(f"there is no {peer}")), sockets


def test_processes_that_ask_at_the_same_time_get_one_connection_and_another_one_when_it_is_lost() -> None:
    introductions, sockets = made([])
    for known, count in ((0, 1), (1, 2), (2, 3)):
        introductions.introduce(A, B, known)
        introductions.introduce(B, A, known)
        assert len(sockets) == count
    introductions.forget(B)
    introductions.introduce(A, B, 0)
    assert len(sockets) == 4


def test_a_connection_that_a_node_has_no_descriptors_for_is_made_when_it_is_asked_again() -> None:
    introductions, sockets = made([OSError(24, "Too many open files")])
    with pytest.raises(ResourceExhausted, match="cannot be connected"):
        introductions.introduce(A, B, 0)
    introductions.introduce(A, B, 0)
    assert len(sockets) == 1
