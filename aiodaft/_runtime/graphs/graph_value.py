"""Values that flow between the steps of a graph: as they are kept until they are used, and as they travel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from aiodaft._runtime.objects.delivery import Delivery
from aiodaft._runtime.objects.received import ReceivedValue
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.serialization.errors import add_note, decode_failure, encode_error
from aiodaft.exceptions import DaftError
from aiodaft_transport import TransportError

if TYPE_CHECKING:
    from aiodaft._runtime.connections.route import Route
    from aiodaft._runtime.objects.store import Store
    from aiodaft._runtime.peer import Peer

# What travels in a frame as it is (see `is_plain`).
Plain: TypeAlias = str | bytes | float | bool | None
# See `messages`: (index, plain), (index, error, executed), (index, payload, blobs, refs, slots) or (index,).
Item: TypeAlias = tuple[Any, ...]


class NotAtHand(Exception):
    """A value has to be fetched before it can be used, though it was made in this very process."""


class GraphValue:
    """An input, or the result of a step, in one run; one that needs encoding, or a failure.

    What travels in a frame as it is stands for itself.
    """

    __slots__ = ("_arrived", "_slots", "_uses", "executed", "failure", "kept", "source")

    def __init__(self) -> None:
        self._arrived: ReceivedValue | None = None
        self._slots: list[ReceivedValue] = []
        self._uses = 0
        # Encoded: whoever needs it gets an exception of its own.
        self.failure: bytes | None = None
        self.executed: bool | None = None
        # What failed, where that was no step of the graph.
        self.source: str | None = None
        # Where it was made.
        self.kept: StoredValue | None = None

    @classmethod
    def of_error(cls, error: BaseException, *, executed: bool | None) -> GraphValue:
        """There is none."""
        value = cls()
        value.failure = encode_error(error)
        value.executed = executed
        return value

    @classmethod
    def of_kept(cls, kept: StoredValue) -> GraphValue:
        """A result that is encoded and packed."""
        value = cls()
        value.kept = kept
        return value

    def for_uses(self, count: int) -> None:
        """It is used so often in this process."""
        self._uses = count

    def error_for(self, label: str, source: str) -> BaseException:
        """Why a step cannot run that needs it."""
        assert self.failure is not None
        error = decode_failure(self.failure, self.executed)
        add_note(error, f"needed by {label}, which did not run: its argument is the result of {self.source or source}")
        return error

    def take(self, store: Store, *, patient: bool) -> Any:
        """The value, for one use. Safe in any thread.

        Raises:
            NotAtHand: It needs `fetch_own`.
        """
        own = None if self.kept is None else _objects(self.kept)
        if own is not None:
            return store.decode_now(own, refs=own.refs, patient=patient)
        arrived, slots = self._arrived, self._slots
        if arrived is None:
            raise NotAtHand
        if self._uses != 1:
            # Others use it too, maybe at this moment: what one of them does to its own must not show in theirs.
            arrived, slots = store.copy(arrived), [store.copy(slot) for slot in slots]
        values = [store.decode_now(slot, refs=slot.refs, patient=patient) for slot in slots]
        return store.decode_now(arrived, values, arrived.refs, patient=patient)

    def used(self) -> None:
        """A step has taken it."""
        if self._uses == 1:
            self._arrived, self._slots = None, []

    async def fetch_own(self, peer: Peer) -> None:
        """Fetch what was made in this very process, as others do: its memory is not needed any more."""
        assert self.kept is not None
        await peer.store.make_ready(self.kept)
        # By now somebody else may have done it, and the owner have freed it.
        if self._arrived is None:
            self._arrived = await peer.transfer.take_own(self.kept)

    # Travelling.

    def item(self, index: int, peer: Peer, neighbour: Route) -> Item:
        """What is said of it to another process.

        Raises:
            BorrowError: A lent buffer was written to.
        """
        if self.failure is not None:
            return (index, self.failure, self.executed)
        kept = self.kept
        assert kept is not None
        refs = tuple(peer.refs.describe(ref) for ref in kept.refs)
        slots = peer.refs.describe_values(kept.encoded.slots) if kept.encoded.slots else ()
        return (index, kept.payload, kept.blobs_for(neighbour), refs, slots)


Flowing: TypeAlias = GraphValue | Plain


def is_failure(value: Flowing) -> bool:
    """Whether there is no value."""
    return type(value) is GraphValue and value.failure is not None


def item_of(value: Flowing, index: int, peer: Peer, neighbour: Route, *, executed: bool) -> Item:
    """What is said of a value to another process; `executed` is for the case that this fails."""
    if type(value) is not GraphValue:
        return (index, value)
    try:
        return value.item(index, peer, neighbour)
    except (DaftError, TransportError) as error:
        return GraphValue.of_error(error, executed=executed).item(index, peer, neighbour)


def value_of(item: Item) -> GraphValue | None:
    """The value that an item of more than two parts brings with it; None if it has to be fetched."""
    value = GraphValue()
    if len(item) == 3:
        _, value.failure, value.executed = item
        return value
    _, payload, blobs, refs, slots = item
    if refs or slots or isinstance(blobs, tuple):
        return None
    value._arrived = ReceivedValue(payload, blobs, [], [])
    return value


async def fetch(peer: Peer, neighbour: Route, item: Item) -> GraphValue:
    """Get the value that an item tells of; a failure, if that fails."""
    _, payload, blobs, refs, slots = item
    value = GraphValue()
    label: str | None = None
    try:
        value._arrived = await peer.transfer.receive(Delivery(peer.store, neighbour, payload, blobs, refs))
        for slot in slots:
            if isinstance(slot[0], bytes):
                value._slots.append(await peer.transfer.receive(Delivery(peer.store, neighbour, *slot)))
            else:
                owner, number, producer, label = slot
                value._slots.append(await peer.transfer.pull(owner, number, producer))
    except Exception as error:  # noqa: BLE001 - whatever it is, the steps that need the value fail of it
        value = GraphValue.of_error(error, executed=False)
        value.source = label
    return value


def _objects(kept: StoredValue) -> ReceivedValue | None:
    """A value made in this very process, without its memory: if it is small, or its objects are still the same."""
    blobs = kept.blobs()
    if not blobs:
        return ReceivedValue(kept.payload, kept.inline, [], kept.refs)
    objects = [kept.origin(index) for index in range(len(kept.origins))]
    if any(found is None for found in objects):
        return None
    arrived = ReceivedValue(kept.payload, None, [memoryview(b"")] * len(blobs), kept.refs)
    arrived.origin = objects.__getitem__
    return arrived
