"""Calls that arrive in this process: find the actor, admit and deliver."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, Protocol

from aiodaft._protocol.calls.mailbox import ANSWER, FETCHING
from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.messages import CALL, WANT_NOTHING, WANT_REPLY, WANT_STREAM, Message
from aiodaft._protocol.ids import ActorId, CallId, PeerId, number_of
from aiodaft._protocol.objects.value import CREDIT_WINDOW
from aiodaft._runtime.actors.arguments import Arguments
from aiodaft._runtime.actors.host import Host
from aiodaft._runtime.actors.hosted_actor import HostedActor, InboundCall
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.objects.ref_table import RefTable
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.objects.streams import StreamState
from aiodaft._runtime.objects.transfer import Delivery, Place, Transfer
from aiodaft._runtime.platform.context import received_terms
from aiodaft._runtime.serialization.containers import contains_ref
from aiodaft._runtime.serialization.decoder import Plain, ReceivedValue, is_heavy
from aiodaft._runtime.serialization.encoder import all_plain
from aiodaft._runtime.serialization.errors import encode_error, passed_on
from aiodaft._runtime.serialization.small import SMALL, Small
from aiodaft.exceptions import ActorDied, CallCancelled, RemoteProtocolError, StaleHandle
from aiodaft.reading import unwrap

# Results that are remembered after their answer, in two generations; and bytes of one of them at most.
_REMEMBERED: Final = 256
_SMALL: Final = 4 << 10
_NONE: Final = object()


class RemoteResponder:
    """Answers the calls of the process at the other end of a connection."""

    is_local = False

    def __init__(self, connection: Connection, store: Store, refs: RefTable) -> None:
        self._connection = connection
        self._store = store
        self._refs = refs
        self.calls: dict[CallId, InboundCall] = {}
        # Refs inside results that the caller has not registered yet, by call: they must not be freed meanwhile.
        self.pins: dict[CallId, deque[list[Any]]] = {}
        # Small results of the last calls: the caller may have passed on their refs before it had the answer.
        self._last: dict[CallId, Any] = {}
        self._before: dict[CallId, Any] = {}

    def forget(self) -> None:
        self.calls, self.pins, self._last, self._before = {}, {}, {}, {}

    def answer(self, call: InboundCall, result: Any) -> None:
        if call.dropped:
            self._answer_dropped(call)
            return
        if call.pulled:
            # First, because calls wait for it there.
            call.tell_pullers(Plain(result))
        if call.handle(ANSWER):
            self.calls.pop(call.number, None)
            self._connection.send((m.REPLY, call.number, result))
            # `_remember`, inlined: every call runs this.
            self._last[call.number] = result
            if len(self._last) > _REMEMBERED:
                self._before, self._last = self._last, {}

    def answer_stored(self, call: InboundCall, stored: StoredValue | Small) -> None:
        if call.dropped:
            if isinstance(stored, StoredValue):
                stored.release()
            self._answer_dropped(call)
            return
        self.calls.pop(call.number, None)
        if isinstance(stored, tuple):
            payload, defined = stored
            if call.pulled:
                received = ReceivedValue(payload, None, [], [])
                call.tell_pullers(StoredValue.again(received) if defined else received)
            if call.handle(ANSWER):
                if defined:
                    self._connection.tell(defined)
                self._connection.send(m.result(call.number, (payload, None, ())))
                if len(payload) <= _SMALL and not defined:
                    self._remember(call, ReceivedValue(payload, None, [], []))
            return
        if not call.handle(ANSWER) or self._connection.lost is not None:
            stored.release()
            call.tell_pullers(call.caller)
            return
        stays = not (stored.ready and stored.is_inline)
        if stays:
            self._store.entries[call.caller, call.number] = stored
        # First, because calls wait for it there.
        call.tell_pullers(stored)
        if stays:
            self._connection.send(m.stored(call.number, stored.size, stored.kind))
        else:
            refs = self._pinned(call, stored)
            self._connection.send(m.result(call.number, (stored.payload, stored.inline, refs)))
            if stored.is_free and stored.size <= _SMALL:
                self._remember(call, stored)

    def _answer_dropped(self, call: InboundCall) -> None:
        """The caller only waits for the end of the call; and no other process may get the result."""
        if call.handle(ANSWER):
            self.calls.pop(call.number, None)
            self._connection.tell_over(call.number)
        if call.pulled:
            call.tell_pullers(call.caller)

    def fail(self, call: InboundCall, error: BaseException, *, executed: bool | None) -> None:
        if call.handle(ANSWER):
            self.calls.pop(call.number, None)
            if call.dropped and executed is None and isinstance(error, CallCancelled):
                # The caller has cancelled it, as have others: to encode where it was takes longer than most calls.
                self._connection.send(m.cancelled(call.number))
            else:
                self._connection.send(m.error(call.number, encode_error(error), executed))
        call.tell_pullers(error)

    def turn_away(self, call: InboundCall) -> None:
        if call.handle(ANSWER):
            self.calls.pop(call.number, None)
            self._connection.send(m.away(call.number))
        call.tell_pullers(call.caller)

    def _remember(self, call: InboundCall, result: Any) -> None:
        self._last[call.number] = result
        if len(self._last) > _REMEMBERED:
            self._before, self._last = self._last, {}

    def recall(self, number: CallId) -> Place | None:
        found = self._last.get(number, _NONE)
        if found is _NONE:
            found = self._before.get(number, _NONE)
        if found is _NONE:
            return None
        return found if isinstance(found, StoredValue | ReceivedValue) else Plain(found)

    async def item(self, call: InboundCall, value: Any) -> None:
        if isinstance(value, StoredValue):
            stored = value
        else:
            stored = self._store.capture(value, call.label, "item", call.spec.transport)
        try:
            await self._store.make_ready(stored)
            if not call.answered and self._connection.lost is None:
                blobs = stored.blobs_for(self._connection)
                self._connection.send(m.item(call.number, (stored.payload, blobs, self._pinned(call, stored))))
        finally:
            stored.release()

    def adopted(self, number: CallId) -> None:
        """The caller has registered the refs inside a result or item."""
        pinned = self.pins.get(number)
        if pinned:
            pinned.popleft()
            if not pinned:
                del self.pins[number]

    def _pinned(self, call: InboundCall, stored: StoredValue) -> tuple[Any, ...]:
        if not stored.refs:
            return ()
        self.pins.setdefault(call.number, deque()).append(stored.refs)
        return tuple(self._refs.describe(ref) for ref in stored.refs)


class LocalCaller(Protocol):
    def on_plain(self, value: Any) -> None: ...

    def on_error(self, error: BaseException) -> None: ...

    def on_away(self, remote: PeerId) -> None: ...


class LocalResponder:
    is_local = True

    def __init__(self) -> None:
        self.states: dict[CallId, LocalCaller] = {}
        self.calls: dict[CallId, InboundCall] = {}

    def answer(self, call: InboundCall, result: Any) -> None:
        state = self._finish(call)
        if state is not None:
            state.on_plain(unwrap(result)[0])

    def answer_stored(self, call: InboundCall, stored: StoredValue | Small) -> None:
        raise AssertionError("results for callers in this process are not encoded")

    def fail(self, call: InboundCall, error: BaseException, *, executed: bool | None) -> None:
        state = self._finish(call)
        if state is not None:
            # An error of the method stays as it is; any other one says whether the call ran.
            state.on_error(error if executed else passed_on(error, executed=executed))

    def turn_away(self, call: InboundCall) -> None:
        state = self._finish(call)
        if state is not None:
            state.on_away(call.caller)

    async def item(self, call: InboundCall, value: Any) -> None:
        state = self.states.get(call.number)
        if isinstance(state, StreamState):
            state.on_item((unwrap(value)[0],))

    def cancel(self, number: CallId) -> bool:
        """The caller cancels a call; False if there is none: it is over, or has not been handed over."""
        call = self.calls.get(number)
        if call is not None:
            call.hosted.cancel(call)
        return call is not None

    def _finish(self, call: InboundCall) -> LocalCaller | None:
        call.handle(ANSWER)
        self.calls.pop(call.number, None)
        return self.states.pop(call.number, None)


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
