"""Refs that several processes hold: which processes borrow this one's, and which refs this one borrows."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final

from aiodaft._protocol import messages as m
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.value import HERE
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.connections.route import Route
from aiodaft._runtime.objects.ref_state import RefHost, RefState, state_of
from aiodaft._runtime.objects.store import Key
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.serialization.encoder import Names
from aiodaft._runtime.serialization.pickling import TooLong
from aiodaft.exceptions import DaftError, OwnerDied
from aiodaft.ref import Ref

# Bytes of values that go along with one call: more would hold up what comes after it, and a frame is bounded.
_INLINE_VALUES: Final = 1 << 20


class PutState(RefState):
    """A value of this process."""

    handles = 1

    def __init__(self, objects: RefHost, value: Any, label: str) -> None:
        self.objects = objects
        self.process = objects.process
        self.number = objects.process.next_number()
        self.value = value
        self._label = label


class BorrowedState(RefState):
    """A ref that another process owns."""

    own = False
    # The owner counts, or is about to count, this process among the borrowers.
    registered = False

    def __init__(self, table: RefTable, key: Key, producer: PeerId, label: str) -> None:
        self._table = table
        self.objects = table.objects
        self.process = table.objects.process
        self._owner, self.number = key
        self._producer = producer
        self._label = label

    @property
    def producer(self) -> PeerId:
        return self._producer

    @property
    def owner(self) -> PeerId:
        return self._owner

    def free_if_unheld(self) -> None:
        if not self.held:
            self._table.give_back(self)

    def _cancel(self, why: str) -> bool:
        """Ask the owner to cancel the call."""
        self.objects.owner.cancel_remote(self._owner, self.number)
        return True

    def _judge_error(self) -> None:
        """The owner reports the error, not the borrower."""


class RefTable:
    """The refs of this process that others may ask for, and those of others that it borrows."""

    def __init__(self, objects: RefHost, connections: Connections) -> None:
        self.objects = objects
        self._process = objects.process
        self._store = objects.store
        self._connections = connections
        # Weak: an error refers to frames, these to refs, and refs that nothing else holds must go.
        self._own: weakref.WeakValueDictionary[CallId, RefState] = weakref.WeakValueDictionary()
        # Refs of this process that others hold.
        self._lent: dict[CallId, RefState] = {}
        self._borrowed: weakref.WeakValueDictionary[Key, BorrowedState] = weakref.WeakValueDictionary()

    def find(self, number: CallId) -> RefState | None:
        """A ref of this process that others know of."""
        return self._own.get(number)

    def forget(self, state: RefState) -> None:
        """A ref of this process is freed."""
        self._own.pop(state.number, None)
        self._lent.pop(state.number, None)

    # Borrowers of refs of this process.

    def borrow_came(self, connection: Route, message: m.Message) -> None:
        """BORROW came."""
        self.lend(m.read_borrow(message), connection.remote)

    def lend(self, number: CallId, peer: PeerId) -> None:
        """Another process holds a ref of this one; nothing if that is freed."""
        state = self._own.get(number)
        if state is not None:
            state.borrow(peer)
            self._lent[number] = state

    def take_back(self, number: CallId, peer: PeerId) -> None:
        """Another process dropped a ref of this one."""
        state = self._lent.get(number)
        if state is not None:
            state.give_back(peer)
            self._returned(state)

    def peer_lost(self, remote: PeerId) -> None:
        """A process is gone, and with it what it had borrowed."""
        for state in list(self._lent.values()):
            state.forget(remote)
            self._returned(state)

    def _returned(self, state: RefState) -> None:
        if not state.borrowers:
            # It may be gone: what follows from one end of a connection may end another.
            self._lent.pop(state.number, None)
            state.free_if_unheld()

    # Values of refs of this process.

    def put(self, value: Any, label: str, via: str | None = None) -> PutState:
        """Make a ref of a value. A small one is encoded now, a large one by the helper thread.

        Raises:
            SerializationError: Part of it cannot travel.
        """
        state = PutState(self.objects, value, label)
        streams: Sequence[Any] = ()
        try:
            state.stored = self._store.keep(value, _names(state, "value"), via=via)
        except TooLong:
            streams = self._store.current_streams()
        if state.stored is not None and self._store.pack_now(state.stored):
            state.on_ready()
        else:
            self._process.tasks.create_task(self._capture(state, via, streams), name="put")
        return state

    async def _capture(self, state: PutState, via: str | None, streams: Sequence[Any]) -> None:
        store = self._store
        try:
            if state.stored is None:
                state.stored = await store.keep_anywhere(state.value, _names(state, "value"), via=via, streams=streams)
            await store.pack(state.stored)
        except Exception as error:  # noqa: BLE001 - the code that uses the ref gets it
            state.on_error(error)
        else:
            state.on_ready()

    def stored(self, state: RefState) -> StoredValue:
        """The value of a settled ref, stored for other processes; the value is in this process."""
        if state.stored is None and state.received is not None:
            state.stored = StoredValue.again(state.received)
        elif state.stored is None:
            state.stored = self._store.keep(state.value, _names(state, "result"), patient=True)
            self._store.pack_now(state.stored)
        return state.stored

    def describe(self, ref: Ref[Any]) -> tuple[Any, ...]:
        """The descriptor of a ref; see `messages`."""
        state = state_of(ref)
        if state.own and not state.shared:
            state.shared = True
            self._own[state.number] = state
        return (state.owner, state.number, state.producer, state.origin)

    def describe_values(self, refs: Sequence[Ref[Any]]) -> tuple[tuple[Any, ...], ...]:
        """The descriptors of several awaited refs, with as many small values as a frame has room for."""
        room = _INLINE_VALUES
        found: list[tuple[Any, ...]] = []
        for ref in refs:
            described = self.describe_value(ref) if room > 0 else self.describe(ref)
            if isinstance(described[0], bytes):
                room -= len(described[0]) + len(described[1] or b"")
            found.append(described)
        return tuple(found)

    def describe_value(self, ref: Ref[Any]) -> tuple[Any, ...]:
        """The descriptor of an awaited ref: the value itself if it is small and here."""
        state = state_of(ref)
        if state.own and state.status is HERE and state.error is None:
            stored = state.stored if state.parts() is not None else self.stored(state)
            if stored is not None and stored.ready and stored.is_inline:
                return (stored.payload, stored.inline, tuple(self.describe(inner) for inner in stored.refs))
        return self.describe(ref)

    # Refs that this process borrows.

    async def adopt(self, descriptors: tuple[Any, ...], connection: Route) -> list[Ref[Any]]:
        """Make the refs that came inside a value; each owner knows of them before the sender gets another message."""
        return [await self._adopt_one((owner, number), producer, label, connection)
                for owner, number, producer, label in descriptors]  # fmt: skip

    async def _adopt_one(self, key: Key, producer: PeerId, label: str, connection: Route) -> Ref[Any]:
        owner, number = key
        if owner == self._process.id:
            known: RefState = self._own.get(number) or self._freed(key, producer, label)
            return Ref(known.hold())
        state = self._borrowed.get(key)
        if state is not None:
            return Ref(state.hold())
        state = self._borrowed[key] = BorrowedState(self, key, producer, label)
        state.registered = True
        # Holds the ref while the owner is asked.
        ref: Ref[Any] = Ref(state.hold())
        await self._register(state, connection)
        return ref

    async def _register(self, state: BorrowedState, connection: Route) -> None:
        if state.owner == connection.remote:
            # No call: the owner must know before it handles the next message, which may end what holds the ref there.
            self._connections.to(state.owner).send(m.borrow(state.number))
            return
        try:
            await self.objects.owner.borrow(state.owner, state.number)
        except DaftError as error:
            state.on_error(OwnerDied(f"the owner of the result of {state.label}, {state.owner}, is gone: {error}"))
            state.mark_seen()

    def _freed(self, key: Key, producer: PeerId, label: str) -> BorrowedState:
        state = BorrowedState(self, key, producer, label)
        state.seen = True
        state.on_error(OwnerDied(f"the result of {label} was freed"))
        return state

    def give_back(self, state: BorrowedState) -> None:
        """A borrowed ref has no holders in this process any more."""
        key = state.owner, state.number
        # A state that the garbage collector found is not in the table any more, and perhaps another one is.
        if self._borrowed.get(key) is state:
            del self._borrowed[key]
        if state.registered and self._process.closed is None:
            self.objects.owner.give_back(*key)
        state.registered = False


def _names(state: RefState, role: str) -> Names:
    return Names(state.label, ((role, state.value),))
