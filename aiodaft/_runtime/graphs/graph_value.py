"""Values that flow between the steps of a graph, in a process and in messages; the process as graphs see it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

from aiodaft._protocol.connections.messages import FAILED_VALUE, GraphItem
from aiodaft._protocol.graphs.layout import ValueNote
from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft._runtime.actors.hosted_actor import HostedActor
from aiodaft._runtime.calls.call import Target
from aiodaft._runtime.calls.outgoing import Outgoing
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.connections.route import Route
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.objects.ref_table import RefTable
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.objects.transfer import Delivery, Objects
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization.containers import builder
from aiodaft._runtime.serialization.decoder import ReceivedValue
from aiodaft._runtime.serialization.encoded import Places
from aiodaft._runtime.serialization.encoder import Names, encode, is_plain
from aiodaft._runtime.serialization.errors import add_note, decode_failure, encode_error
from aiodaft.exceptions import DaftError
from aiodaft.methods import MethodSpec
from aiodaft.ref import Ref
from aiodaft_transport import TransportError


class Arguments:
    """A method and its arguments. Not a dataclass, so that refs stay refs."""

    __slots__ = ("blob", "flat", "method", "outside", "payload", "refs", "slots")

    def __init__(
        self, target: Target, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: dict[Any, int]
    ) -> None:
        """Encode arguments. `numbers` maps the states of the graph's own refs to the numbers of their values.

        Raises:
            SerializationError: A constant cannot travel.
            TypeError: A ref of the graph is inside an object that only the method itself could search.
        """
        self.method = spec.name
        self.outside: list[Ref[Any]] = []
        # Refs inside objects other than containers and records: the method gets the refs themselves.
        self.refs: list[Ref[Any]] = []
        self.payload = b""
        self.blob: bytes | None = None
        # Positional arguments that need no decoding: (True, position of a slot) or (False, constant).
        self.flat: tuple[tuple[bool, Any], ...] | None = None
        if not kwargs and all(is_plain(arg) or _is_slot(arg, target) for arg in args):
            slot = iter(range(len(args)))
            self.flat = tuple((True, next(slot)) if isinstance(arg, Ref) else (False, arg) for arg in args)
            slots = [arg for arg in args if isinstance(arg, Ref)]
        else:
            slots = self._encode(target, spec, args, kwargs)
        if any(ref._state in numbers for ref in self.refs):
            raise TypeError(f"{spec.label}: a ref of the graph is inside an object that is no container or record")
        # For refs from outside, numbers from -1 down.
        self.slots = tuple(self._number_of(ref, numbers) for ref in slots)

    def _encode(
        self, target: Target, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Ref[Any]]:
        parts = [(spec.argument(index), arg) for index, arg in enumerate(args)]
        names, places = Names(spec.label, (*parts, *kwargs.items()), target.label), Places(home=target.caller.process)
        encoded = encode([list(args), kwargs], names=names, places=places, resolve=True)
        self.payload, self.blob = encoded.payload, encoded.packed()
        self.refs = encoded.refs
        return encoded.slots

    def _number_of(self, ref: Ref[Any], numbers: dict[Any, int]) -> int:
        number = numbers.get(ref._state)
        if number is None:
            self.outside.append(ref)
            number = -len(self.outside)
        return number

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_arguments, tuple(getattr(self, name) for name in self.__slots__)

    @property
    def needs(self) -> tuple[int, ...]:
        return tuple(number for number in self.slots if number >= 0)

    @property
    def is_bare(self) -> bool:
        return self.flat is not None and all(is_slot for is_slot, _ in self.flat)

    def make(self, store: Store, values: list[Any], *, patient: bool) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of one run, from the values of the slots. Runs share no mutable part of them."""
        if self.flat is not None:
            return [values[part] if is_slot else part for is_slot, part in self.flat], {}
        blobs = [] if self.blob is None else [memoryview(bytearray(self.blob))]
        received = ReceivedValue(self.payload, None, blobs, self.refs)
        args, kwargs = store.decode_now(received, values, self.refs, patient=patient)
        return args, kwargs


@builder
def _rebuild_arguments(*parts: Any) -> Arguments:
    arguments = Arguments.__new__(Arguments)
    for name, part in zip(Arguments.__slots__, parts, strict=True):
        setattr(arguments, name, part)
    return arguments


def _is_slot(value: Any, target: Target) -> bool:
    if not isinstance(value, Ref):
        return False
    state = state_of(value)
    return state.parts() is None and state.process is target.caller.process


@builder
class Opaque:
    """An argument that travels as it is: the encoder does not look for refs inside it."""

    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content

    def __repr__(self) -> str:
        return f"<{type(self.content).__name__}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Opaque, (self.content,)


Plain: TypeAlias = str | bytes | float | bool | None


class NeedsFetch(Exception):
    """The objects behind a value of this process have changed."""


class GraphValue:
    """One value of one run: an input or the result of a step that needs encoding, or a failure.

    A plain value stands for itself.
    """

    __slots__ = ("_received", "_slots", "executed", "failure", "source", "stored", "uses")

    def __init__(self, received: ReceivedValue | None = None, stored: StoredValue | None = None) -> None:
        self._received = received
        self._slots: list[ReceivedValue] = []
        self.uses = 0
        # Encoded: each step that needs the value gets an exception of its own.
        self.failure: bytes | None = None
        self.executed: bool | None = None
        self.source: str | None = None
        self.stored = stored

    @classmethod
    def of_error(cls, error: BaseException, *, executed: bool | None) -> GraphValue:
        value = cls()
        value.failure = encode_error(error)
        value.executed = executed
        return value

    def error_for(self, label: str, source: str) -> BaseException:
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
    """A value as a message over `route` carries it; a failure with this `executed` if it cannot be sent."""
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
    """A value without its shared memory: it is small, or its objects are still unchanged."""
    blobs = stored.blobs()
    if not blobs:
        return ReceivedValue(stored.payload, stored.inline, [], stored.refs)
    objects = [stored.origin(index) for index in range(len(stored.origins))]
    if any(found is None for found in objects):
        return None
    received = ReceivedValue(stored.payload, None, [memoryview(b"")] * len(blobs), stored.refs)
    received.origin = objects.__getitem__
    return received


class Tell(Protocol):
    def tell(self, number: int, run: int, why: DaftError, /) -> None: ...


class TellOfEdge(Protocol):
    def tell(self, number: int, process: str, why: DaftError, /) -> None: ...


class GraphAgent(Protocol):
    @property
    def step_failed(self) -> Tell: ...

    @property
    def run_failed(self) -> Tell: ...

    @property
    def edge_cut(self) -> TellOfEdge: ...

    @property
    def edge_failed(self) -> TellOfEdge: ...

    def install(self, number: int, plan: Opaque, /) -> Awaitable[None]: ...

    def uninstall(self, number: int, /) -> Awaitable[None]: ...

    def graph_notes(self, number: int, /) -> Awaitable[dict[int, ValueNote]]: ...


class GraphContext(NamedTuple):
    """The parts of a process that its graphs use. `outgoing` orders runs among the calls of the process."""

    process: Process
    connections: Connections
    objects: Objects
    outgoing: Outgoing
    actors: Mapping[ActorId, HostedActor]
    agent_of: Callable[[PeerId], GraphAgent]

    def when_explained(self, route: Route, tell: Callable[[DaftError], object]) -> None:
        async def explain() -> None:
            tell(await self.connections.explanation(cast("Connection", route)))

        self.process.tasks.create_task(explain(), name="explain a lost actor")
