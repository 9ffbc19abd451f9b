"""Values between processes: pulled by key, from whoever has them.

Whoever wants a value asks its producer, also before the value is made; the producer answers when it is. A process
that does not have it says so, and the question goes to the owner, who always knows.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.messages import BROKEN, MOVED, PULL, VALUE, Message
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.objects.broadcast import Fetching, Relays
from aiodaft._runtime.objects.delivery import Blob, Delivery
from aiodaft._runtime.objects.into_tensor import IntoTensor
from aiodaft._runtime.objects.owner import InboundProducer
from aiodaft._runtime.objects.received import ReceivedValue
from aiodaft._runtime.objects.ref_state import THERE, RefState
from aiodaft._runtime.objects.ref_table import RefTable
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.platform.exhaustion import exhausted
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization.errors import add_note, copy_error, decode_error, encode_error
from aiodaft.exceptions import ActorDied, DaftError, OwnerDied, PeerLost, RemoteProtocolError
from aiodaft_transport import DEVICE_NAME, DeviceError, TransportError, Unreachable, size_of

# Where a value is: kept here, at another process, or nowhere because making it failed.
Elsewhere: TypeAlias = PeerId | BaseException
Place: TypeAlias = StoredValue | Elsewhere

# owner -> producer -> owner is the longest honest chain, and two processes on the way may have had nothing to pass on;
# more means that somebody lies.
_MAX_HOPS: Final = 8

_BY_WAY_OF_HOST: Final = (
    "the value is in the memory of a GPU: return x.cpu(), or let it travel by way of host memory "
    "(@method(transport='shm'), rt.put(x, transport='shm'), or Runtime(transport='shm') for all)"
)


class Transfer:
    """Moves values into and out of one process."""

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
        self.relays = Relays(process, connections, store, self.locate_elsewhere)
        self._pulls: dict[tuple[PeerId, PeerId, CallId], deque[asyncio.Future[Delivery | Elsewhere]]] = {}

    # Wanting a value.

    async def pull(
        self, owner: PeerId, number: CallId, producer: PeerId, landing: IntoTensor | None = None
    ) -> ReceivedValue:
        """Get a value, straight into the landing if there is one that fits it.

        Raises:
            OwnerDied: Its owner is gone.
            ValueError: It is a tensor that the landing has no place for.
            BaseException: What making it raised.
        """
        asked = self._process.id if (owner, number) in self._store.entries else producer
        for _ in range(_MAX_HOPS):
            place: ReceivedValue | Place
            if asked == self._process.id:
                place = await self._locate_here(owner, number)
            else:
                with self.relays.fetching((owner, number)) as fetching:
                    place = await self._follow(fetching, asked, owner, number, landing)
            if isinstance(place, ReceivedValue):
                return place
            if isinstance(place, StoredValue):
                return await self.take_own(place, landing)
            if isinstance(place, BaseException):
                raise place
            asked = place
        raise _nobody_has(owner, number)

    async def _follow(
        self, fetching: Fetching, asked: PeerId, owner: PeerId, number: CallId, landing: IntoTensor | None
    ) -> ReceivedValue | Elsewhere:
        """Ask one process after the other, until one has the value or the way leads back here."""
        sender: PeerId | None = None
        for _ in range(_MAX_HOPS):
            answer = await self._ask(fetching, asked, owner, number, landing)
            if isinstance(answer, ReceivedValue):
                return answer
            if sender is not None and sender == fetching.root:
                # It was to pass the value on, and died, or had none: whoever said so knows others.
                self.relays.let_down(sender, (owner, number), asked)
                asked, sender = sender, None
            elif isinstance(answer, BaseException) or answer == self._process.id:
                return answer
            else:
                sender, asked = asked, answer
        raise _nobody_has(owner, number)

    async def _ask(
        self, fetching: Fetching, asked: PeerId, owner: PeerId, number: CallId, landing: IntoTensor | None
    ) -> ReceivedValue | Elsewhere:
        connection = self._connections.to(asked)
        try:
            answer = await self._question(connection, owner, number)
            if not isinstance(answer, Delivery):
                return answer
            self.relays.answered(fetching, (owner, number))
            first = answer.granted()
            arrived = await self.receive(answer, landing)
        except TransportError as error:
            # Nobody is gone; this process cannot have the value.
            return error
        except (PeerLost, ActorDied) as error:
            if owner == self._process.id or connection.lost is None:
                return error
            if asked != owner:
                # The owner may have the value, and knows best how its producer ended.
                return owner
            raise OwnerDied(f"the owner of a ref, {owner}, is gone: {error}") from error
        if first is not None:
            await self.relays.keep(fetching, (owner, number), arrived, first[0])
        return arrived

    async def _question(self, connection: Connection, owner: PeerId, number: CallId) -> Delivery | Elsewhere:
        if connection.lost is not None:
            raise copy_error(await self._connections.explanation(connection))
        key = (connection.remote, owner, number)
        answer: asyncio.Future[Delivery | Elsewhere] = self._process.loop.create_future()
        self._pulls.setdefault(key, deque()).append(answer)
        connection.send((PULL, owner, number))
        return await answer

    def answered(self, connection: Connection, message: Message) -> None:
        """A VALUE, MOVED or BROKEN came."""
        key = (connection.remote, message[1], message[2])
        waiting = self._pulls.get(key)
        if not waiting:
            raise RemoteProtocolError(f"{connection.remote} answers a question that was not asked")
        answer = waiting.popleft()
        if not waiting:
            del self._pulls[key]
        if answer.done():
            # Whoever asked was cancelled.
            self._store.decline(connection, message[4] if message[0] == VALUE else None)
        elif message[0] == VALUE:
            _, _, _, payload, blobs, refs = message
            answer.set_result(Delivery(self._store, connection, payload, blobs, refs))
        else:
            answer.set_result(PeerId(message[3]) if message[0] == MOVED else decode_error(message[3]))

    def connection_lost(self, connection: Connection, error: DaftError) -> None:
        """Nothing more will be answered over a connection."""
        for key in [key for key in self._pulls if key[0] == connection.remote]:
            for answer in self._pulls.pop(key):
                if not answer.done():
                    answer.set_exception(copy_error(error))

    async def receive(self, delivery: Delivery, landing: IntoTensor | None = None) -> ReceivedValue:
        """Bring in a value that was granted. What went straight into the landing is memory of its target.

        Raises:
            TransportError: This process cannot have it: it is out of reach, or a device failed.
            PeerLost, ActorDied: How its process ended; or it lives, and the bytes do not come all the same.
            ResourceExhausted: This process has no memory or descriptor for it.
        """
        views: list[Any] = []
        try:
            states = await self._refs.adopt(delivery.refs, delivery.connection)
            while (blob := delivery.granted()) is not None:
                views.append(await self._fetch(delivery, blob, landing))
        except (Unreachable, DeviceError):
            raise
        except TransportError as error:
            otherwise = f"a value could not be fetched from it: {error}"
            raise await self._connections.why_lost(delivery.connection, otherwise) from error
        except OSError as error:
            raise exhausted(error, f"a value from {delivery.connection.remote} cannot be received") from error
        finally:
            # Nothing, if all of it is here.
            delivery.decline()
        return ReceivedValue(delivery.payload, delivery.inline, views, states)

    async def _fetch(self, delivery: Delivery, blob: Blob, landing: IntoTensor | None) -> Any:
        """Bring one blob here, or into the landing if there is one that fits."""
        name, grant = blob
        connection, traffic = delivery.connection, delivery.connection.traffic
        transport = self._store.transport_named(name)
        try:
            memory = None if landing is None else self._memory_in(landing, delivery, blob)
            delivery.taken()
            if landing is None or memory is None:
                view = await transport.fetch(grant, connection)
            else:
                await landing.fill(transport.fetch_into(grant, connection, memory))
                view = memory
        except Unreachable as error:
            if name == DEVICE_NAME:
                add_note(error, _BY_WAY_OF_HOST)
            raise
        traffic.payloads_received += 1
        traffic.payload_received += size_of(grant)
        traffic.device_received += size_of(grant) if name == DEVICE_NAME else 0
        return view

    def _memory_in(self, landing: IntoTensor, delivery: Delivery, blob: Blob) -> Any:
        """Where in the target the transport is to write; None if it cannot."""
        name, grant = blob
        fits = landing.fits(delivery.payload, size_of(grant))
        return self._store.memory_in(landing.target, name, grant, delivery.connection) if fits else None

    async def _locate_here(self, owner: PeerId, number: CallId) -> Place:
        found: asyncio.Future[Place] = self._process.loop.create_future()

        def settle(place: Place) -> None:
            if not found.done():
                found.set_result(place)

        self.locate(owner, number, settle)
        return await found

    async def take_own(self, kept: StoredValue, landing: IntoTensor | None = None) -> ReceivedValue:
        """A value kept in this very process: the objects themselves where they still are what they were."""
        await self._store.make_ready(kept)
        connection = self._connections.loopback
        arrived = await self.receive(
            Delivery(self._store, connection, kept.payload, kept.blobs_for(connection), ()), landing
        )
        arrived.refs = kept.refs
        arrived.origin = kept.origin
        return arrived

    # Having a value.

    def locate(self, owner: PeerId, number: CallId, found: Callable[[Place], object]) -> None:
        """Say where a value is, as soon as that is known."""
        kept = self._store.entries.get((owner, number))
        if kept is not None:
            found(kept)
        elif not self.relays.wait((owner, number), found):
            self.locate_elsewhere(owner, number, found)

    def locate_elsewhere(self, owner: PeerId, number: CallId, found: Callable[[Place], object]) -> None:
        """Say where a value is that this process does not keep, and is not getting either."""
        if owner == self._process.id:
            self._locate_own(number, found)
        else:
            call = self._running_call(owner, number)
            if call is not None:
                call.add_puller(found)
            else:
                # Not here yet, or no longer: the owner knows.
                found(owner)

    def _locate_own(self, number: CallId, found: Callable[[Place], object]) -> None:
        state = self._refs.find(number)
        if state is None:
            found(_freed(self._process.id, number))
        else:
            state.watch(lambda settled: self._locate_settled(settled, found))

    def _locate_settled(self, state: RefState, found: Callable[[Place], object]) -> None:
        connection = self._connections.get(state.producer)
        if state.free:
            # By now nobody needs it any more, the asker included: keeping it anew would keep it for ever.
            found(_freed(state.owner, state.number))
        elif state.status is THERE and connection is not None and connection.lost is not None:
            self._process.tasks.create_task(
                self._explain_loss(connection, found), name=f"explain the loss of {state.label}"
            )
        else:
            found(self._place_of(state))

    async def _explain_loss(self, connection: Connection, found: Callable[[Place], object]) -> None:
        found(copy_error(await self._connections.explanation(connection)))

    def _place_of(self, state: RefState) -> Place:
        if state.error is not None:
            state.mark_seen()
            return state.error
        if state.status is THERE:
            return state.producer
        if state.kept is None:
            state.kept = self._refs.keep(state)
        return state.kept

    def asked(self, connection: Connection, message: Message) -> None:
        """A PULL came."""
        _, owner, number = message
        self.locate(owner, number, lambda place: self._tell(connection, owner, number, place))

    def _tell(self, connection: Connection, owner: PeerId, number: CallId, place: Place) -> None:
        if connection.lost is not None:
            return
        if isinstance(place, BaseException):
            connection.send((BROKEN, owner, number, encode_error(place)))
        elif not isinstance(place, StoredValue):
            connection.send((MOVED, owner, number, place))
        elif place.ready:
            self._give(connection, owner, number, place)
        else:
            self._process.tasks.create_task(self._pack_and_give(connection, owner, number, place), name="pack")

    async def _pack_and_give(self, connection: Connection, owner: PeerId, number: CallId, kept: StoredValue) -> None:
        try:
            await self._store.make_ready(kept)
        except Exception as error:  # noqa: BLE001 - the asker gets it
            self._tell(connection, owner, number, error)
        else:
            self._give(connection, owner, number, kept)

    def _give(self, connection: Connection, owner: PeerId, number: CallId, kept: StoredValue) -> None:
        source = self.relays.source_for(connection, (owner, number), kept)
        if source is not None:
            connection.send((MOVED, owner, number, source))
            return
        try:
            blobs = kept.blobs_for(connection)
        except (DaftError, TransportError) as error:
            connection.send((BROKEN, owner, number, encode_error(error)))
            return
        refs = tuple(self._refs.describe(ref) for ref in kept.refs)
        connection.send((VALUE, owner, number, kept.payload, blobs, refs))


def _nobody_has(owner: PeerId, number: CallId) -> RemoteProtocolError:
    return RemoteProtocolError(f"nobody has the value of ref {number} of {owner}")


def _freed(owner: PeerId, number: CallId) -> OwnerDied:
    return OwnerDied(f"ref {number} of {owner} was freed")
