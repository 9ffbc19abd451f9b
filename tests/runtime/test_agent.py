"""The agent's answers to others, without processes: it makes, describes and stops actors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest
from rooms import THERE, Bench, turns

from aiodaft import Actor, method
from aiodaft._protocol.ids import FIRST_USER_ACTOR, ActorId, incarnation
from aiodaft._runtime.actors.host import Host
from aiodaft._runtime.actors.hosted_actor import current_call
from aiodaft._runtime.agent import Agent
from aiodaft._runtime.connections.ring_poller import RingPoller
from aiodaft._runtime.diagnostics.process_view import ActorView
from aiodaft.exceptions import ActorDied

ACTOR = FIRST_USER_ACTOR


class Desk(Actor):
    """Reports its events."""

    happened: list[str]

    def __init__(self, first: str) -> None:
        self.happened = [first]
        if first == "fail":
            raise ValueError("it cannot be made")

    def on_restart(self, epoch: int) -> None:
        self.happened.append(f"epoch {epoch}")

    async def __aexit__(self, *_: object) -> None:
        self.happened.append("left")
        raise OSError("it cannot leave")

    async def __aenter__(self) -> Desk:
        return self

    @method
    async def nothing(self) -> None: ...


class Plain:
    """A class that is no actor."""


class Office(Bench):
    """A process with an agent, which a call from another process asks."""

    def __init__(self) -> None:
        super().__init__(grace=0)
        self.host = Host(self.process, self.store, RingPoller(self.process.loop))
        objects: Any = SimpleNamespace(store=self.store)
        unused: Any = None
        # The actors that the node was told to remove.
        self.vacated: list[tuple[ActorId, str]] = []
        ways: Any = SimpleNamespace(vacate=lambda *told: self.vacated.append(told))
        tracing: Any = SimpleNamespace(session=None)
        self.agent = Agent(self.host, objects, unused, unused, ways, unused, tracing)

    async def ask(self, request: Awaitable[Any], attempt: int = 0) -> Any:
        """Serve a call; all threads work."""
        serving: Any = SimpleNamespace(caller=THERE, attempt=attempt)
        token = current_call.set(serving)
        try:
            asked = asyncio.ensure_future(request)  # noqa: TID251 - the test waits for it
        finally:
            current_call.reset(token)
        while not asked.done():
            await turns()
            for thread in self.threads.values():
                while thread.jobs:
                    thread.turn()
        return await asked


@pytest.fixture
async def office() -> Office:
    return Office()


async def test_an_actor_is_made_on_its_own_thread_and_described(office: Office) -> None:
    await office.ask(office.agent.host(ACTOR, "Desk-1", None, None, None, Desk, "made"))
    hosted = office.host.actors[ACTOR]
    assert (hosted.name, hosted.instance.happened) == ("Desk-1", ["made"])
    assert "Desk-1" in office.threads
    view, stored_bytes = await office.ask(office.agent.report(ACTOR))
    assert view == ActorView("Desk-1", "Desk", (), 0, 0, 0, 0, 0)
    assert stored_bytes == 0


async def test_a_later_incarnation_is_told_its_epoch(office: Office) -> None:
    await office.ask(office.agent.host(ACTOR, "Desk-1", None, None, None, Desk, "made"), attempt=2)
    assert office.host.actors[incarnation(ACTOR, 2)].instance.happened == ["made", "epoch 2"]


async def test_an_actor_that_cannot_be_made_is_not_there_and_its_error_says_where(office: Office) -> None:
    with pytest.raises(ValueError, match="it cannot be made") as raised:
        await office.ask(office.agent.host(ACTOR, "Desk-1", None, None, None, Desk, "fail"))
    assert raised.value.__notes__ == [f"raised while Desk-1 was made (pid {office.process.pid}, node)"]
    assert dict(office.host.actors) == {}


async def test_a_plain_class_has_a_limit_only_if_it_is_asked_for(office: Office) -> None:
    await office.ask(office.agent.host(ACTOR, "Plain-1", None, None, None, Plain))
    await office.ask(office.agent.host(ActorId(ACTOR + 1), "Plain-2", 5, None, None, Plain))
    assert [hosted.bounds is None for hosted in office.host.actors.values()] == [True, False]


async def test_an_actor_that_cannot_leave_is_gone_all_the_same(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    await office.ask(office.agent.host(ACTOR, "Desk-1", None, None, None, Desk, "made"))
    desk = office.host.actors[ACTOR].instance
    await office.ask(office.agent.stop(ACTOR, "a test", 0.0))
    assert "leaving Desk-1 failed" in caplog.text
    assert desk.happened == ["made", "left"]
    # The caller may die before it can tell the node.
    assert office.vacated == [(incarnation(ACTOR, 0), "a test")]
    # Then there is nothing to stop and nothing to report.
    await office.ask(office.agent.stop(ACTOR, "a test", 0.0))
    with pytest.raises(ActorDied, match="the actor was stopped"):
        await office.ask(office.agent.report(ACTOR))
