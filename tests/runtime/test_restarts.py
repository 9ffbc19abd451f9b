"""A supervisor and its directory, without processes: the restarted actors, their places, and the answers to callers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from actors import Echo
from rooms import ELSEWHERE, HERE, THERE, Bench, turns

from aiodaft._protocol.calls.outgoing import NOWHERE, Location
from aiodaft._protocol.ids import FIRST_USER_ACTOR, ActorId, PeerId, incarnation, node_of
from aiodaft._protocol.supervision import Backoff, Restart
from aiodaft._runtime.agent import ChildSpec
from aiodaft._runtime.calls.call import Caller, CallSink, PendingCall, Request, Target
from aiodaft._runtime.calls.following import Followers
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.node.worker import Place
from aiodaft._runtime.objects.transfer import Objects
from aiodaft._runtime.peer import NodeContact, OwnerContact
from aiodaft._runtime.supervision.directory import Directory
from aiodaft._runtime.supervision.supervisor import Child
from aiodaft.actor import Handle
from aiodaft.exceptions import ActorDied, InsufficientResources, PeerLost, RestartLimitReached, SpawnFailed
from aiodaft.methods import method
from aiodaft.ref import Ref

ACTOR = FIRST_USER_ACTOR
# A process on another node.
FAR = PeerId("worker@other")


class Node(NodeContact):
    """The part of the node agent that a supervisor asks."""

    @method
    async def place_again(self, owner: str, label: str, actor: int, beside: str | None) -> Place:
        raise NotImplementedError


class House(Bench, CallSink):
    """A process that supervises actors; the test answers its calls."""

    def __init__(self, policy: Restart) -> None:
        super().__init__()
        parts: Any = SimpleNamespace(
            take_note=None,
            running_call=None,
            cancel_local=lambda number: False,
            introduce=lambda remote: asyncio.sleep(0),
            ask_stream=None,
            take_stream=None,
        )
        connections = Connections(self.process, parts)
        connections.to(THERE)
        objects = Objects(self.process, connections, self.store, parts)
        self.caller: Any = SimpleNamespace(
            process=self.process, connections=connections, objects=objects, actors={}, sender=self, outgoing=self
        )
        self.caller.next_number = self.process.next_number
        self.caller.handle = lambda remote, actor, label, cls: Handle(self.target(remote, actor, label), cls)
        # The calls that were made and not answered: the method, its arguments, the receiver of the answer.
        self.calls: list[tuple[str, tuple[Any, ...], PendingCall]] = []
        self.failed: list[BaseException] = []
        self.sender = self
        # The process that serves each node.
        self.servers = {"": HERE, "other": PeerId("node@other")}
        # The messages for nodes that are gone, if they come back: an incarnation, and whether its actor keeps its
        # share.
        self.owed: list[tuple[ActorId, bool]] = []
        nodes: Any = SimpleNamespace(
            of=lambda peer: self._handle(Node),
            vacate=self._vacate,
            tell_to_vacate=self._tell_to_vacate,
            server_of=lambda name: self.servers.get(name),
            draining={},
        )
        # The searches for places on other nodes: the incarnation, the process to share, and the result to be.
        self.moves: list[tuple[ActorId, PeerId | None, asyncio.Future[Place]]] = []
        # The actors of the open scopes.
        self.owned: list[Target] = []
        root: Any = SimpleNamespace(all_actors=lambda: self.owned)
        self.directory = Directory(cast(Caller, self.caller), nodes, root)
        self.supervisor = self.directory.new_supervisor(policy, 0, lambda error, what: self.failed.append(error))
        self.followers = Followers(cast(Caller, self.caller), self._locate)

    async def _move(self, actor: ActorId, host: PeerId | None) -> Place:
        found: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        self.moves.append((actor, host, found))
        return await found

    async def lose_node(self) -> None:
        """Lose the node of all actors, and wait until a place for one of them is searched for."""
        self.servers.pop("")
        self.directory.node_gone("", PeerLost("the node is gone"))
        while not self.moves:
            await asyncio.sleep(0)

    def _tell_to_vacate(self, peer: PeerId, actor: ActorId, reason: str, *, keep: bool = False) -> None:
        if node_of(peer) in self.servers:
            self._handle(Node).vacate.tell(self.process.id, peer, actor, reason, keep)
        else:
            self.owed.append((actor, keep))

    async def _vacate(self, peer: PeerId, actor: ActorId, reason: str, **how: bool) -> None:
        await self._handle(Node).vacate(self.process.id, peer, actor, reason, **how)

    def _handle(self, cls: type) -> Any:
        return Handle(self.target(self.process.id, ActorId(1), "node agent"), cls)

    def target(self, remote: PeerId, actor: ActorId, label: str) -> Target:
        return Target(self.caller, remote, actor, label, None)

    def _locate(self, owner: PeerId, number: ActorId, wait: bool) -> Ref[Location]:
        located: Ref[Location] = self._handle(OwnerContact).locate(number, wait)
        return located

    def submit(self, request: Request) -> None:
        self.calls.append((request.spec.name, request.args, request.state))

    def child(self, name: str = "Echo-1", actor: ActorId = ACTOR, beside: Target | None = None) -> Child:
        """A supervised actor that is up."""
        followed = self.followers.get(self.process.id, Location(THERE, actor), name)
        spec = ChildSpec(Echo, name, (), {}, None)
        child = self.directory.begin(Child(followed, spec, self.supervisor, beside, self._move))
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
    await house.directory.process_ended(THERE, died(), wanted=False)
    asking = asyncio.ensure_future(house.directory.locate(ACTOR, True))  # noqa: TID251 - the test waits for it
    assert (await house.directory.locate(ACTOR, False)).peer == NOWHERE
    again = incarnation(ACTOR, 1)
    assert (await house.answer("place_again", Place(ELSEWHERE, again, ())))[1:3] == ("Echo-1", again)
    assert not asking.done()
    assert (await house.answer("host", None))[:2] == (again, "Echo-1")
    assert await asking == child.target.place == Location(ELSEWHERE, again)
    assert (child.restarts, house.failed, house.calls) == (1, [], [])


async def test_an_actor_is_not_made_again_after_a_wanted_end(house: House) -> None:
    house.child()
    await house.directory.process_ended(THERE, died(), wanted=True)
    await turns()
    assert isinstance((await house.directory.locate(ACTOR, True)).ended, ActorDied)
    await house.answer("vacate", None)
    assert (house.failed, house.calls) == ([], [])


async def test_the_death_of_another_process_concerns_no_actor_here(house: House) -> None:
    house.child()
    await house.directory.process_ended(ELSEWHERE, died(), wanted=False)
    assert (await house.directory.locate(ACTOR, True)).peer == THERE


async def test_a_restart_that_fails_counts_as_a_death_and_the_limit_ends_the_actor(house: House) -> None:
    child = house.child()
    over: list[ActorId] = []
    house.directory.on_over = over.append
    await house.directory.process_ended(THERE, died(), wanted=False)
    asking = asyncio.ensure_future(house.directory.locate(ACTOR, True))  # noqa: TID251 - the test waits for it
    await house.answer("place_again", SpawnFailed("there is no room"))
    (error,) = house.failed
    assert isinstance(error, RestartLimitReached)
    assert [type(attempt) for attempt in error.attempts] == [ActorDied, SpawnFailed]
    assert (await asking).ended is child.target.ended is error
    # It gives its resources back, and is not known any more.
    assert (await house.answer("vacate", None))[2] == incarnation(ACTOR, 1)
    assert (over, house.directory.find(child.target), house.calls) == ([ACTOR], None, [])


async def test_an_actor_that_dies_while_it_is_made_again_is_not_taken_for_up(house: House) -> None:
    house.child()
    await house.directory.process_ended(THERE, died(), wanted=False)
    again = incarnation(ACTOR, 1)
    await house.answer("place_again", Place(ELSEWHERE, again, ()))
    await house.directory.process_ended(ELSEWHERE, died(), wanted=False)
    await house.answer("host", None)
    assert [type(error) for error in house.failed] == [RestartLimitReached]


async def test_an_owner_shows_some_of_the_actors_that_were_given_up_as_long_as_a_scope_has_them() -> None:
    house = House(Restart(intensity=0))
    children = [house.child(f"Echo-{number}", ActorId(ACTOR + number)) for number in range(70)]
    house.owned = [child.target for child in children]
    await house.directory.process_ended(THERE, died(), wanted=False)
    shown = house.directory.look()
    assert [(view.label, view.state) for view in shown] == [(f"Echo-{number}", "dead") for number in range(6, 70)]
    del house.owned[10:]
    assert [view.label for view in house.directory.look()] == ["Echo-6", "Echo-7", "Echo-8", "Echo-9"]


async def test_a_transient_actor_that_ended_by_itself_is_over(house: House) -> None:
    house = House(Restart(kind="transient"))
    child = house.child()
    await house.directory.process_ended(THERE, died(exit_code=0), wanted=False)
    ended = (await house.directory.locate(ACTOR, True)).ended
    assert isinstance(ended, ActorDied)
    assert ended is child.target.ended
    await house.answer("vacate", None)
    assert (house.failed, house.calls) == ([], [])


async def test_an_actor_that_is_stopped_while_it_is_down_is_not_made_again(house: House) -> None:
    house = House(Restart(intensity=1, period=60, backoff=Backoff(base=50)))
    child = house.child()
    await house.directory.process_ended(THERE, died(), wanted=False)
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
    await house.directory.process_ended(THERE, died(), wanted=False)
    await house.answer("place_again", died())
    (error,) = house.failed
    assert guest.target.ended is error
    assert str(error) == "Guest-1 cannot be made again: Host-1, in the process of which it lived, is gone"
    again = incarnation(other.number, 1)
    assert (await house.answer("place_again", Place(ELSEWHERE, again, ())))[1] == "Other-1"
    await house.answer("vacate", None)
    await house.answer("host", None)
    assert (other.restarts, len(house.failed), house.calls) == (1, 1, [])


async def test_a_guest_waits_for_a_place_beside_a_host_that_comes_back(house: House) -> None:
    """Its host is supervised: that it was not there at this moment is one more failure."""
    host = house.child("Host-1", ActorId(ACTOR + 1))
    house.child("Guest-1", beside=host.target)
    await house.directory.process_ended(THERE, died(), wanted=False)
    again = incarnation(host.number, 1)
    await house.answer("place_again", Place(ELSEWHERE, again, ()))
    await house.answer("locate", Location(ELSEWHERE, again))
    await house.answer("host", None)
    assert (await house.answer("place_again", died()))[3] == ELSEWHERE
    assert [type(error) for error in house.failed] == [RestartLimitReached]


# A node that is lost.


async def test_an_actor_of_a_lost_node_is_made_on_another_and_then_again_there() -> None:
    house = House(Restart(intensity=2, period=60, backoff=Backoff(base=0)))
    child = house.child()
    await house.lose_node()
    [(actor, host, found)] = house.moves
    assert (actor, host) == (incarnation(ACTOR, 1), None)
    found.set_result(Place(FAR, actor, ()))
    assert (await house.answer("host", None))[:2] == (actor, "Echo-1")
    assert child.target.place == Location(FAR, actor)
    # If the node comes back, first the old incarnation ends there, then the actor's share there is free.
    assert house.owed == [(ACTOR, True), (actor, False)]
    await house.directory.process_ended(FAR, died(), wanted=False)
    again = Place(FAR, incarnation(ACTOR, 2), ())
    assert (await house.answer("place_again", again))[1:3] == ("Echo-1", incarnation(ACTOR, 2))
    assert len(house.moves) == 1
    await house.process.tasks.aclose()


async def test_an_actor_whose_node_has_given_up_its_owner_is_placed_anew() -> None:
    house = House(Restart(intensity=2, period=60, backoff=Backoff(base=0)))
    child = house.child()
    await house.directory.process_ended(child.place.peer, died(), wanted=False)
    await house.answer("place_again", died())
    [(actor, host, found)] = house.moves
    assert (actor, host) == (incarnation(ACTOR, 1), None)
    await house.answer("vacate", None)
    found.set_result(Place(FAR, actor, ()))
    assert (await house.answer("host", None))[:2] == (actor, "Echo-1")
    assert child.target.place == Location(FAR, actor)
    await house.process.tasks.aclose()


async def test_no_room_on_another_node_counts_as_a_death(house: House) -> None:
    house.child()
    await house.lose_node()
    house.moves[0][2].set_exception(InsufficientResources("there is no room"))
    await turns()
    (error,) = house.failed
    assert isinstance(error, RestartLimitReached)
    assert [type(attempt) for attempt in error.attempts] == [PeerLost, InsufficientResources]


async def test_an_actor_that_is_stopped_while_a_place_is_searched_for_ends_the_search(house: House) -> None:
    child = house.child()
    await house.lose_node()
    house.directory.retire(child.target)
    await child.settled()
    assert house.moves[0][2].cancelled()
    assert "stopped by its owner" in str(child.target.ended)
    assert house.failed == []


async def test_a_guest_of_a_lost_node_follows_its_host(house: House) -> None:
    host = house.child("Host-1", ActorId(ACTOR + 1))
    guest = house.child("Guest-1", beside=host.target)
    await house.lose_node()
    again = incarnation(host.number, 1)
    house.moves[0][2].set_result(Place(FAR, again, ()))
    await house.answer("locate", Location(FAR, again))
    await house.answer("host", None)
    _, (actor, process, found) = house.moves
    assert (actor, process) == (incarnation(guest.number, 1), FAR)
    found.set_result(Place(FAR, actor, ()))
    await house.answer("host", None)
    assert (host.restarts, guest.restarts, house.failed) == (1, 1, [])


async def test_a_guest_of_a_lost_host_that_is_not_restarted_ends(house: House) -> None:
    guest = house.child(beside=Target(house.caller, THERE, ActorId(ACTOR + 1), "Host-1", None))
    await house.lose_node()
    house.moves[0][2].set_exception(ActorDied("there is no such process"))
    await turns()
    assert "cannot be made again: Host-1" in str(guest.target.ended)


async def test_the_end_of_the_process_that_an_actor_leaves_is_no_death_of_its_next_incarnation(house: House) -> None:
    child = house.child()
    await house.lose_node()
    await house.directory.process_ended(THERE, died(), wanted=True)
    [(actor, _, found)] = house.moves
    found.set_result(Place(FAR, actor, ()))
    await house.answer("host", None)
    assert (child.restarts, child.target.place, house.failed) == (1, Location(FAR, actor), [])
