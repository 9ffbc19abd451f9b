"""Calls that arrive in this process: find the actor, admit and deliver."""

from __future__ import annotations

from typing import Any

from aiodaft._protocol.calls.call import ANSWER, FETCHING
from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.messages import CALL, WANT_NOTHING, WANT_REPLY, WANT_STREAM, Message
from aiodaft._protocol.ids import ActorId, CallId, PeerId, number_of
from aiodaft._protocol.objects.stream import CREDIT_WINDOW
from aiodaft._runtime.actors.arguments import Arguments
from aiodaft._runtime.actors.host import Host
from aiodaft._runtime.actors.hosted_actor import HostedActor, InboundCall
from aiodaft._runtime.actors.responders import LocalResponder, RemoteResponder
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.objects.ref_table import RefTable
from aiodaft._runtime.objects.transfer import Delivery, Transfer
from aiodaft._runtime.platform.context import received_terms
from aiodaft._runtime.serialization.containers import contains_ref
from aiodaft._runtime.serialization.decoder import ReceivedValue, is_heavy
from aiodaft._runtime.serialization.encoder import all_plain
from aiodaft._runtime.serialization.errors import encode_error
from aiodaft._runtime.serialization.small import SMALL
from aiodaft.exceptions import ActorDied, RemoteProtocolError, StaleHandle


class Inbound:
    def __init__(self, host: Host, transfer: Transfer, refs: RefTable) -> None:
        self._host = host
        self._actors = host.actors
        self._process = host.process
        self._store = host.store
        self.arguments = Arguments(host, transfer)
        self._transfer = transfer
        self._refs = refs
        self.local = LocalResponder()
        self._responders: dict[PeerId, RemoteResponder] = {}

    def responders(self) -> list[RemoteResponder]:
        return list(self._responders.values())

    def find(self, owner: PeerId, number: CallId) -> InboundCall | None:
        responder = self.local if owner == self._process.id else self._responders.get(owner)
        return None if responder is None else responder.calls.get(number)

    def call_came(self, connection: Connection, message: Message) -> None:
        kind, number, actor, name, args = message
        call = self._accept(connection, number, actor, name, WANT_REPLY if kind == CALL else WANT_NOTHING, args)
        if call is not None:
            if args.__class__ is bytes:
                call.received = (
                    args if args[0] == SMALL else ReceivedValue(args, None, [], [], connection.definitions.heard)
                )
            call.hosted.deliver(call)

    def apply_came(self, connection: Connection, message: Message) -> None:
        number, actor, name, args, awaited = m.read_apply(message)
        call = self._accept(connection, number, actor, name, WANT_REPLY, args)
        if call is None:
            self.arguments.refuse(awaited)
        else:
            self.arguments.expect(call, awaited, self._responders[connection.remote].recall)
            call.hosted.deliver(call)

    def forward_came(self, connection: Connection, message: Message) -> None:
        number, consumer = m.read_forward(message)
        give = self._transfer.giver((connection.remote, number), consumer)
        responder = self._responders.get(connection.remote)
        call = None if responder is None else responder.calls.get(number)
        if call is not None:
            call.add_puller(give)
        elif responder is not None and (place := responder.recall(number)) is not None:
            give(place)
        else:
            self._transfer.locate((connection.remote, number), give)

    def send_came(self, connection: Connection, message: Message) -> None:
        number, actor, name, mode, terms, (payload, blobs, refs, slots), attempt = m.read_send(message)
        if mode not in (WANT_REPLY, WANT_STREAM, WANT_NOTHING):
            raise RemoteProtocolError(f"{connection.remote} makes a call of unknown mode {mode}")
        call = self._accept(connection, number, actor, name, mode, ())
        if call is None:
            self._store.decline(connection, blobs)
            return
        call.attempt = attempt
        if terms is not None:
            call.terms = came = received_terms(terms, self._process.loop.time)
            call.deadline = came.deadline
        if mode == WANT_STREAM:
            call.credit = CREDIT_WINDOW
        if refs or slots or isinstance(blobs, tuple) or is_heavy(payload):
            call.stage = FETCHING
            call.hosted.deliver(call)
            # Arguments are fetched from now on, while the actor works on earlier calls.
            args = Delivery(self._store, connection, payload, blobs, refs)
            self.arguments.fetch(call, args, slots)
        else:
            call.received = ReceivedValue(payload, blobs, [], [], connection.definitions.heard)
            call.hosted.deliver(call)

    def cancel_came(self, connection: Connection, message: Message) -> None:
        call = self.find(connection.remote, m.read_cancel(message))
        if call is not None:
            call.hosted.cancel(call)
            # The caller drops its result, and does not wait for its end for ever.
            call.dropped = True
            call.tell_pullers(call.caller)

    def credit_came(self, connection: Connection, message: Message) -> None:
        number, count = m.read_credit(message)
        call = self.find(connection.remote, number)
        if call is not None:
            call.add_credit(count)

    def adopted_came(self, connection: Connection, message: Message) -> None:
        responder = self._responders.get(connection.remote)
        if responder is not None:
            responder.adopted(m.read_adopted(message))

    def connection_lost(self, connection: Connection) -> None:
        responder = self._responders.pop(connection.remote, None)
        if responder is not None:
            for call in list(responder.calls.values()):
                call.hosted.cancel(call)
                call.handle(ANSWER)
            responder.forget()

    def deliver_local(self, hosted: HostedActor, call: InboundCall) -> None:
        if hosted.bounds is not None and not hosted.admits(call):
            return
        if call.mode == WANT_STREAM:
            call.credit = CREDIT_WINDOW
        if (call.kwargs or not all_plain(call.args)) and _contains_ref((call.args, call.kwargs)):
            call.stage = FETCHING
            hosted.deliver(call)
            self.arguments.resolve(call)
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
        if mode == WANT_NOTHING:
            call.dropped = True
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
            name, moved = self._host.stopped.get(actor, ("", False))
            if moved:
                connection.send(m.away(number))
                return
            error = ActorDied(f"{name or 'the actor'} was stopped", executed=False)
            error.actor = name
        connection.send(m.error(number, encode_error(error), False))


def _contains_ref(arguments: Any) -> bool:
    try:
        return contains_ref(arguments)
    except RecursionError:
        # A value that contains itself: refs in it travel as refs, as they do between processes.
        return False
