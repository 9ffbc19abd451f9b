"""A node keeps its lease and its names, also with a coordinator that was started again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any, Final, NoReturn, cast

import pytest

from aiodaft._protocol.coordination.records import Member, NamedActor
from aiodaft._protocol.coordination.registry import Stored
from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft._runtime.coordination.coordinator import Coordinator
from aiodaft._runtime.node.membership import Membership, watch_members
from aiodaft._runtime.node.nodes import CoordinatorContact
from aiodaft._runtime.process import Process
from aiodaft.exceptions import CoordinatorUnavailable, DaftError, RuntimeClosed
from aiodaft.testing import AutojumpLoop

LEASE: Final = 8.0


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def in_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        with asyncio.Runner(loop_factory=AutojumpLoop) as runner:
            runner.run(test())

    return run


def now() -> float:
    return asyncio.get_running_loop().time()


def new(term: int = 1, *, forgot: bool = False) -> Coordinator:
    return Coordinator(stored=Stored(term, forgot=forgot), lease=LEASE, clock=asyncio.get_running_loop().time)


class Contact:
    """The way to a coordinator that tests replace or take away."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator: Coordinator | None = coordinator
        # Whether nothing listens where it was.
        self.is_dead = False

    @property
    def now(self) -> Coordinator:
        if self.coordinator is None:
            raise CoordinatorUnavailable("no connection")
        return self.coordinator

    async def find_again(self) -> bool:
        return not self.is_dead


@asynccontextmanager
async def node(contact: Contact, name: str) -> AsyncGenerator[Membership, None]:
    process = SimpleNamespace(env=SimpleNamespace(monotonic=asyncio.get_running_loop().time))
    member = Member(name, PeerId(f"node-1@{name}"), "tcp://10.0.0.1:7777")
    membership = Membership(cast("Process", process), cast("CoordinatorContact", contact), member, dict)
    await membership.join()
    tasks = [
        asyncio.get_running_loop().create_task(work())
        for work in (membership.stay, membership.watch_names, membership.settle)
    ]
    try:
        yield membership
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def register(coordinator: Coordinator, name: str, where: str, actor: int = 16) -> NamedActor:
    peer = PeerId(f"worker-1@{where}")
    return await coordinator.register(NamedActor(name, peer, ActorId(actor), "Model-1", ("m.Model",)))


@in_virtual_time
async def test_a_node_stays_a_member_with_its_names() -> None:
    coordinator = new()
    run = asyncio.get_running_loop().create_task(coordinator.run())
    async with node(Contact(coordinator), "a"):
        x = await register(coordinator, "x", "a")
        await asyncio.sleep(10 * LEASE)
        assert await coordinator.lookup("x") == x
    run.cancel()


@in_virtual_time
async def test_a_coordinator_that_was_started_again_hears_the_names_from_the_node() -> None:
    contact = Contact(new())
    async with node(contact, "a"):
        assert contact.coordinator is not None
        x = await register(contact.coordinator, "x", "a")
        await asyncio.sleep(1)
        contact.coordinator = None
        await asyncio.sleep(LEASE / 2)
        contact.coordinator = again = new(2, forgot=True)
        await asyncio.sleep(LEASE / 2)
        assert await again.lookup("x") == x
        assert [member.epoch for member in await again.members()] == [x.lease]


@in_virtual_time
async def test_a_node_whose_lease_was_ended_joins_as_a_new_incarnation_without_its_names() -> None:
    coordinator = new()
    contact = Contact(coordinator)
    async with node(contact, "a"):
        x = await register(coordinator, "x", "a")
        await coordinator.leave(x.lease)
        await asyncio.sleep(LEASE / 2)
        (member,) = await coordinator.members()
        assert member.epoch > x.lease
        contact.coordinator = again = new(2, forgot=True)
        await asyncio.sleep(LEASE / 2)
        assert await again.names("") == ()


@in_virtual_time
async def test_a_name_that_is_free_again_is_not_claimed() -> None:
    coordinator = new()
    contact = Contact(coordinator)
    async with node(contact, "a") as membership:
        x = await register(coordinator, "x", "a")
        membership.note_name(x)
        y = await register(coordinator, "y", "a", 17)
        membership.note_name(y)
        await asyncio.sleep(0)
        await coordinator.release_name("x", x.epoch)
        await asyncio.sleep(1)
        contact.coordinator = again = new(2, forgot=True)
        await asyncio.sleep(LEASE / 2)
        assert await again.names("") == (y,)


@in_virtual_time
async def test_a_name_of_a_process_that_ended_while_there_was_no_coordinator_is_not_claimed() -> None:
    contact = Contact(new())
    async with node(contact, "a") as membership:
        assert contact.coordinator is not None
        x = await register(contact.coordinator, "x", "a")
        await asyncio.sleep(1)
        contact.coordinator = None
        membership.process_ended(x.peer)
        contact.coordinator = again = new(2, forgot=True)
        await asyncio.sleep(LEASE / 2)
        assert await again.names("") == ()


@in_virtual_time
async def test_a_name_of_a_process_that_ended_while_the_coordinator_was_silent_is_freed_when_it_answers() -> None:
    silent = new()
    contact = Contact(silent)
    async with node(contact, "a") as membership:
        x = await register(silent, "x", "a")
        await asyncio.sleep(1)
        contact.coordinator = None
        membership.process_ended(x.peer)
        await asyncio.sleep(LEASE / 4)
        contact.coordinator = silent
        await asyncio.sleep(LEASE / 4)
        assert await silent.names("") == ()


# Fences.


class Fenced:
    """A node with an actor that has the name "x", and the messages to its workers."""

    def __init__(self, membership: Membership, x: NamedActor) -> None:
        self.membership = membership
        self.until = membership.until
        self.replaced: list[NamedActor] = []
        self.ousted: list[DaftError] = []
        membership.note_name(x)
        membership.on_prolonged = self._prolonged
        membership.on_replaced = self._replaced
        membership.on_ousted = self.ousted.append

    async def _replaced(self, held: NamedActor) -> None:
        self.replaced.append(held)

    def _prolonged(self, until: float) -> None:
        self.until = max(self.until, until)

    @property
    def serves(self) -> bool:
        return now() < self.until


@asynccontextmanager
async def fenced(contact: Contact) -> AsyncGenerator[tuple[Fenced, NamedActor], None]:
    assert contact.coordinator is not None
    run = asyncio.get_running_loop().create_task(contact.coordinator.run())
    async with node(contact, "a") as membership:
        x = await register(contact.coordinator, "x", "a")
        yield Fenced(membership, x), x
    run.cancel()


async def cut_off(contact: Contact, seconds: float) -> Coordinator:
    """Have the node not reach its coordinator for some time; nor do its watches."""
    coordinator, contact.coordinator = contact.coordinator, None
    assert coordinator is not None
    await asyncio.sleep(seconds)
    return coordinator


@in_virtual_time
async def test_while_its_node_has_the_lease_an_actor_with_a_name_serves() -> None:
    async with fenced(Contact(new())) as (actor, _):
        for _ in range(100):
            await asyncio.sleep(LEASE / 3)
            assert actor.serves


@in_virtual_time
async def test_e76_an_actor_does_not_serve_once_another_one_may_have_its_name() -> None:
    contact = Contact(new())
    async with fenced(contact) as (actor, x):
        coordinator = await cut_off(contact, 0)
        while await coordinator.names(""):
            await asyncio.sleep(0.1)
        assert not actor.serves
        # It gets its name back, because no other actor wanted it.
        contact.coordinator = coordinator
        while not actor.serves:
            await asyncio.sleep(0.1)
        again = await coordinator.lookup("x")
        assert again.is_same_actor(x)
        assert again.epoch > x.epoch
    assert actor.replaced == []


@in_virtual_time
async def test_e76_an_actor_whose_name_went_to_another_is_replaced_and_never_serves_again_under_it() -> None:
    contact = Contact(new())
    async with fenced(contact) as (actor, x):
        coordinator = await cut_off(contact, 2 * LEASE)
        other = await coordinator.register(NamedActor("x", PeerId("worker-2"), ActorId(16), "Model-2", ("m.Model",)))
        contact.coordinator = coordinator
        while not actor.replaced:
            assert not actor.serves
            await asyncio.sleep(0.1)
        assert actor.replaced == [x]
        assert await coordinator.lookup("x") == other


@in_virtual_time
async def test_a_coordinator_that_does_not_run_ends_no_lease_so_that_actors_serve_on() -> None:
    contact = Contact(new())
    async with fenced(contact) as (actor, x):
        contact.is_dead = True
        await cut_off(contact, 0)
        for _ in range(100):
            await asyncio.sleep(LEASE / 3)
            assert actor.serves
        # Nor does one that starts there, until the node has come back.
        contact.coordinator, contact.is_dead = new(2, forgot=True), False
        await asyncio.sleep(2 * LEASE)
        assert actor.serves
        assert await contact.coordinator.lookup("x") == x


@in_virtual_time
async def test_a_fence_is_not_lifted_because_the_coordinator_is_found_dead_later() -> None:
    contact = Contact(new())
    async with fenced(contact) as (actor, _):
        # It may have given the name away before it died.
        await cut_off(contact, 2 * LEASE)
        contact.is_dead = True
        await asyncio.sleep(2 * LEASE)
        assert not actor.serves


@in_virtual_time
async def test_e74_a_name_is_not_claimed_at_a_coordinator_that_forgot_it_and_gave_it_to_another() -> None:
    contact = Contact(new())
    async with fenced(contact) as (actor, x):
        await cut_off(contact, 1)
        contact.coordinator = again = new(2)
        other = await again.register(NamedActor("x", PeerId("worker-2"), ActorId(16), "Model-2", ("m.Model",)))
        while not actor.replaced:
            await asyncio.sleep(0.1)
        assert actor.replaced == [x]
        assert await again.lookup("x") == other


@in_virtual_time
async def test_a_name_of_an_actor_that_is_gone_is_not_taken_back() -> None:
    contact = Contact(new())
    async with fenced(contact) as (actor, _):

        async def gone(held: NamedActor) -> bool:
            return False

        actor.membership.is_there = gone
        contact.coordinator = await cut_off(contact, 2 * LEASE)
        await asyncio.sleep(LEASE)
        assert await contact.coordinator.names("") == ()


@in_virtual_time
async def test_a_node_that_another_one_has_replaced_ends() -> None:
    contact = Contact(new())
    async with fenced(contact) as (actor, _):
        coordinator = await cut_off(contact, 2 * LEASE)
        await coordinator.join(Member("a", PeerId("node-2@a"), "tcp://10.0.0.2:7777"), ())
        contact.coordinator = coordinator
        while not actor.ousted:
            await asyncio.sleep(0.1)
        assert not actor.serves


@in_virtual_time
async def test_a_list_of_nodes_that_makes_no_sense_does_not_end_the_watch() -> None:
    coordinator, seen = new(), asyncio.Queue[Member]()

    class Garbling(Contact):
        @property
        def now(self) -> Coordinator:
            answers: Any = SimpleNamespace(watch_members=self._answer)
            return cast("Coordinator", answers)

        async def _answer(self, known: int) -> object:
            if not self.is_dead:
                self.is_dead = True
                return "no batch"
            return await coordinator.watch_members(known)

    nodes: Any = SimpleNamespace(add=seen.put_nowait)
    contact = cast("CoordinatorContact", Garbling(coordinator))
    watching = asyncio.get_running_loop().create_task(watch_members(contact, nodes))
    async with node(Contact(coordinator), "n1"):
        assert (await seen.get()).name == "n1"
    watching.cancel()


@in_virtual_time
async def test_the_watch_of_nodes_ends_with_its_runtime_and_says_nothing() -> None:
    async def closed(known: int) -> NoReturn:
        raise RuntimeClosed("the runtime is closed")

    contact: Any = SimpleNamespace(is_closed=True, now=SimpleNamespace(watch_members=closed))
    nodes: Any = None
    async with asyncio.timeout(60):
        await watch_members(contact, nodes)
