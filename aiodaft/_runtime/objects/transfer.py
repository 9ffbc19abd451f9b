"""Moves values between processes: the consumer pulls by key, from the process that `objects.broadcast` chooses.

It may ask for a value before that exists; the producer answers when it does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

from aiodaft._protocol.calls.outgoing import Handover
from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.diagnostics import trace
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.objects.broadcast import Pull, Questions
from aiodaft._protocol.objects.value import Key, Where
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.connections.route import Route
from aiodaft._runtime.objects.broadcast import Fetching, Relays
from aiodaft._runtime.objects.ref_state import InboundProducer, RefHost, RefMessages, RefState
from aiodaft._runtime.objects.ref_table import RefTable
from aiodaft._runtime.objects.store import IntoTensor, Store
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.platform.linux import exhausted
from aiodaft._runtime.platform.tasks import logger
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization.decoder import Plain, ReceivedValue, is_heavy
from aiodaft._runtime.serialization.encoder import plain_payload
from aiodaft._runtime.serialization.errors import add_note, copy_error, decode_error, encode_error
from aiodaft.exceptions import ActorDied, DaftError, OwnerDied, PeerLost
from aiodaft_transport import DEVICE_NAME, Block, DeviceError, Grant, TransportError, Unreachable, size_of

_THROUGH_HOST: Final = (
    "the value is in the memory of a GPU: return x.cpu(), or send it through host memory (@method(transport='shm'), "
    "rt.put(x, transport='shm'), or Runtime(transport='shm') for all)"
)

Blob: TypeAlias = tuple[str, Grant]
# The process to ask for a value, or why there is none.
Elsewhere: TypeAlias = PeerId | BaseException
Place: TypeAlias = StoredValue | ReceivedValue | Plain | Elsewhere


class Delivery:
    """A value as a message brought it; made when the message is handled, before anything can be cancelled.

    Blobs that were not fetched go back when the delivery is dropped, since a task may be cancelled before its first
    step.
    """

    __slots__ = ("_store", "blobs", "connection", "granted", "in_place", "inline", "payload", "refs")

    def __init__(self, store: Store, connection: Route, payload: bytes, blobs: Any, refs: tuple[Any, ...]) -> None:
        self._store = store
        self.connection = connection
        self.payload = payload
        self.refs = refs
        self.inline: bytes | None = None if isinstance(blobs, tuple) else blobs
        # Blobs that no transport has begun to fetch: it is responsible for the blob from then on.
        self.granted: deque[Blob] = deque(blobs if isinstance(blobs, tuple) else ())
        self.blobs: list[Any] = []
        # The receiver only reads it: memory of an accelerator is read where it lies.
        self.in_place = False

    def fetch_now(self) -> bool:
        """Fetch the memory that is mapped here. Returns whether to receive and decode it never waits."""
        recorder = self._store.process.recorder
        while self.granted:
            (name, grant), began = self.granted[0], 0.0 if recorder is None else recorder.now()
            if name == DEVICE_NAME:
                devices = self._store.devices.transport
                blob = (devices.read_now if self.in_place else devices.bring_now)(grant, self.connection)
            else:
                blob = self._store.transport_named(name).fetch_now(grant, self.connection)
            if blob is None:
                return False
            self.granted.popleft()
            self.fetched(name, grant, blob, began)
        return not (self.refs or is_heavy(self.payload))

    def received(self) -> ReceivedValue:
        return ReceivedValue(self.payload, self.inline, self.blobs, [])

    def fetched(self, name: str, grant: Grant, blob: Any, began: float) -> None:
        traffic, size = self.connection.traffic, size_of(grant)
        traffic.payloads_received += 1
        traffic.payload_received += size
        traffic.device_received += size if name == DEVICE_NAME else 0
        self.blobs.append(blob)
        recorder = self._store.process.recorder
        if recorder is not None:
            recorder.add(trace.fetched(began, recorder.now(), name, size, self.connection.remote))

    def decline(self) -> None:
        while self.granted:
            self._store.decline(self.connection, (self.granted.popleft(),))

    def __del__(self) -> None:
        if self.granted:
            self._store.call_soon(partial(Delivery.decline, self))


Came: TypeAlias = Delivery | Plain | Elsewhere
Taker: TypeAlias = Callable[[Came], object]


class Transfer:
    def __init__(
        self,
        process: Process,
        connections: Connections,
        store: Store,
        refs: RefTable,
        running_call: Callable[[PeerId, CallId], InboundProducer | None],
    ) -> None:
        self._process = process
        self._connections = connections
        self._store = store
        self._refs = refs
        self._running_call = running_call
        self.relays = Relays(process, connections, store, self._locate_elsewhere)
        self.questions: Questions[asyncio.Future[Came]] = Questions()
        # Answers to FORWARD.
        self.handover: Handover[Came, Taker] = Handover()

    async def pull(
        self,
        owner: PeerId,
        number: CallId,
        producer: PeerId,
        into: IntoTensor | None = None,
        *,
        in_place: bool = False,
    ) -> ReceivedValue:
        """Get a value: straight into the tensor of `into` if it fits, or in place for a method that only reads it.

        Raises:
            OwnerDied: Its owner is gone.
            ValueError: The value does not fit the tensor.
            BaseException: The error of the call that makes it.
        """
        key, local = (owner, number), self._process.id
        route = Pull(local, key, local if key in self._store.entries else producer)
        while True:
            if route.asked == local:
                place = await self._locate_here(key)
                if isinstance(place, StoredValue):
                    return await self.take_own(place, into, in_place=in_place)
                if isinstance(place, ReceivedValue):
                    return place
                if isinstance(place, Plain):
                    return _received(place)
                route.handle(place, None)
                continue
            with self.relays.fetching(key) as fetching:
                while route.asked != local:
                    lost = False
                    connection = self._connections.to(route.asked)
                    try:
                        answer = await self._ask(fetching, connection, key, into, in_place=in_place)
                    except TransportError as error:
                        # The asked process lives; this one cannot get the value.
                        answer = error
                    except (PeerLost, ActorDied) as error:
                        answer, lost = error, connection.lost is not None
                    if isinstance(answer, ReceivedValue):
                        return answer
                    relay = route.handle(answer, fetching.root, lost=lost)
                    if relay is not None:
                        self.relays.leave(route.asked, key, relay)

    async def _ask(
        self, fetching: Fetching, connection: Connection, key: Key, into: IntoTensor | None, *, in_place: bool
    ) -> ReceivedValue | Elsewhere:
        answer = await self._question(connection, key)
        if isinstance(answer, Plain):
            return _received(answer)
        if not isinstance(answer, Delivery):
            return answer
        answer.in_place = in_place
        self.relays.answered(fetching, key)
        via = answer.granted[0][0] if answer.granted else None
        if via == "tcp" and len(answer.granted) == 1 and into is None and not connection.shares_memory:
            landing = self.relays.landing(fetching, key, size_of(answer.granted[0][1]))
            if landing is not None:
                return await self._land(fetching, key, answer, landing)
        received = await self.receive(answer, into)
        if via is not None:
            # Between machines, the copy is for the other processes of this one.
            await self.relays.keep(fetching, key, received, via if connection.shares_memory else None)
        return received

    async def _land(self, fetching: Fetching, key: Key, delivery: Delivery, landing: Block) -> ReceivedValue:
        try:
            received = await self.receive(delivery, landing=landing)
        except BaseException:
            landing.release()
            raise
        stored = self._store.landed(received, landing, fetching.root)
        kept = self.relays.landed(fetching, key, stored)
        try:
            return await self.take_own(stored)
        finally:
            if not kept:
                stored.release()

    async def _question(self, connection: Connection, key: Key) -> Came:
        if connection.lost is not None:
            raise copy_error(await self._connections.explanation(connection))
        answer: asyncio.Future[Came] = self._process.loop.create_future()
        self.questions.ask(connection.remote, key, answer)
        connection.send((m.PULL, *key))
        return await answer

    def answered(self, connection: Connection, message: m.Message) -> None:
        kind, owner, number, *value = message
        came: Came
        if kind == m.VALUE:
            # If the pull was cancelled, the delivery returns the grants.
            came = Delivery(self._store, connection, *value)
        else:
            came = value[0] if kind == m.MOVED else decode_error(value[0])
        self._came(connection, (owner, number), came)

    def given_came(self, connection: Connection, message: m.Message) -> None:
        owner, number, value = m.read_given(message)
        self._came(connection, (owner, number), Plain(value))

    def _came(self, connection: Connection, key: Key, came: Came) -> None:
        # A process that is asked does not say that it is to be asked: so only a FORWARD is answered.
        forwarded = came == connection.remote
        asked = key[0] in (self._process.id, connection.remote) or self.questions.asked(connection.remote, key)
        if asked and not forwarded:
            answer = self.questions.answered(connection.remote, key)
            if not answer.done():
                answer.set_result(came)
        # The answer to a FORWARD may come before the first message of the owner.
        elif self._connections.to(key[0]).lost is None:
            take = self.handover.came(connection.remote, key, came)
            if take is not None:
                take(came)

    def expect(self, producer: PeerId, key: Key, take: Taker) -> None:
        """Take the answer to a FORWARD, for a call that came from the owner of the ref; or a process to ask."""
        # Its loss shows that no answer comes.
        connection = self._connections.to(producer)
        came = self.handover.expect(producer, key, take)
        if came is not None:
            take(came)
        elif connection.lost is not None:
            _ask_owners(self.handover.lost(producer))

    def ask_came(self, connection: Connection, message: m.Message) -> None:
        for take in self.handover.ask((connection.remote, m.read_ask(message))):
            take(connection.remote)

    def renewed_came(self, connection: Connection, message: m.Message) -> None:
        """RENEWED came: answers that this process expects may have gone over the lost connection."""
        logger.debug("%s has lost a connection to this process: %s", connection.remote, m.read_renewed(message))
        self.doubt(connection.remote)

    def doubt(self, remote: PeerId) -> None:
        """There is a new connection to a process: messages over the one before may be lost."""
        _ask_owners(self.handover.doubt(remote))

    def connection_lost(self, connection: Connection, error: DaftError) -> None:
        # A new one in its place was cause to ask, too.
        if self._connections.get(connection.remote) in (None, connection):
            _ask_owners(self.handover.lost(connection.remote))
        for answer in self.questions.lost(connection.remote):
            if not answer.done():
                answer.set_exception(copy_error(error))

    async def receive(
        self, delivery: Delivery, into: IntoTensor | None = None, landing: Block | None = None
    ) -> ReceivedValue:
        """Fetch the blobs of a delivery: straight into the tensor if they fit, or into a block for the only one.

        Raises:
            TransportError: The memory is out of reach, or a device failed.
            PeerLost, ActorDied: The process ended, or the transfer failed although it lives.
            ResourceExhausted: This process has no memory or descriptor for it.
        """
        try:
            refs = await self._refs.adopt(delivery.refs, delivery.connection) if delivery.refs else []
            while delivery.granted:
                await self._fetch(delivery, into, landing)
        except (Unreachable, DeviceError):
            raise
        except TransportError as error:
            otherwise = f"a value could not be fetched from it: {error}"
            raise await self._connections.why_lost(delivery.connection, otherwise) from error
        except OSError as error:
            raise exhausted(error, f"a value from {delivery.connection.remote} cannot be received") from error
        finally:
            delivery.decline()
        return ReceivedValue(delivery.payload, delivery.inline, delivery.blobs, refs)

    async def _fetch(self, delivery: Delivery, into: IntoTensor | None, landing: Block | None) -> None:
        (name, grant), connection = delivery.granted[0], delivery.connection
        transport, began = self._store.transport_named(name), self._process.env.monotonic()
        try:
            memory: Any = None if landing is None else landing.view
            if into is not None and into.fits(delivery.payload, size_of(grant)):
                memory = self._store.memory_in(into.target, name, grant, connection)
            delivery.granted.popleft()
            if memory is None and name == DEVICE_NAME:
                devices = self._store.devices.transport
                view = await (devices.read if delivery.in_place else devices.bring)(grant, connection)
            elif memory is None:
                view = await transport.fetch(grant, connection)
            else:
                fetching = transport.fetch_into(grant, connection, memory)
                await (fetching if into is None else into.fill(fetching))
                view = memory
        except Unreachable as error:
            if name == DEVICE_NAME:
                add_note(error, _THROUGH_HOST)
            raise
        delivery.fetched(name, grant, view, began)

    async def _locate_here(self, key: Key) -> Place:
        place: asyncio.Future[Place] = self._process.loop.create_future()
        self.locate(key, lambda found: None if place.done() else place.set_result(found))
        return await place

    async def take_own(
        self, stored: StoredValue, into: IntoTensor | None = None, *, in_place: bool = False
    ) -> ReceivedValue:
        """Receive a value that this process stores; unchanged objects of this process are used as they are."""
        if not (stored.packed or stored.encoded.on_device or into is not None):
            received = stored.objects()
            if received is not None:
                return received
        await self._store.make_ready(stored)
        delivery = self._own(stored)
        delivery.in_place = in_place
        received = await self.receive(delivery, into)
        received.refs = stored.refs
        received.origin = stored.origin
        return received

    def take_own_now(self, stored: StoredValue) -> ReceivedValue | None:
        """The same, of a value in host memory that is quickly decoded; None of any other one."""
        if not stored.in_host_memory or stored.refs or is_heavy(stored.payload):
            return None
        delivery = self._own(stored)
        if not delivery.fetch_now():
            return None
        received = delivery.received()
        received.origin = stored.origin
        return received

    def _own(self, stored: StoredValue) -> Delivery:
        loopback = self._connections.loopback
        return Delivery(self._store, loopback, stored.payload, stored.blobs_for(loopback), ())

    def locate(self, key: Key, found: Callable[[Place], object]) -> None:
        stored = self._store.entries.get(key)
        if stored is not None:
            found(stored)
        elif not self.relays.wait(key, found):
            self._locate_elsewhere(key, found)

    def _locate_elsewhere(self, key: Key, found: Callable[[Place], object]) -> None:
        owner, number = key
        if owner != self._process.id:
            call = self._running_call(owner, number)
            if call is not None and not call.given_up:
                call.add_puller(found)
            else:
                # The value is not here yet, or no longer, or never: the owner knows where it is.
                found(owner)
            return
        state = self._refs.find(number)
        if state is None:
            found(_freed(owner, number))
        else:
            state.watch(lambda settled: self._locate_settled(settled, found))

    def _locate_settled(self, state: RefState, found: Callable[[Place], object]) -> None:
        # There may be another connection to the producer: it has dropped the value when the first one broke.
        connection = state.connection
        where = state.where(producer_lost=connection is not None and connection.lost is not None)
        if where is Where.NOWHERE:
            found(_freed(state.owner, state.number))
        elif where is Where.LOST:
            assert connection is not None
            explaining = self._explain_loss(connection, found)
            self._process.tasks.create_task(explaining, name=f"explain the loss of {state.label}")
        elif state.error is not None:
            state.mark_seen()
            found(state.error)
        else:
            found(state.producer if where is Where.PRODUCER else self._refs.stored(state))

    async def _explain_loss(self, connection: Connection, found: Callable[[Place], object]) -> None:
        found(copy_error(await self._connections.explanation(connection)))

    def asked(self, connection: Connection, message: m.Message) -> None:
        _, owner, number = message
        key = (owner, number)
        self.locate(key, lambda place: self._tell(connection, key, place))

    def giver(self, key: Key, consumer: PeerId) -> Callable[[Place], None]:
        return partial(self._tell, self._connections.to(consumer), key, asked=False)

    def _tell(self, connection: Connection, key: Key, place: Place, *, asked: bool = True) -> None:
        if connection.lost is not None:
            return
        if isinstance(place, Plain):
            connection.send(m.given(*key, place.value))
        elif isinstance(place, ReceivedValue):
            connection.send((m.VALUE, *key, place.payload, None, ()))
        elif isinstance(place, BaseException):
            connection.send((m.BROKEN, *key, encode_error(place)))
        elif not isinstance(place, StoredValue):
            connection.send((m.MOVED, *key, place))
        elif place.ready:
            self._give(connection, key, place, asked=asked)
        elif place.packed:
            place.when_filled(lambda: self._give(connection, key, place, asked=asked))
        else:
            self._process.tasks.create_task(self._pack_and_give(connection, key, place, asked=asked), name="pack")

    async def _pack_and_give(self, connection: Connection, key: Key, stored: StoredValue, *, asked: bool) -> None:
        try:
            await self._store.make_ready(stored)
        except Exception as error:  # noqa: BLE001 - the process that asked gets it
            self._tell(connection, key, error)
        else:
            self._give(connection, key, stored, asked=asked)

    def _give(self, connection: Connection, key: Key, stored: StoredValue, *, asked: bool) -> None:
        # A process takes part in a broadcast only if it asks.
        source = self.relays.source_for(connection, key, stored) if asked else self.relays.root_of(connection, stored)
        if source is not None:
            connection.send((m.MOVED, *key, source))
            return
        try:
            blobs = stored.blobs_for(connection)
        except (DaftError, TransportError) as error:
            connection.send((m.BROKEN, *key, encode_error(error)))
            return
        refs = tuple(self._refs.describe(ref) for ref in stored.refs)
        connection.send((m.VALUE, *key, stored.payload, blobs, refs))


def _ask_owners(found: list[tuple[Key, Taker]]) -> None:
    for (owner, _), take in found:
        take(owner)


def _received(plain: Plain) -> ReceivedValue:
    return ReceivedValue(plain_payload(plain.value), None, [], [])


def _freed(owner: PeerId, number: CallId) -> OwnerDied:
    return OwnerDied(f"ref {number} of {owner} was freed")


class Objects(RefHost):
    def __init__(self, process: Process, connections: Connections, store: Store, owner: RefMessages) -> None:
        super().__init__(process, store, owner, connections.ring_poller.wakeups)
        self.refs = RefTable(self, connections)
        self.transfer = Transfer(process, connections, store, self.refs, owner.running_call)
        self.pull = self.transfer.pull
