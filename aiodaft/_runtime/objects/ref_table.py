"""Refs that several processes hold: which processes borrow this one's, and which refs this one borrows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final
from weakref import WeakSet

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.objects.value import HERE, THERE, Borrowing, Key
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.connections.route import Route
from aiodaft._runtime.objects.ref_state import RefHost, RefState, state_of
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.serialization.encoder import Names
from aiodaft.exceptions import DaftError, OwnerDied
from aiodaft.ref import Ref

# Bytes of values that go along with one call: more would hold up later messages, and a frame is bounded.
_INLINE_VALUES: Final = 1 << 20


class PutState(RefState):
    handles = 1

    def __init__(self, objects: RefHost, value: Any, label: str) -> None:
        self.objects = objects
        self.process = objects.process
        self.number = objects.process.next_number()
        self.value = value
        self._label = label


class BorrowedState(RefState):
    own = False
    _asking = False

    def __init__(self, objects: RefHost, key: Key, producer: PeerId, label: str) -> None:
        self.objects = objects
        self.process = objects.process
        self._owner, self.number = key
        self._producer = producer
        self._label = label

    @property
    def producer(self) -> PeerId:
        return self._producer

    @property
    def owner(self) -> PeerId:
        return self._owner

    def watch(self, callback: Callable[[Any], object], *, interested: bool = False) -> None:
        super().watch(callback, interested=interested)
        if self.process.is_here and not (self.settled or self._asking):
            self._asking = True
            self.process.tasks.create_task(self._learn(), name=f"wait for {self.label}")

    async def _learn(self) -> None:
        """Settle when the owner says that the call is over; an error is pulled, the value stays where it is."""
        there = False
        with suppress(DaftError):
            there = await self.objects.owner.ended_remote(self._owner, self.number)
        if there:
            self._settle(THERE)
        elif not (self.settled or self._fetching):
            self._fetching = True
            await self._fetch()

    def free_if_unheld(self) -> None:
        super().free_if_unheld()
        if self.held:
            return
        registered = self.objects.borrowing.give_back(self._owner, self.number, self)
        if registered and self.process.closed is None:
            self.objects.owner.give_back(self._owner, self.number)

    def _cancel(self, why: str) -> bool:
        self.objects.owner.cancel_remote(self._owner, self.number)
        return True

    def _judge_error(self) -> None:
        """The owner reports the error, not the borrower."""


class RefTable:
    """The refs of this process that others may ask for, and those of others that it borrows."""

    def __init__(self, objects: RefHost, connections: Connections) -> None:
        self.objects = objects
        self.process = objects.process
        self._store = objects.store
        self._connections = connections
        self._borrowing: Borrowing[RefState] = objects.borrowing
        self._puts: WeakSet[PutState] = WeakSet()
        self.lend = self._borrowing.lend
        self.use = self._borrowing.use

    def find(self, number: CallId) -> RefState | None:
        return self._borrowing.find(self.process.id, number)

    def borrow_came(self, connection: Route, message: m.Message) -> None:
        self.lend(m.read_borrow(message), connection.remote)

    def take_back(self, number: CallId, peer: PeerId) -> None:
        self._returned(self._borrowing.take_back(number, peer))

    def peer_lost(self, remote: PeerId) -> None:
        self._returned(self._borrowing.peer_lost(remote))

    def _returned(self, states: Iterable[RefState]) -> None:
        for state in states:
            state.free_if_unheld()
            self._store.note_freed()

    @property
    def are_lent(self) -> bool:
        return self._borrowing.are_lent

    def put(self, value: Any, label: str, via: str | None = None) -> PutState:
        """Make a ref of a value, as it is now.

        Raises:
            SerializationError: Part of it cannot travel.
        """
        state = PutState(self.objects, value, label)
        stored = state.stored = self._store.keep(value, _names(state, "value"), via=via)
        if not stored.is_inline:
            self._puts.add(state)
        if self._store.pack_now(stored):
            state.on_ready()
        else:
            self.process.tasks.create_task(self._pack(state, stored), name="put")
        return state

    async def _pack(self, state: PutState, stored: StoredValue) -> None:
        try:
            await self._store.pack(stored)
        except Exception as error:  # noqa: BLE001 - the code that uses the ref gets it
            state.on_error(error)
        else:
            state.on_ready()

    def put_values(self) -> list[StoredValue]:
        return [state.stored for state in self._puts if state.stored is not None]

    def stored(self, state: RefState) -> StoredValue:
        if state.stored is None and state.received is not None:
            state.stored = StoredValue.again(state.received)
        elif state.stored is None:
            state.stored = self._store.keep(state.value, _names(state, "result"))
            self._store.pack_now(state.stored)
        return state.stored

    def describe(self, ref: Ref[Any]) -> tuple[Any, ...]:
        state = state_of(ref)
        self._borrowing.share(state.number, state)
        return (state.owner, state.number, state.producer, state.origin)

    def describe_values(self, refs: Sequence[Ref[Any]]) -> tuple[tuple[Any, ...], ...]:
        """The descriptors of awaited refs, with as many small values as a frame has room for."""
        room = _INLINE_VALUES
        found: list[tuple[Any, ...]] = []
        for ref in refs:
            described = self.describe_value(ref) if room > 0 else self.describe(ref)
            if isinstance(described[0], bytes):
                room -= len(described[0]) + len(described[1] or b"")
            found.append(described)
        return tuple(found)

    def describe_value(self, ref: Ref[Any]) -> tuple[Any, ...]:
        state = state_of(ref)
        if state.own and state.status is HERE and state.error is None:
            stored = state.stored if state.parts() is not None else self.stored(state)
            if stored is not None and stored.ready and stored.is_inline:
                return (stored.payload, stored.inline, tuple(self.describe(inner) for inner in stored.refs))
        return self.describe(ref)

    async def adopt(self, descriptors: tuple[Any, ...], connection: Route) -> list[Ref[Any]]:
        """Make the refs that came inside a value; each owner hears of them before the sender gets another message."""
        return [await self._adopt_one((owner, number), producer, label, connection)
                for owner, number, producer, label in descriptors]  # fmt: skip

    async def _adopt_one(self, key: Key, producer: PeerId, label: str, connection: Route) -> Ref[Any]:
        known = self._borrowing.find(*key)
        if known is not None:
            return Ref(known.hold())
        state = BorrowedState(self.objects, key, producer, label)
        # Holds the ref while the owner is asked.
        ref: Ref[Any] = Ref(state.hold())
        if state.owner == self.process.id:
            _gone(state, f"the result of {label} was freed")
            return ref
        self._borrowing.borrow(*key, state)
        if state.owner == connection.remote:
            # The owner must know before it handles the next message, which may end the holder of the ref there.
            self._connections.to(state.owner).send(m.borrow(state.number))
            return ref
        try:
            await self.objects.owner.borrow(*key)
        except DaftError as error:
            _gone(state, f"the owner of the result of {label}, {state.owner}, is gone: {error}")
        return ref


def _gone(state: RefState, why: str) -> None:
    state.mark_seen()
    state.on_error(OwnerDied(why))


def _names(state: RefState, role: str) -> Names:
    return Names(state.label, ((role, state.value),))
