"""Values that flow between the steps of a graph: as a process holds them, and as messages carry them."""

from __future__ import annotations

from typing import Any, TypeAlias

from aiodaft._protocol.connections.messages import FAILED_VALUE, GraphItem
from aiodaft._runtime.connections.route import Route
from aiodaft._runtime.objects.ref_table import RefTable
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.objects.transfer import Delivery, Objects
from aiodaft._runtime.serialization.decoder import ReceivedValue
from aiodaft._runtime.serialization.errors import add_note, decode_failure, encode_error
from aiodaft.exceptions import DaftError
from aiodaft_transport import TransportError

# The types of values that travel in a frame as they are (see `is_plain`).
Plain: TypeAlias = str | bytes | float | bool | None


class NeedsFetch(Exception):
    """The objects behind a value of this process have changed: `GraphValue.fetch_own` copies the value first."""


class GraphValue:
    """One value of one run: an input or the result of a step that needs encoding, or a failure.

    A plain value stands for itself.
    """

    __slots__ = ("_received", "_slots", "executed", "failure", "source", "stored", "uses")

    def __init__(self, received: ReceivedValue | None = None, stored: StoredValue | None = None) -> None:
        self._received = received
        self._slots: list[ReceivedValue] = []
        # The number of uses, by steps of this process, of a value of another process.
        self.uses = 0
        # Encoded: each step that needs the value gets an exception of its own.
        self.failure: bytes | None = None
        self.executed: bool | None = None
        # The name of the failed part, if it was not a step of the graph.
        self.source: str | None = None
        # Set in the process that made the value.
        self.stored = stored

    @classmethod
    def of_error(cls, error: BaseException, *, executed: bool | None) -> GraphValue:
        value = cls()
        value.failure = encode_error(error)
        value.executed = executed
        return value

    def error_for(self, label: str, source: str) -> BaseException:
        """The error of the step `label`, which needs this failed result of the step `source`."""
        assert self.failure is not None
        error = decode_failure(self.failure, self.executed)
        add_note(error, f"needed by {label}, which did not run: its argument is the result of {self.source or source}")
        return error

    def take(self, store: Store, *, patient: bool) -> Any:
        """Decode the value for one use. Safe in any thread.

        Raises:
            NeedsFetch: `fetch_own` has to be called first.
        """
        own = None if self.stored is None else _objects(self.stored)
        if own is not None:
            return store.decode_now(own, refs=own.refs, patient=patient)
        received, slots = self._received, self._slots
        if received is None:
            raise NeedsFetch
        if self.uses != 1:
            # Several steps use it, maybe at the same time: each may change its own copy.
            received, slots = store.copy(received), [store.copy(slot) for slot in slots]
        values = [store.decode_now(slot, refs=slot.refs, patient=patient) for slot in slots]
        return store.decode_now(received, values, received.refs, patient=patient)

    def used(self) -> None:
        if self.uses == 1:
            self._received, self._slots = None, []

    async def fetch_own(self, objects: Objects) -> None:
        assert self.stored is not None
        await objects.store.make_ready(self.stored)
        # Another step may have fetched it meanwhile, and the owner freed it.
        if self._received is None:
            self._received = await objects.transfer.take_own(self.stored)


Flowing: TypeAlias = GraphValue | Plain


def item_of(value: Flowing, index: int, refs: RefTable, route: Route, *, executed: bool) -> GraphItem:
    """A value as a message over `route` carries it. If it cannot be sent, a failure with this `executed`."""
    if type(value) is not GraphValue:
        return (index, value)
    stored = value.stored
    if stored is not None:
        try:
            inner = tuple(refs.describe(ref) for ref in stored.refs)
            slots = refs.describe_values(stored.encoded.slots) if stored.encoded.slots else ()
            return (index, stored.payload, stored.blobs_for(route), inner, slots)
        except (DaftError, TransportError) as error:
            value = GraphValue.of_error(error, executed=executed)
    return (index, value.failure, value.executed)


def value_of(item: GraphItem) -> GraphValue | None:
    """The value of a FAILED_VALUE or ENCODED_VALUE; None if it has to be fetched."""
    if len(item) == FAILED_VALUE:
        value = GraphValue()
        _, value.failure, value.executed = item
        return value
    _, payload, blobs, refs, slots = item
    return None if refs or slots or isinstance(blobs, tuple) else GraphValue(ReceivedValue(payload, blobs, [], []))


async def fetch(objects: Objects, route: Route, item: GraphItem) -> GraphValue:
    _, payload, blobs, refs, slots = item
    store, transfer = objects.store, objects.transfer
    value = GraphValue()
    label: str | None = None
    try:
        value._received = await transfer.receive(Delivery(store, route, payload, blobs, refs))
        for slot in slots:
            if isinstance(slot[0], bytes):
                value._slots.append(await transfer.receive(Delivery(store, route, *slot)))
            else:
                owner, number, producer, label = slot
                value._slots.append(await transfer.pull(owner, number, producer))
    except Exception as error:  # noqa: BLE001 - the steps that need the value fail with the error
        value = GraphValue.of_error(error, executed=False)
        value.source = label
    return value


def _objects(stored: StoredValue) -> ReceivedValue | None:
    """A value of this process without its shared memory: it is small, or its objects are still unchanged."""
    blobs = stored.blobs()
    if not blobs:
        return ReceivedValue(stored.payload, stored.inline, [], stored.refs)
    objects = [stored.origin(index) for index in range(len(stored.origins))]
    if any(found is None for found in objects):
        return None
    received = ReceivedValue(stored.payload, None, [memoryview(b"")] * len(blobs), stored.refs)
    received.origin = objects.__getitem__
    return received
