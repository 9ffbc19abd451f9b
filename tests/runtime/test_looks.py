"""Looks at an actor whose connection is reset meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from inside import process_asked_for, report_asked_for

from aiodaft import overview
from aiodaft.exceptions import ActorDied, PeerLost

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])
LOST = PeerLost("the connection ended")


async def answered(question: Any, patience: float) -> bool:
    return True


def asked(answers: list[Any], *, member: bool = True) -> Any:
    """A controller whose questions have these answers, one after the other."""

    async def ask(*_: object) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    nodes = SimpleNamespace(of=lambda peer: SimpleNamespace(process_of=ask), is_member=lambda node: member)
    process = SimpleNamespace(env=SimpleNamespace(timeouts=SimpleNamespace(report=1.0)))
    return SimpleNamespace(nodes=nodes, process=process, agent_of=lambda peer: SimpleNamespace(report=ask))


@pytest.mark.parametrize(
    ("answers", "found"),
    [(["view"], "view"), ([LOST, "view"], "view"), ([LOST, LOST], ()), ([ActorDied("it ended")], None)],
)
async def test_a_report_is_asked_for_again_after_the_connection_was_reset(
    answers: list[Any], found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "is_answered", answered)
    target: Any = SimpleNamespace(remote="worker-1@one", actor=100, label="Echo-1")
    assert await report_asked_for(asked([*answers]), target) == found


@pytest.mark.parametrize(
    ("answers", "member", "found"),
    [([LOST, "process"], True, "process"), ([LOST, LOST], True, None), ([LOST, "process"], False, None)],
)
async def test_a_node_that_is_in_the_cluster_is_asked_again_after_its_connection_was_reset(
    answers: list[Any], member: bool, found: Any
) -> None:
    target: Any = SimpleNamespace(remote="worker-1@one", label="Echo-1")
    assert await process_asked_for(asked([*answers], member=member), target) == found
