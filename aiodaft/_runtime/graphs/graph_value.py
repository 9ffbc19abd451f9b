"""Values that flow between the steps of a graph, in a process and in messages; the process as graphs see it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.messages import FAILED_VALUE, GraphItem
from aiodaft._protocol.graphs.listing import ValueNote
from aiodaft._protocol.graphs.plan import ActorKey, Dataflow, SubPlan, make_plan
from aiodaft._protocol.graphs.run import BEING_COPIED, UNSENT, OwnedRun, RunEvent, RunState
from aiodaft._protocol.ids import ActorId, CallId, PeerId
from aiodaft._runtime.actors.hosted_actor import HostedActor
from aiodaft._runtime.calls.call import CallState, Target
from aiodaft._runtime.calls.following import FollowingTarget
from aiodaft._runtime.calls.outgoing import Outgoing
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.connections.route import Route
from aiodaft._runtime.objects.ref_state import RefState, state_of
from aiodaft._runtime.objects.ref_table import RefTable
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.objects.transfer import Delivery, Objects
from aiodaft._runtime.platform.tasks import Terms
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization.containers import builder
from aiodaft._runtime.serialization.decoder import ReceivedValue
from aiodaft._runtime.serialization.encoded import Places
from aiodaft._runtime.serialization.encoder import Names, all_plain, encode, is_plain
from aiodaft._runtime.serialization.errors import add_note, copy_error, decode_failure, encode_error
from aiodaft.exceptions import CallCancelled, DaftError, PeerLost
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


# One run of a graph at its owner: its inputs, its results, and the refs of them.

Specs: TypeAlias = list[tuple[Target, MethodSpec]]


class Deployment:
    """A dataflow on the processes where its actors are. When an actor moves or is replaced, a new one is made.

    Attributes:
        results: For each output: the actor and the method that make it, and the connection it comes over (None if it is
            made in this process).
        run_routes: For each process the route to it, the inputs that it needs, and the positions of its outputs among
            all.
        is_cut: Whether a connection between its processes broke, so that the next run needs another deployment.
        followed: Its supervised actors, also those that only have steps of collectives beside them.
    """

    def __init__(self, context: GraphContext, dataflow: Dataflow[Arguments], specs: Specs) -> None:
        """Cut the dataflow up.

        Raises:
            CyclicGraph: Its steps would wait for each other in a cycle.
        """
        self._context = context
        self.number = context.process.next_number()
        self.dataflow = dataflow.with_actors([(_place(target), target.label) for target, _ in specs])
        self.plans = make_plan(self.dataflow)
        self.reports = {
            result.value: process for process, plan in self.plans.items() for result in plan.results if result.reported
        }
        self.routes = {process: context.connections.route_to(process) for process in self.plans}
        self.results: dict[int, tuple[Target, MethodSpec, Connection | None]] = {}
        for value in dataflow.outputs:
            route = self.routes[self.reports[value]]
            connection = None if route is context.connections.loopback else cast("Connection", route)
            self.results[value] = (*specs[value - dataflow.inputs], connection)
        position = [*self.results].index
        self.run_routes = [
            (self.routes[process], plan.inputs, tuple(map(position, plan.outputs)))
            for process, plan in self.plans.items()
        ]
        self._failed = self.is_cut = False
        self._places = [(host, _place(host)) for host in dict.fromkeys(target.host for target, _ in specs)]
        self.followed = [host for host, _ in self._places if isinstance(host, FollowingTarget)]

    @property
    def is_stale(self) -> bool:
        if self.is_cut or not self.followed:
            return self.is_cut
        return self._failed or any(_place(host) != place for host, place in self._places)

    async def arrive(self) -> None:
        while True:
            for target in self.followed:
                await target.arrive()
            if not any(target.is_down for target in self.followed):
                return

    async def install(self) -> None:
        start = self._context.process.tasks.start
        installing = [
            start(self._install(plan), name=f"install a graph in {plan.process}") for plan in self.plans.values()
        ]
        results = await asyncio.gather(*installing, return_exceptions=True)
        failed = next((result for result in results if isinstance(result, BaseException)), None)
        if failed is not None:
            self._failed = True
            self.is_cut = type(failed) is PeerLost
            raise failed

    async def _install(self, plan: SubPlan[Arguments]) -> None:
        self._context.connections.want_rings(self.routes[plan.process])
        await self._context.agent_of(plan.process).install(self.number, Opaque(plan))

    def uninstall(self) -> None:
        for process in self.plans:
            connection = self._context.connections.get(process)
            if connection is None or connection.lost is None:
                self._context.process.tasks.create_task(self._uninstall(process), name=f"forget a graph in {process}")

    async def _uninstall(self, process: PeerId) -> None:
        # A process that dies meanwhile needs no message.
        with suppress(DaftError):
            await self._context.agent_of(process).uninstall(self.number)


def _place(target: Target) -> ActorKey:
    return target.host.remote, target.actor


class GraphOfRun(Protocol):
    store: Store
    inputs: int
    specs: Specs

    def may_begin(self) -> bool: ...

    def turn_came(self, run: OwnerRun) -> None: ...

    def withdraw(self, run: OwnerRun) -> None: ...


class ResultState(CallState):
    run: OwnerRun

    def _cancel(self, why: str) -> bool:
        if self._cancelling:
            return True
        self.expect_cancellation()
        if any(not (state.settled or state._cancelling) for state in self.run.states.values()):
            self.on_error(CallCancelled(f"{self.label} was cancelled, and its run goes on: {why}"))
        elif self.run.cancel(why):
            self._give_up_later(why)
        return True

    def _release_remote(self) -> None:
        if self.connection is None:
            self.objects.store.drop((self.process.id, self.number))
        super()._release_remote()


class OwnerRun(OwnedRun):
    terms: Terms | None = None
    deployment: Deployment | None = None
    # The actors, and the graph itself, because its runs keep their order.
    lanes: Sequence[Hashable] = ()
    # Refs inside the inputs.
    used: list[RefState] | None = None
    # All inputs travel in frames as they are.
    is_plain = False
    has_failed = False

    def __init__(self, graph: GraphOfRun, numbers: tuple[CallId, ...]) -> None:
        # Not by `super`: the fewer functions a run enters, the better.
        self.missing = {}
        self._graph = graph
        self.numbers = numbers
        self.states: dict[int, ResultState] = {}
        self.inputs: list[Flowing] = []

    def may_go(self) -> bool:
        return self.state is RunState.WAITING and self._graph.may_begin()

    def go(self) -> None:
        self._graph.turn_came(self)

    def take_inputs(self, args: tuple[Any, ...]) -> list[StoredValue]:
        """Returns those that a helper thread or an accelerator has to copy."""
        if all_plain(args):
            self.is_plain = True
            self.inputs = [*args]
            return []
        waits: list[StoredValue] = []
        for index, arg in enumerate(args):
            if is_plain(arg):
                self.inputs.append(arg)
                continue
            stored = self._graph.store.keep(arg, _names(index, arg), resolve=True)
            self.inputs.append(self._use(stored))
            if not (self._graph.store.pack_now(stored) and stored.ready):
                waits.append(stored)
        return waits

    def _use(self, stored: StoredValue) -> GraphValue:
        used = [state_of(ref) for ref in (*stored.encoded.slots, *stored.refs)]
        for state in used:
            state.add_use()
        self.used = [*(self.used or ()), *used]
        return GraphValue(stored=stored)

    def drop_inputs(self) -> None:
        if not self.is_plain:
            for value in self.inputs:
                if type(value) is GraphValue and value.stored is not None:
                    value.stored.release()
        self.inputs = []

    def cancel(self, why: str) -> bool:
        for state in self.states.values():
            state.expect_cancellation()
        if self.state in UNSENT:
            self.fail(CallCancelled(f"the run was cancelled before it began: {why}", executed=False))
            self._graph.withdraw(self)
            return False
        if self.state is RunState.UNDER_WAY and self.deployment is not None:
            self.on(RunEvent.CANCELLED)
            for route in self.deployment.routes.values():
                route.send_in_turn(m.skip(self.deployment.number, self.number))
        return True

    def settle(self, item: m.GraphItem, refs: list[Ref[Any]]) -> None:
        kind, state = len(item), self.states.get(item[0])
        if state is None and kind == m.FAILED_VALUE:
            state = self._unheld(item[0])
        if state is None:
            return
        if kind == m.PLAIN_VALUE:
            state.on_plain(item[1])
        elif kind == m.STORED_VALUE:
            state.on_stored()
        elif kind == m.FAILED_VALUE:
            state.on_error(decode_failure(item[1], item[2]))
        else:
            state.on_result(ReceivedValue(item[1], item[2], [], refs))

    def _unheld(self, index: int) -> ResultState:
        """The state of a step without a ref: its error is reported as that of any dropped ref."""
        target, spec = self._graph.specs[index - self._graph.inputs]
        state = ResultState(target, spec, target.caller.next_number())
        state.run = self
        state.handles = 0
        if self.state is RunState.CANCELLED:
            state.expect_cancellation()
        return state

    def fail(self, error: BaseException) -> None:
        for state in self.states.values():
            state.on_error(copy_error(error).with_executed(False) if isinstance(error, DaftError) else error)
        self.release()

    def release(self) -> None:
        """Free the values that a run that is over holds. Idempotent; nothing while inputs are being copied."""
        if self.state in BEING_COPIED:
            return
        if self.inputs:
            self.drop_inputs()
        if self.used:
            for state in self.used:
                state.drop_use()
            self.used = None
        # Breaks a cycle.
        self.states = {}


def _names(index: int, arg: Any) -> Names:
    return Names("the graph", ((f"args[{index}]", arg),))
