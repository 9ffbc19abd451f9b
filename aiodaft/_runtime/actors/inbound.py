"""Calls that arrive in this process: finds the actor and brings the arguments in."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from aiodaft._protocol import messages as m
from aiodaft._protocol.ids import ActorId, CallId, PeerId, number_of
from aiodaft._protocol.messages import ERROR, WANT_NOTHING, WANT_REPLY, WANT_STREAM, Message
from aiodaft._runtime.actors.inbound_call import InboundCall
from aiodaft._runtime.actors.responders import RemoteResponder
from aiodaft._runtime.objects.delivery import Delivery
from aiodaft._runtime.objects.received import ReceivedValue
from aiodaft._runtime.objects.streams import CREDIT_WINDOW
from aiodaft._runtime.platform.context import deadline_of
from aiodaft._runtime.serialization.decoder import is_heavy
from aiodaft._runtime.serialization.encoder import contains_ref, resolved
from aiodaft._runtime.serialization.errors import add_note, encode_error, passed_on
from aiodaft.exceptions import ActorDied, RemoteProtocolError, StaleHandle

if TYPE_CHECKING:
    from aiodaft._runtime.actors.hosted_actor import HostedActor
    from aiodaft._runtime.connections.connection import Connection
    from aiodaft._runtime.connections.route import Route
    from aiodaft._runtime.peer import Peer

# Stopped actors whose names are remembered.
_REMEMBERED: Final = 1024


class Inbound:
    """The incoming side of one process."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._callers: dict[PeerId, RemoteResponder] = {}
        # The latest actors that were stopped here, with their names.
        self._stopped: dict[ActorId, str] = {}

    def remove(self, hosted: HostedActor) -> None:
        """An actor is not hosted any more; calls that still come for it are refused in its name."""
        self._peer.actors.pop(hosted.id, None)
        self._stopped[hosted.id] = hosted.name
        while len(self._stopped) > _REMEMBERED:
            del self._stopped[next(iter(self._stopped))]

    def caller(self, connection: Connection) -> RemoteResponder:
        """The caller at the other end of a connection."""
        caller = self._callers.get(connection.remote)
        if caller is None:
            caller = self._callers[connection.remote] = RemoteResponder(self._peer, connection)
        return caller

    def call_of(self, remote: PeerId, number: CallId) -> InboundCall | None:
        """A call from another process that is queued or runs here."""
        caller = self._callers.get(remote)
        return None if caller is None else caller.calls.get(number)

    def calls(self) -> list[InboundCall]:
        """All calls from other processes that are queued or run here."""
        return [call for caller in self._callers.values() for call in caller.calls.values()]

    def call_came(self, connection: Connection, message: Message) -> None:
        """CALL came."""
        _, number, actor, name, args = message
        call = self._accept(connection, number, actor, name, WANT_REPLY, args)
        if call is not None:
            call.hosted.deliver(call)

    def send_came(self, connection: Connection, message: Message) -> None:
        """SEND came."""
        _, number, actor, name, mode, left, payload, blobs, refs, slots, attempt = message
        if mode not in (WANT_REPLY, WANT_STREAM, WANT_NOTHING):
            raise RemoteProtocolError(f"{connection.remote} makes a call of unknown mode {mode}")
        call = self._accept(connection, number, actor, name, mode, ())
        if call is None:
            self._peer.store.decline(connection, blobs)
            return
        call.attempt = attempt
        if left is not None:
            call.deadline = deadline_of(left, self._peer.process.loop.time)
        if mode == WANT_STREAM:
            call.credit = CREDIT_WINDOW
        if refs or slots or isinstance(blobs, tuple) or is_heavy(payload):
            call.ready = False
            call.hosted.deliver(call)
            # Arguments are fetched from now on, while the actor works on earlier calls.
            args = Delivery(self._peer.store, connection, payload, blobs, refs)
            call.bringing = self._peer.process.tasks.create_task(
                self._bring(call, args, slots), name=f"bring {call.label}"
            )
        else:
            call.arrived = ReceivedValue(payload, blobs, [], [])
            call.hosted.deliver(call)

    def cancel_came(self, connection: Connection, message: Message) -> None:
        """CANCEL came; the call may be over by now."""
        call = self.call_of(connection.remote, m.read_cancel(message))
        if call is not None:
            call.hosted.cancel(call)

    def credit_came(self, connection: Connection, message: Message) -> None:
        """CREDIT came; the stream may be over by now."""
        number, count = m.read_credit(message)
        call = self.call_of(connection.remote, number)
        if call is not None:
            call.add_credit(count)

    def adopted_came(self, connection: Connection, message: Message) -> None:
        """ADOPTED came."""
        self.caller(connection).adopted(m.read_adopted(message))

    def connection_lost(self, connection: Connection) -> None:
        """A caller is gone: nobody wants its calls any more."""
        caller = self._callers.pop(connection.remote, None)
        for call in () if caller is None else list(caller.calls.values()):
            call.hosted.cancel(call)
            call.over = True

    def deliver_local(self, hosted: HostedActor, call: InboundCall) -> None:
        """A call from this process to one of its own actors."""
        if hosted.bounds is not None and not hosted.admits(call):
            return
        if call.wants_stream:
            call.credit = CREDIT_WINDOW
        if _contains_ref((call.args, call.kwargs)):
            call.ready = False
            hosted.deliver(call)
            call.bringing = self._peer.process.tasks.create_task(
                self._resolve_local(call), name=f"resolve the arguments of {call.label}"
            )
        else:
            hosted.deliver(call)

    def _accept(
        self, connection: Connection, number: CallId, actor: ActorId, name: str, mode: int, args: tuple[Any, ...]
    ) -> InboundCall | None:
        hosted = self._peer.actors.get(actor)
        spec = None if hosted is None else hosted.find_spec(name)
        if hosted is None or spec is None:
            self._turn_away(connection, number, actor, name)
            return None
        caller = self._callers.get(connection.remote) or self.caller(connection)
        call = InboundCall(caller, connection.remote, number, hosted, spec, mode, args)
        if caller.calls.setdefault(number, call) is not call:
            raise RemoteProtocolError(f"{connection.remote} uses the number of call {number} twice")
        return call if hosted.bounds is None or hosted.admits(call) else None

    def _turn_away(self, connection: Connection, number: CallId, actor: ActorId, name: str) -> None:
        error: Exception
        hosted = self._peer.actors.get(actor)
        if hosted is not None:
            error = AttributeError(f"{hosted.name} has no remote method {name!r:.80}")
        elif any(number_of(other) == number_of(actor) for other in self._peer.actors):
            error = StaleHandle("the actor was restarted: the handle leads to an earlier incarnation of it")
        else:
            name = self._stopped.get(actor, "")
            error = ActorDied(f"{name or 'the actor'} was stopped", executed=False)
            error.actor = name
        connection.send((ERROR, number, encode_error(error), False))

    async def _bring(self, call: InboundCall, args: Delivery, slots: tuple[Any, ...]) -> None:
        """Bring in the buffers and the awaited refs of a call, all at once."""
        values = [
            self._peer.process.tasks.start(self._slot(args.connection, call, slot), name="pull an argument")
            for slot in slots
        ]
        try:
            call.arrived = await self._peer.transfer.receive(args)
            call.slots = [await value for value in values]
            if not call.rules.on_thread:
                await self._decode_heavy(call)
        except BaseException as error:
            for value in values:
                value.cancel()
            await asyncio.gather(*values, return_exceptions=True)
            if not isinstance(error, Exception):
                # The call was cancelled: nobody needs them any more.
                raise
            self._not_ready(call, error)
        else:
            self._brought(call)

    async def _decode_heavy(self, call: InboundCall) -> None:
        """What takes long to decode is decoded by the helper thread; light arguments are when the call starts."""
        arrived, slots = call.arrived, call.slots
        assert arrived is not None
        if any(is_heavy(part.payload) for part in (arrived, *slots)):
            values = [await self._peer.store.decode(slot, refs=slot.refs) for slot in slots]
            args, call.kwargs = await self._peer.store.decode(arrived, values, arrived.refs)
            call.args = tuple(args)
            call.arrived, call.slots = None, ()

    async def _slot(self, connection: Route, call: InboundCall, slot: tuple[Any, ...]) -> ReceivedValue:
        if isinstance(slot[0], bytes):
            payload, inline, refs = slot
            return await self._peer.transfer.receive(Delivery(self._peer.store, connection, payload, inline, refs))
        owner, number, producer, label = slot
        try:
            return await self._peer.transfer.pull(owner, number, producer)
        except Exception as error:
            consumer = f"{call.label} of {call.hosted.name}"
            add_note(error, f"needed by {consumer}, which did not run: its argument is the result of {label}")
            raise

    async def _resolve_local(self, call: InboundCall) -> None:
        try:
            call.args, call.kwargs = await resolved((call.args, call.kwargs))
        except Exception as error:  # noqa: BLE001 - whatever it is, the call fails of it
            add_note(error, f"needed by {call.label} of {call.hosted.name}, which did not run")
            self._not_ready(call, error)
        else:
            self._brought(call)

    def _brought(self, call: InboundCall) -> None:
        call.bringing = None
        call.ready = True
        call.hosted.look_again()

    def _not_ready(self, call: InboundCall, error: BaseException) -> None:
        """Its arguments will never be there."""
        call.bringing = None
        if call.over:
            return
        call.withdrawn = True
        call.caller_connection.fail(call, passed_on(error, executed=False), executed=False)
        call.hosted.look_again()


def _contains_ref(arguments: Any) -> bool:
    try:
        return contains_ref(arguments)
    except RecursionError:
        # A value that contains itself: refs in it travel as refs, as they do between processes.
        return False
