"""Refs and values between processes, without processes: questions, holders, and losses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._runtime.connections.route import Traffic
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.objects.ref_table import PutState
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.objects.transfer import Objects
from aiodaft._runtime.platform.tasks import Wakeups
from aiodaft._runtime.process import Env, Process, ProcessOptions
from aiodaft._runtime.serialization.decoder import Plain, decode
from aiodaft._runtime.serialization.encoder import Names
from aiodaft.exceptions import OwnerDied, PeerLost, RemoteProtocolError
from aiodaft.ref import Ref
from aiodaft_transport import Key

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


class Link:
    """One end of a connection: a message is handled at the other end in a later turn of the loop."""

    def __init__(self, near: Node, far: Node) -> None:
        self.near, self.far = near, far
        self.remote = far.process.id
        self.lost: Exception | None = None
        self.traffic = Traffic()
        self.shares_memory = True
        self.sent: list[int] = []

    def send(self, message: m.Message) -> None:
        self.sent.append(message[0])
        if self.lost is None:
            handler = self.far.handlers[message[0]]
            self.near.process.loop.call_soon(handler, self.far.to(self.near.process.id), message)


class Node:
    """A process that has values and connections, and no actors."""

    def __init__(self, name: PeerId, nodes: dict[PeerId, Node]) -> None:
        self.process = Process(ProcessOptions(name, "node", A, A, A, A, "shm", False, 1, 8), Key(bytes(32)), Env())
        self._nodes = nodes
        self._links: dict[PeerId, Link] = {}
        self.ring_poller = SimpleNamespace(wakeups=Wakeups(self.process.loop))
        connections: Any = self
        # Small values need none.
        transport: Any = SimpleNamespace(name="none", shared=True, close=lambda: None)
        self.store = Store(self.process, lambda name: transport)
        self.objects = Objects(self.process, connections, self.store, self)
        self.transfer, self.refs = self.objects.transfer, self.objects.refs
        self.handlers: dict[int, Callable[[Any, m.Message], object]] = {
            m.PULL: self.transfer.asked,
            m.GIVEN: self.transfer.given_came,
            m.ASK: self.transfer.ask_came,
            **dict.fromkeys((m.VALUE, m.MOVED, m.BROKEN), self.transfer.answered),
            m.BORROW: self.refs.borrow_came,
        }
        nodes[name] = self

    # As connections.

    def to(self, remote: PeerId) -> Any:
        return self._links.setdefault(remote, Link(self, self._nodes[remote]))

    def get(self, remote: PeerId) -> Any:
        return self._links.get(remote)

    async def explanation(self, connection: Link) -> Exception:
        return PeerLost(f"{connection.remote} ended")

    def lose(self, remote: PeerId) -> None:
        link = self.to(remote)
        link.lost = error = PeerLost(f"{remote} ended")
        self.refs.peer_lost(remote)
        self.transfer.connection_lost(link, error)

    # As the owner of its objects.

    async def borrow(self, owner: PeerId, number: CallId) -> None:
        self._nodes[owner].refs.lend(number, self.process.id)

    def give_back(self, owner: PeerId, number: CallId) -> None:
        self._nodes[owner].refs.take_back(number, self.process.id)

    def cancel_remote(self, owner: PeerId, number: CallId) -> None:
        raise NotImplementedError

    async def ended_remote(self, owner: PeerId, number: CallId) -> bool:
        state = self._nodes[owner].refs.find(number)
        return state is not None and await state.wait_ended()

    def unread_remote(self, producer: PeerId, owner: PeerId, number: CallId) -> Awaitable[object]:
        raise NotImplementedError

    def running_call(self, owner: PeerId, number: CallId) -> None:
        return None

    def cancel_local(self, number: CallId) -> bool:
        raise NotImplementedError

    def credit_local(self, number: CallId, count: int) -> None:
        raise NotImplementedError

    def block_on(self, ref: Ref[Any], timeout: float | None) -> Any:
        raise NotImplementedError

    def cut(self, ref: Ref[Any], count: int) -> list[Ref[Any]]:
        raise NotImplementedError


@pytest.fixture
async def nodes() -> AsyncIterator[tuple[Node, Node, Node]]:
    made: dict[PeerId, Node] = {}
    yield Node(A, made), Node(B, made), Node(C, made)
    for node in made.values():
        await node.process.tasks.aclose()
        await node.process.helper_thread.aclose()


def put(node: Node, value: object) -> Ref[Any]:
    return Ref(node.refs.put(value, "put"))


async def lend(ref: Ref[Any], owner: Node, borrower: Node) -> Ref[Any]:
    (borrowed,) = await borrower.refs.adopt((owner.refs.describe(ref),), borrower.to(owner.process.id))
    return borrowed


async def turn() -> None:
    """Sent messages are handled, and those that follow from them."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_borrowed_value_is_pulled_once_and_given_back(nodes: tuple[Node, Node, Node]) -> None:
    owner, borrower, _ = nodes
    ref = put(owner, [1, 2])
    borrowed = await lend(ref, owner, borrower)
    assert await borrowed == [1, 2]
    assert await borrowed == [1, 2]
    assert borrower.to(A).sent == [m.BORROW, m.PULL]
    assert state_of(ref).borrowers == {B: 1}
    del borrowed
    await turn()
    assert state_of(ref).borrowers == {}


async def test_a_borrower_waits_for_the_call_without_the_value(nodes: tuple[Node, Node, Node]) -> None:
    owner, borrower, _ = nodes
    borrowed = await lend(put(owner, [1, 2]), owner, borrower)
    over: list[Ref[Any]] = []
    borrowed.add_done_callback(over.append)
    await borrowed.ready()
    await turn()
    assert over == [borrowed]
    assert borrower.to(A).sent == [m.BORROW]
    assert await borrowed == [1, 2]


async def test_a_borrower_is_told_of_the_error_of_the_call_it_waits_for(nodes: tuple[Node, Node, Node]) -> None:
    owner, borrower, _ = nodes
    state = PutState(owner.objects, None, "Maker.make")
    borrowed = await lend(Ref(state), owner, borrower)
    waits = asyncio.ensure_future(borrowed.ready())  # noqa: TID251 - the test waits for it
    await turn()
    assert not waits.done()
    state.on_error(ValueError("it failed"))
    await waits
    assert isinstance(borrowed.exception(), ValueError)


async def test_a_borrower_that_passes_the_ref_on_waits_until_the_call_is_over(nodes: tuple[Node, Node, Node]) -> None:
    owner, borrower, _ = nodes
    borrowed = await lend(put(owner, "x"), owner, borrower)
    assert await borrowed == "x"
    state_of(borrowed).add_use()
    waits = asyncio.ensure_future(borrowed.released())  # noqa: TID251 - the test waits for it
    await turn()
    assert not waits.done()
    state_of(borrowed).drop_use()
    await waits


async def test_a_ref_lives_while_another_process_holds_it(nodes: tuple[Node, Node, Node]) -> None:
    owner, borrower, _ = nodes
    ref = put(owner, "x")
    number = state_of(ref).number
    borrowed = await lend(ref, owner, borrower)
    await turn()
    del ref
    await turn()
    assert await borrowed == "x"
    owner.lose(B)
    assert owner.refs.find(number) is None


async def test_a_process_that_does_not_know_the_value_names_the_owner(nodes: tuple[Node, Node, Node]) -> None:
    owner, consumer, other = nodes
    ref = put(owner, "x")
    _, number, _, _ = owner.refs.describe(ref)
    received = await consumer.transfer.pull(A, number, C)
    assert await consumer.store.decode(received) == "x"
    assert (consumer.to(C).sent, consumer.to(A).sent) == ([m.PULL], [m.PULL])
    assert other.to(B).sent == [m.MOVED]


async def test_a_value_that_is_stored_here_is_not_asked_for(nodes: tuple[Node, Node, Node]) -> None:
    _, consumer, _ = nodes
    key = A, CallId(7)
    loopback: Any = SimpleNamespace(remote=B, lost=None, traffic=Traffic())
    vars(consumer)["loopback"] = loopback
    stored = consumer.store.entries[key] = consumer.store.keep("x", Names("a value"))
    received = await consumer.transfer.pull(*key, C)
    assert await consumer.store.decode(received) == "x"
    assert consumer.get(C) is None
    stored.release()


async def test_the_owner_says_that_a_value_was_freed(nodes: tuple[Node, Node, Node]) -> None:
    _, consumer, _ = nodes
    with pytest.raises(OwnerDied, match="ref 7 of a was freed"):
        await consumer.transfer.pull(A, CallId(7), C)


async def test_the_owner_is_asked_when_the_producer_ends_and_its_own_end_ends_the_pull(
    nodes: tuple[Node, Node, Node],
) -> None:
    owner, consumer, _ = nodes
    owner.handlers[m.PULL] = lambda connection, message: None
    consumer.lose(C)
    pull = asyncio.ensure_future(consumer.transfer.pull(A, CallId(7), C))  # noqa: TID251 - the test waits for it
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    consumer.lose(A)
    with pytest.raises(OwnerDied, match=r"the owner of a ref, a, is gone"):
        await pull


@pytest.mark.parametrize("value", ["plain", ["encoded"]])
async def test_a_forwarded_value_comes_before_or_after_its_call(nodes: tuple[Node, Node, Node], value: Any) -> None:
    owner, consumer, producer = nodes
    place = Plain(value) if value == "plain" else producer.store.keep(value, Names("result"))
    if isinstance(place, StoredValue):
        producer.store.pack_here(place)
    came: list[Any] = []
    producer.transfer.giver((A, CallId(7)), B)(place)
    await turn()
    assert came == []
    consumer.transfer.expect(C, (A, CallId(7)), came.append)
    consumer.transfer.expect(C, (A, CallId(7)), came.append)
    producer.transfer.giver((A, CallId(7)), B)(place)
    await turn()
    values = [one.value if isinstance(one, Plain) else decode(one.payload) for one in came]
    assert (values, consumer.transfer.handover.is_empty) == ([value, value], True)
    assert owner.get(B) is None


async def test_a_call_asks_the_owner_when_the_producer_or_the_connection_to_it_is_lost(
    nodes: tuple[Node, Node, Node],
) -> None:
    owner, consumer, _ = nodes
    came: list[Any] = []
    consumer.transfer.expect(C, (A, CallId(7)), came.append)
    consumer.transfer.expect(C, (A, CallId(8)), came.append)
    owner.to(B).send(m.ask(CallId(7)))
    await turn()
    assert came == [A]
    consumer.lose(C)
    assert came == [A, A]
    consumer.transfer.expect(C, (A, CallId(9)), came.append)
    assert came == [A, A, A]


async def test_an_answer_that_was_not_asked_for_is_an_error(nodes: tuple[Node, Node, Node]) -> None:
    owner, consumer, _ = nodes
    with pytest.raises(RemoteProtocolError, match="a pull that was not made"):
        consumer.transfer.answered(consumer.to(A), (m.MOVED, A, CallId(7), C))
    assert owner.get(B) is None


async def test_the_answer_to_a_cancelled_pull_changes_nothing(nodes: tuple[Node, Node, Node]) -> None:
    owner, consumer, _ = nodes
    ref = put(owner, "x")
    _, number, _, _ = owner.refs.describe(ref)
    pull = asyncio.ensure_future(consumer.transfer.pull(A, number, A))  # noqa: TID251 - the test waits for it
    await asyncio.sleep(0)
    pull.cancel()
    await turn()
    assert pull.cancelled()
    assert consumer.transfer.questions.open == {}
    assert consumer.transfer.relays.table.fetching == {}
