"""Calls that arrive in this process: find the actor, admit and deliver."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, Protocol, cast

from aiodaft._protocol.calls.mailbox import ANSWER, FETCHED, FETCHING, WITHDRAW
from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.messages import CALL, WANT_NOTHING, WANT_REPLY, WANT_STREAM, Awaited, Message
from aiodaft._protocol.ids import FIRST_USER_ACTOR, ActorId, CallId, PeerId, number_of
from aiodaft._protocol.objects.value import CREDIT_WINDOW
from aiodaft._runtime.actors.host import Host
from aiodaft._runtime.actors.hosted_actor import HostedActor, InboundCall
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.route import Route
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.objects.ref_table import PutState, RefTable, StreamState
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.objects.transfer import Delivery, Place, Transfer
from aiodaft._runtime.platform.tasks import received_terms, run_through
from aiodaft._runtime.serialization.containers import contains_ref, resolved
from aiodaft._runtime.serialization.decoder import Plain, ReceivedValue, is_heavy
from aiodaft._runtime.serialization.encoder import all_plain
from aiodaft._runtime.serialization.errors import encode_error, needed_by, passed_on
from aiodaft._runtime.serialization.small import SMALL, Small
from aiodaft.exceptions import ActorDied, CallCancelled, RemoteProtocolError, StaleHandle
from aiodaft.reading import unwrap
from aiodaft.ref import Ref


class Arguments:
    def __init__(self, host: Host, transfer: Transfer) -> None:
        self._process = host.process
        self._store = host.store
        self._transfer = transfer

    def expect(self, call: InboundCall, awaited: tuple[Awaited, ...], recall: Callable[[CallId], Place | None]) -> None:
        """Put the values of refs in their places when they come; the call is delivered after this.

        `recall` finds the results of calls that this process has just answered.
        """
        call.args = list(call.args)
        call.awaited = {one[0]: one for one in awaited}
        for one in awaited:
            _, owner, number, producer, _ = one
            take = partial(self._came, call, one)
            if producer != self._process.id:
                self._transfer.expect(producer, (owner, number), take)
            elif (place := recall(number)) is not None:
                take(place)
            else:
                self._transfer.locate((owner, number), take)
        if call.awaited:
            call.stage = FETCHING

    def refuse(self, awaited: tuple[Awaited, ...]) -> None:
        for _, owner, number, producer, _ in awaited:
            if producer != self._process.id:
                self._transfer.expect(producer, (owner, number), _drop)

    def _came(self, call: InboundCall, one: Awaited, place: Place | Delivery) -> None:
        if type(place) is Plain:
            self._put(call, one, place.value)
            return
        received: ReceivedValue | None = None
        value: Any = None
        try:
            received = self._receive_now(call, place)
            if received is not None:
                value = self._open(call, one, received)
        except Exception as error:  # noqa: BLE001 - the call fails with it, after it was delivered
            # The frames lead to this one: a circle would keep the received values.
            received, place = None, BaseException.with_traceback(error, None)
        if received is not None:
            self._put(call, one, value)
            return
        bringing = self._bring(call, one, place)
        task = self._process.tasks.create_task(bringing, name=f"bring an argument of {call.label}")
        call.fetching = (*call.fetching, task)

    async def _bring(self, call: InboundCall, one: Awaited, place: Place | Delivery) -> None:
        if isinstance(place, BaseException):
            self._fail(call, needed_by(place, _name(call), one[-1]))
            return
        try:
            received = await self._receive(call, one, place)
            if not is_heavy(received.payload):
                value = self._open(call, one, received)
            else:
                is_left = self._leave(call, one, received)
                value = None if is_left else await self._store.decode(received, refs=received.refs)
        except Exception as error:  # noqa: BLE001 - the call fails with it
            self._fail(call, needed_by(error, _name(call), one[-1]))
        else:
            self._put(call, one, value)

    def _open(self, call: InboundCall, one: Awaited, received: ReceivedValue) -> Any:
        """The argument that a value becomes; nothing for one that is left to the start of the call."""
        if call.spec.passes_on and received.is_moved_tensor:
            return received
        return None if self._leave(call, one, received) else self._store.decode_now(received, refs=received.refs)

    @staticmethod
    def _leave(call: InboundCall, one: Awaited, received: ReceivedValue) -> bool:
        """Leave a value on an accelerator to the start of the call; returns whether it is left.

        Then that thread and its current streams begin to use it, which need not be those of now.
        """
        if not received.on_device or (is_heavy(received.payload) and not call.rules.on_thread):
            return False
        left = call.received or {}
        assert isinstance(left, dict)
        call.received = {**left, one[0]: received}
        return True

    def _receive_now(self, call: InboundCall, place: Place | Delivery) -> ReceivedValue | None:
        """The value, if it is here and quickly decoded; else None."""
        if isinstance(place, Delivery):
            place.in_place = call.spec.read_only
            return place.received() if place.fetch_now() else None
        if isinstance(place, StoredValue):
            return self._transfer.take_own_now(place)
        return place if isinstance(place, ReceivedValue) and not is_heavy(place.payload) else None

    async def _receive(self, call: InboundCall, one: Awaited, place: Place | Delivery) -> ReceivedValue:
        in_place = call.spec.read_only
        if isinstance(place, ReceivedValue):
            return place
        if isinstance(place, Delivery):
            return await self._transfer.receive(place)
        if isinstance(place, StoredValue):
            return await self._transfer.take_own(place, in_place=in_place)
        assert not isinstance(place, Plain | BaseException)
        _, owner, number, _, _ = one
        return await self._transfer.pull(owner, number, place, in_place=in_place)

    def _put(self, call: InboundCall, one: Awaited, value: Any) -> None:
        cast("list[Any]", call.args)[one[0]] = value
        del call.awaited[one[0]]
        if not call.awaited:
            self._ready(call)

    def fetch(self, call: InboundCall, args: Delivery, slots: tuple[Any, ...]) -> None:
        args.in_place = call.spec.read_only
        fetching = self._fetch(call, args, slots)
        if not slots and args.fetch_now():
            run_through(fetching)
        else:
            task = self._process.tasks.create_task(fetching, name=f"fetch the arguments of {call.label}")
            call.fetching = (task,)

    def resolve(self, call: InboundCall) -> None:
        task = self._process.tasks.create_task(self._resolve(call), name=f"resolve the arguments of {call.label}")
        call.fetching = (task,)

    async def _fetch(self, call: InboundCall, args: Delivery, slots: tuple[Any, ...]) -> None:
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
                raise
            self._fail(call, error)
            # The frames lead to the values that came: a circle would keep them.
            BaseException.with_traceback(error, None)
        else:
            self._ready(call)

    async def _decode_heavy(self, call: InboundCall) -> None:
        """Decode an argument that takes long in the helper thread; light arguments are decoded when the call starts."""
        received, slots = call.received, call.slots
        assert isinstance(received, ReceivedValue)
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
            return await self._transfer.pull(owner, number, producer, in_place=call.spec.read_only)
        except Exception as error:  # noqa: BLE001 - the call fails with it
            failed = needed_by(error, _name(call), label)
        try:
            raise failed
        finally:
            # Its frames lead here.
            del failed

    async def _resolve(self, call: InboundCall) -> None:
        try:
            call.args, call.kwargs = await resolved((call.args, call.kwargs), self._take_of(call.hosted))
        except Exception as error:  # noqa: BLE001 - the call fails with it
            self._fail(call, needed_by(error, _name(call)))
        else:
            self._ready(call)

    def _take_of(self, hosted: HostedActor) -> Callable[[Ref[Any]], Awaitable[Any]]:
        # The runtime's own actors make values for other processes.
        return self._as_put if hosted.id < FIRST_USER_ACTOR else lambda ref: ref

    async def _as_put(self, ref: Ref[Any]) -> Any:
        """The value; one that was put here, as it was then, not the object of the program."""
        state = state_of(ref)
        value = await ref
        if not isinstance(state, PutState) or state.stored is None:
            return value
        received = await self._transfer.take_own(state.stored)
        return await self._store.decode(received, refs=received.refs)

    @staticmethod
    def _ready(call: InboundCall) -> None:
        call.fetching = ()
        if call.handle(FETCHED):
            call.hosted.ready(call)

    @staticmethod
    def _fail(call: InboundCall, error: BaseException) -> None:
        call.fetching = ()
        if call.handle(WITHDRAW):
            call.responder.fail(call, passed_on(error, executed=False), executed=False)
            call.hosted.look_again()


def _name(call: InboundCall) -> str:
    # Users know nothing of the methods of the runtime's own actors.
    return call.hosted.name if call.hosted.id < FIRST_USER_ACTOR else f"{call.label} of {call.hosted.name}"


def _drop(_: object) -> None: ...


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
