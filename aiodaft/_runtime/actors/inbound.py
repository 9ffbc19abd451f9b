"""Calls that arrive in this process: find the actor, fetch the arguments."""

from __future__ import annotations

import asyncio
from typing import Any

from aiodaft._protocol import messages as m
from aiodaft._protocol.call import ANSWER, FETCHED, FETCHING, WITHDRAW
from aiodaft._protocol.ids import ActorId, CallId, PeerId, number_of
from aiodaft._protocol.messages import WANT_NOTHING, WANT_REPLY, WANT_STREAM, Message
from aiodaft._protocol.stream import CREDIT_WINDOW
from aiodaft._runtime.actors.hosted_actor import Host, HostedActor, InboundCall
from aiodaft._runtime.actors.responders import LocalResponder, RemoteResponder
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.route import Route
from aiodaft._runtime.objects.received import ReceivedValue
from aiodaft._runtime.objects.ref_table import RefTable
from aiodaft._runtime.objects.transfer import Delivery, Transfer
from aiodaft._runtime.platform.context import deadline_of
from aiodaft._runtime.serialization.containers import contains_ref, resolved
from aiodaft._runtime.serialization.decoder import is_heavy
from aiodaft._runtime.serialization.errors import add_note, encode_error, passed_on
from aiodaft.exceptions import ActorDied, RemoteProtocolError, StaleHandle


class Inbound:
    """The calls that other processes, and this one, make to the actors of this process."""

    def __init__(self, host: Host, transfer: Transfer, refs: RefTable) -> None:
        self._host = host
        self._actors = host.actors
        self._process = host.process
        self._store = host.store
        self._transfer = transfer
        self._refs = refs
        self.local = LocalResponder()
        self._responders: dict[PeerId, RemoteResponder] = {}

    def responders(self) -> list[RemoteResponder]:
        """What answers each process that calls this one."""
        return list(self._responders.values())

    def find(self, owner: PeerId, number: CallId) -> InboundCall | None:
        """A call that waits or runs here."""
        responder = self.local if owner == self._process.id else self._responders.get(owner)
        return None if responder is None else responder.calls.get(number)

    def call_came(self, connection: Connection, message: Message) -> None:
        """CALL came."""
        _, number, actor, name, args = message
        call = self._accept(connection, number, actor, name, WANT_REPLY, args)
        if call is not None:
            call.hosted.deliver(call)

    def send_came(self, connection: Connection, message: Message) -> None:
        """SEND came."""
        number, actor, name, mode, left, (payload, blobs, refs, slots), attempt = m.read_send(message)
        if mode not in (WANT_REPLY, WANT_STREAM, WANT_NOTHING):
            raise RemoteProtocolError(f"{connection.remote} makes a call of unknown mode {mode}")
        call = self._accept(connection, number, actor, name, mode, ())
        if call is None:
            self._store.decline(connection, blobs)
            return
        call.attempt = attempt
        if left is not None:
            call.deadline = deadline_of(left, self._process.loop.time)
        if mode == WANT_STREAM:
            call.credit = CREDIT_WINDOW
        if refs or slots or isinstance(blobs, tuple) or is_heavy(payload):
            call.stage = FETCHING
            call.hosted.deliver(call)
            # Arguments are fetched from now on, while the actor works on earlier calls.
            args = Delivery(self._store, connection, payload, blobs, refs)
            call.fetching = self._process.tasks.create_task(
                self._fetch(call, args, slots), name=f"fetch the arguments of {call.label}"
            )
        else:
            call.received = ReceivedValue(payload, blobs, [], [])
            call.hosted.deliver(call)

    def cancel_came(self, connection: Connection, message: Message) -> None:
        """CANCEL came; the call may be over by now."""
        call = self.find(connection.remote, m.read_cancel(message))
        if call is not None:
            call.hosted.cancel(call)

    def credit_came(self, connection: Connection, message: Message) -> None:
        """CREDIT came; the stream may be over by now."""
        number, count = m.read_credit(message)
        call = self.find(connection.remote, number)
        if call is not None:
            call.add_credit(count)

    def adopted_came(self, connection: Connection, message: Message) -> None:
        """ADOPTED came."""
        responder = self._responders.get(connection.remote)
        if responder is not None:
            responder.adopted(m.read_adopted(message))

    def connection_lost(self, connection: Connection) -> None:
        """A caller is gone: cancel its calls."""
        responder = self._responders.pop(connection.remote, None)
        if responder is not None:
            for call in list(responder.calls.values()):
                call.hosted.cancel(call)
                call.handle(ANSWER)
            responder.calls.clear()

    def deliver_local(self, hosted: HostedActor, call: InboundCall) -> None:
        """A call from this process to one of its own actors."""
        if hosted.bounds is not None and not hosted.admits(call):
            return
        if call.mode == WANT_STREAM:
            call.credit = CREDIT_WINDOW
        if _contains_ref((call.args, call.kwargs)):
            call.stage = FETCHING
            hosted.deliver(call)
            call.fetching = self._process.tasks.create_task(
                self._resolve_local(call), name=f"resolve the arguments of {call.label}"
            )
        else:
            hosted.deliver(call)

    def _accept(
        self, connection: Connection, number: CallId, actor: ActorId, name: str, mode: int, args: tuple[Any, ...]
    ) -> InboundCall | None:
        hosted = self._actors.get(actor)
        spec = None if hosted is None else hosted.find_spec(name)
        if hosted is None or spec is None:
            self._turn_away(connection, number, actor, name)
            return None
        responder = self._responders.get(connection.remote)
        if responder is None:
            responder = self._responders[connection.remote] = RemoteResponder(connection, self._store, self._refs)
        call = InboundCall(responder, connection.remote, number, hosted, spec, mode, args)
        if responder.calls.setdefault(number, call) is not call:
            raise RemoteProtocolError(f"{connection.remote} uses the number of call {number} twice")
        return call if hosted.bounds is None or hosted.admits(call) else None

    def _turn_away(self, connection: Connection, number: CallId, actor: ActorId, name: str) -> None:
        error: Exception
        hosted = self._actors.get(actor)
        if hosted is not None:
            error = hosted.lacks(name)
        elif any(number_of(other) == number_of(actor) for other in self._actors):
            error = StaleHandle("the actor was restarted: the handle leads to an earlier incarnation of it")
        else:
            name = self._host.stopped.get(actor, "")
            error = ActorDied(f"{name or 'the actor'} was stopped", executed=False)
            error.actor = name
        connection.send(m.error(number, encode_error(error), False))

    async def _fetch(self, call: InboundCall, args: Delivery, slots: tuple[Any, ...]) -> None:
        """Fetch the buffers and the awaited refs of a call, all at once."""
        values = [
            self._process.tasks.start(self._slot(args.connection, call, slot), name="pull an argument")
            for slot in slots
        ]
        try:
            call.received = await self._transfer.receive(args)
            call.slots = [await value for value in values]
            if not call.rules.on_thread:
                await self._decode_heavy(call)
        except BaseException as error:
            for value in values:
                value.cancel()
            await asyncio.gather(*values, return_exceptions=True)
            if not isinstance(error, Exception):
                # The call was cancelled.
                raise
            self._not_ready(call, error)
        else:
            self._fetched(call)

    async def _decode_heavy(self, call: InboundCall) -> None:
        """What takes long to decode is decoded by the helper thread; light arguments are when the call starts."""
        received, slots = call.received, call.slots
        assert received is not None
        if any(is_heavy(part.payload) for part in (received, *slots)):
            values = [await self._store.decode(slot, refs=slot.refs) for slot in slots]
            args, call.kwargs = await self._store.decode(received, values, received.refs)
            call.args = tuple(args)
            call.received, call.slots = None, ()

    async def _slot(self, connection: Route, call: InboundCall, slot: tuple[Any, ...]) -> ReceivedValue:
        if isinstance(slot[0], bytes):
            payload, inline, refs = slot
            return await self._transfer.receive(Delivery(self._store, connection, payload, inline, refs))
        owner, number, producer, label = slot
        try:
            return await self._transfer.pull(owner, number, producer)
        except Exception as error:
            consumer = f"{call.label} of {call.hosted.name}"
            add_note(error, f"needed by {consumer}, which did not run: its argument is the result of {label}")
            raise

    async def _resolve_local(self, call: InboundCall) -> None:
        try:
            call.args, call.kwargs = await resolved((call.args, call.kwargs))
        except Exception as error:  # noqa: BLE001 - the call fails with it
            add_note(error, f"needed by {call.label} of {call.hosted.name}, which did not run")
            self._not_ready(call, error)
        else:
            self._fetched(call)

    def _fetched(self, call: InboundCall) -> None:
        call.fetching = None
        if call.handle(FETCHED):
            call.hosted.look_again()

    def _not_ready(self, call: InboundCall, error: BaseException) -> None:
        """Fail a call, because its arguments could not be fetched."""
        call.fetching = None
        if call.handle(WITHDRAW):
            call.responder.fail(call, passed_on(error, executed=False), executed=False)
            call.hosted.look_again()


def _contains_ref(arguments: Any) -> bool:
    try:
        return contains_ref(arguments)
    except RecursionError:
        # A value that contains itself: refs in it travel as refs, as they do between processes.
        return False
