"""A supervisor and its directory, without processes: who is restarted, where, and what those are told who ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from actors import Echo
from rooms import ELSEWHERE, THERE, Bench, turns

from aiodaft._protocol.calls.following import NOWHERE, Location
from aiodaft._protocol.ids import FIRST_USER_ACTOR, ActorId, PeerId, incarnation
from aiodaft._protocol.supervision.supervision import Backoff, Restart
from aiodaft._runtime.calls.call import Caller, PendingCall, Request, Target
from aiodaft._runtime.calls.following import Followers
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.node.worker import Place
from aiodaft._runtime.objects.objects import Objects
from aiodaft._runtime.peer import Locator
from aiodaft._runtime.supervision.child_spec import ChildSpec
from aiodaft._runtime.supervision.directory import Directory
from aiodaft._runtime.supervision.supervisor import Child
from aiodaft.actor import Actor, Handle
from aiodaft.exceptions import ActorDied, RestartLimitReached, SpawnFailed
from aiodaft.methods import method
from aiodaft.ref import Ref

ACTOR = FIRST_USER_ACTOR


class Node(Actor):
    """What a supervisor asks of the node agent."""

    @method
    async def place_again(self, label: str, actor: int, beside: str | None) -> Place:
        raise NotImplementedError

    @method
    async def vacate(self, peer: str, actor: int, reason: str, keep: bool = False, answers: bool = True) -> None:
        raise NotImplementedError


class House(Bench):
    """A process that supervises actors; the test answers its calls."""

    def __init__(self, policy: Restart) -> None:
        super().__init__()
        parts: Any = SimpleNamespace(take_note=None, running_call=None, introduce=lambda remote: asyncio.sleep(0))
        connections = Connections(self.process, parts)
        connections.to(THERE)
        objects = Objects(self.process, connections, self.store, parts)
        self.caller: Any = SimpleNamespace(
            process=self.process, connections=connections, objects=objects, actors={}, sender=self, outgoing=self
        )
        self.caller.next_number = self.process.next_number
        # The calls that were made and not answered: the method, its arguments, what gets the answer.
        self.calls: list[tuple[str, tuple[Any, ...], PendingCall]] = []
        self.failed: list[BaseException] = []
        self.sender = self
        self.node: Any = self._handle(Node)
        self.directory = Directory(cast(Caller, self.caller), self.node)
        self.supervisor = self.directory.new_supervisor(policy, 0, lambda error, what: self.failed.append(error))
        self.followers = Followers(cast(Caller, self.caller), self._locate)

    def _handle(self, cls: type) -> Any:
        return Handle(self.target(self.process.id, ActorId(1), "node agent"), cls)

    def target(self, remote: PeerId, actor: ActorId, label: str) -> Target:
        return Target(self.caller, remote, actor, label, None)

    def _locate(self, owner: PeerId, number: ActorId, wait: bool) -> Ref[Location]:
        located: Ref[Location] = self._handle(Locator).locate(number, wait)
        return located

    def submit(self, request: Request) -> None:
        self.calls.append((request.spec.name, request.args, request.state))

    def child(self, name: str = "Echo-1", actor: ActorId = ACTOR, beside: Target | None = None) -> Child:
        """A supervised actor that is up."""
        followed = self.followers.get(self.process.id, Location(THERE, actor), name)
        spec = ChildSpec(Echo, name, (), {}, None)
        child = self.directory.begin(Child(followed, spec, self.supervisor, beside))
        spec.make(self.caller, THERE, actor, again=True)
        self.calls.pop()
        self.supervisor.join(child, self.supervisor.policy.kind)
        followed.move(child.place)
        return child

    async def answer(self, name: str, value: Any) -> tuple[Any, ...]:
        """Answer the oldest call, which is of this method; its arguments."""
        while not self.calls:
            await asyncio.sleep(0)
        called, args, state = self.calls.pop(0)
        assert called == name
        if isinstance(value, BaseException):
            state.on_error(value)
        else:
            state.on_plain(value)
        await turns()
        return args


def died(exit_code: int = 1) -> ActorDied:
    error = ActorDied("it ended")
    error.exit_code = exit_code
    return error


@pytest.fixture
async def house() -> AsyncIterator[House]:
    made = House(Restart(intensity=1, period=60, backoff=Backoff(base=0)))
    yield made
    await made.process.tasks.aclose()


async def test_an_actor_is_made_again_after_its_process_died_and_waiting_questions_are_answered(house: House) -> None:
    child = house.child()
    house.directory.process_ended(THERE, died(), wanted=False)
    asking = asyncio.ensure_future(house.directory.locate(ACTOR, True))  # noqa: TID251 - the test waits for it
    assert (await house.directory.locate(ACTOR, False)).peer == NOWHERE
    again = incarnation(ACTOR, 1)
    assert (await house.answer("place_again", Place(ELSEWHERE, again, ())))[:2] == ("Echo-1", again)
    assert not asking.done()
    assert (await house.answer("host", None))[:2] == (again, "Echo-1")
    assert await asking == child.target.place == Location(ELSEWHERE, again)
    assert (child.restarts, house.failed, house.calls) == (1, [], [])


async def test_an_actor_is_not_made_again_after_a_wanted_end(house: House) -> None:
    house.child()
    house.directory.process_ended(THERE, died(), wanted=True)
    await turns()
    assert isinstance((await house.directory.locate(ACTOR, True)).ended, ActorDied)
    await house.answer("vacate", None)
    assert (house.failed, house.calls) == ([], [])


async def test_the_death_of_another_process_concerns_no_actor_here(house: House) -> None:
    house.child()
    house.directory.process_ended(ELSEWHERE, died(), wanted=False)
    assert (await house.directory.locate(ACTOR, True)).peer == THERE


async def test_a_restart_that_fails_counts_as_a_death_and_the_limit_ends_the_actor(house: House) -> None:
    child = house.child()
    over: list[ActorId] = []
    house.directory.on_over = over.append
    house.directory.process_ended(THERE, died(), wanted=False)
    asking = asyncio.ensure_future(house.directory.locate(ACTOR, True))  # noqa: TID251 - the test waits for it
    await house.answer("place_again", SpawnFailed("there is no room"))
    (error,) = house.failed
    assert isinstance(error, RestartLimitReached)
    assert [type(attempt) for attempt in error.attempts] == [ActorDied, SpawnFailed]
    assert (await asking).ended is child.target.ended is error
    # It gives its resources back, and is not known any more.
    assert (await house.answer("vacate", None))[1] == incarnation(ACTOR, 1)
    assert (over, house.directory.find(child.target), house.calls) == ([ACTOR], None, [])


async def test_an_actor_that_dies_while_it_is_made_again_is_not_taken_for_up(house: House) -> None:
    house.child()
    house.directory.process_ended(THERE, died(), wanted=False)
    again = incarnation(ACTOR, 1)
    await house.answer("place_again", Place(ELSEWHERE, again, ()))
    house.directory.process_ended(ELSEWHERE, died(), wanted=False)
    await house.answer("host", None)
    assert [type(error) for error in house.failed] == [RestartLimitReached]


async def test_a_transient_actor_that_ended_by_itself_is_over(house: House) -> None:
    house = House(Restart(kind="transient"))
    child = house.child()
    house.directory.process_ended(THERE, died(exit_code=0), wanted=False)
    ended = (await house.directory.locate(ACTOR, True)).ended
    assert isinstance(ended, ActorDied)
    assert ended is child.target.ended
    await house.answer("vacate", None)
    assert (house.failed, house.calls) == ([], [])


async def test_an_actor_that_is_stopped_while_it_is_down_is_not_made_again(house: House) -> None:
    house = House(Restart(intensity=1, period=60, backoff=Backoff(base=50)))
    child = house.child()
    house.directory.process_ended(THERE, died(), wanted=False)
    asking = asyncio.ensure_future(house.directory.locate(ACTOR, True))  # noqa: TID251 - the test waits for it
    await turns()
    assert house.directory.retire(child.target) is child
    await child.settled()
    assert "stopped by its owner" in str((await asking).ended)
    await house.answer("vacate", None)
    assert (house.failed, house.calls) == ([], [])
    await house.process.tasks.aclose()


async def test_a_guest_without_its_host_ends_and_its_siblings_are_made_again(house: House) -> None:
    guest = house.child("Guest-1", beside=Target(house.caller, THERE, ActorId(ACTOR + 1), "Host-1", None))
    other = house.child("Other-1", ActorId(ACTOR + 2))
    house.directory.process_ended(THERE, died(), wanted=False)
    await house.answer("place_again", died())
    (error,) = house.failed
    assert guest.target.ended is error
    assert str(error) == "Guest-1 cannot be made again: Host-1, in the process of which it lived, is gone"
    again = incarnation(other.number, 1)
    assert (await house.answer("place_again", Place(ELSEWHERE, again, ())))[0] == "Other-1"
    await house.answer("vacate", None)
    await house.answer("host", None)
    assert (other.restarts, len(house.failed), house.calls) == (1, 1, [])


async def test_a_guest_waits_for_a_place_beside_a_host_that_comes_back(house: House) -> None:
    """Its host is supervised: that it was not there at this moment is one more failure."""
    host = house.child("Host-1", ActorId(ACTOR + 1))
    house.child("Guest-1", beside=host.target)
    house.directory.process_ended(THERE, died(), wanted=False)
    again = incarnation(host.number, 1)
    await house.answer("place_again", Place(ELSEWHERE, again, ()))
    await house.answer("locate", Location(ELSEWHERE, again))
    await house.answer("host", None)
    assert (await house.answer("place_again", died()))[2] == ELSEWHERE
    assert [type(error) for error in house.failed] == [RestartLimitReached]
