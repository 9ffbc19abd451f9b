"""Calls that this process makes."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Final, Protocol
from weakref import ref

from aiodaft._protocol.calls.outgoing import IN_MESSAGE, PULLED, Entry, Order, choose
from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.messages import CALL, TELL, WANT_NOTHING, WANT_REPLY, Awaited, Message
from aiodaft._protocol.ids import FIRST_USER_ACTOR, CallId, serial_of
from aiodaft._protocol.objects.value import HERE
from aiodaft._runtime.actors.hosted_actor import InboundCall, current_call
from aiodaft._runtime.actors.inbound import Inbound
from aiodaft._runtime.calls.call import Caller, CallState, Request, Target, TellState
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.objects.ref_state import state_of
from aiodaft._runtime.objects.ref_table import RefTable
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.platform.tasks import current_terms, deadline_of, sent_terms, under
from aiodaft._runtime.serialization.decoder import ReceivedValue
from aiodaft._runtime.serialization.encoder import Names, all_plain, are_plain_with_tuples, are_short, is_plain
from aiodaft._runtime.serialization.errors import needed_by, passed_on, unsent
from aiodaft._runtime.serialization.small import encode_small
from aiodaft.exceptions import BorrowError, DaftError, DeadlineExceeded, Overloaded, ResourceExhausted, RuntimeClosed
from aiodaft.methods import MethodSpec
from aiodaft.ref import Ref


class Backlog:
    def __init__(self, caller: Caller, towards: str) -> None:
        self._caller = caller
        self._loop = caller.process.loop
        self._waiting: dict[CallId, tuple[Request, asyncio.TimerHandle | None]] = {}
        # Never connected: it bounds the calls, as the window of a connection does.
        self._connection = caller.connections.make(caller.process.id, towards)

    def admit(self, request: Request) -> bool:
        """Let a call wait, with its arguments as they are now; False if it failed, because an argument has. Raises as
        `submit`.
        """
        number, state, deadline = request.number, request.state, deadline_of(request.terms)
        self._connection.session.submit(number, state, None, admitted=request.had_turn)
        waits = False
        try:
            waits = self._caller.sender.prepare(request)
        finally:
            if not waits:
                self._connection.withdraw(number)
        if waits:
            if not isinstance(state, TellState):
                state.connection = self._connection
            timer = None if deadline is None else self._loop.call_at(deadline, self._expire, request)
            self._waiting[number] = (request, timer)
        return waits

    def take(self, request: Request) -> bool:
        """Take a call out; False if it was cancelled meanwhile, or its deadline passed."""
        self.forget(request.number)
        return self._connection.withdraw(request.number)

    def __len__(self) -> int:
        return len(self._waiting)

    def take_first(self) -> Request | None:
        request, _ = next(iter(self._waiting.values()))
        return request if self.take(request) else None

    def take_all(self) -> Iterator[Request]:
        waiting = (request for request, _ in self._waiting.values())
        return filter(self.take, sorted(waiting, key=lambda request: serial_of(request.number)))

    def forget(self, number: CallId) -> None:
        _, timer = self._waiting.pop(number, (None, None))
        if timer is not None:
            timer.cancel()

    def fail(self, error: BaseException) -> None:
        for request in self.take_all():
            request.state.on_error(unsent(error))

    def _expire(self, request: Request) -> None:
        if self.take(request):
            late = DeadlineExceeded(f"the deadline of {request.spec.label} passed before it was sent", executed=False)
            request.state.on_error(late)


def submit_with_refs(
    refs: RefTable, connection: Connection, state: CallState, args: tuple[Any, ...], *, admitted: bool = False
) -> bool:
    """Send a call if each argument is plain, or a ref with a value that need not be pulled; else return False.

    `admitted`: See `Session.submit`.
    """
    number, actor, name, consumer = state.number, state.target.actor, state.spec.name, connection.remote
    own = actor < FIRST_USER_ACTOR
    # With inputs, it was sent before.
    if not connection.has_room(own=own) or state.inputs is not None or not are_short(args):
        return False
    process = refs.process
    plain_args: list[Any] = list(args)
    awaited: list[Awaited] = []
    used: list[CallState] = []
    for index, arg in enumerate(args):
        if not isinstance(arg, Ref):
            if is_plain(arg):
                continue
            return False
        known = state_of(arg)
        if known.process is not process:
            return False
        called = known if isinstance(known, CallState) else None
        producer = None if called is None else called.giver
        relayed = called is not None and called.is_relayed_to(consumer)
        way = choose(known.status is HERE and is_plain(known.value), producer, consumer, relayed=relayed)
        if way is PULLED:
            return False
        if way is IN_MESSAGE:
            plain_args[index] = known.value
            continue
        assert called is not None
        assert producer is not None
        plain_args[index] = None
        awaited.append((index, process.id, called.number, producer, called.origin))
        used.append(called)
    if not used:
        connection.submit(number, state, (CALL, number, actor, name, tuple(plain_args)), 0, admitted, own)
        return True
    for one in used:
        refs.use(one.number, one)
    state.inputs = [*used]
    # It waits for its arguments anyway: it goes together with the next messages.
    connection.flush_soon()
    connection.follow()
    message = m.apply(number, actor, name, tuple(plain_args), tuple(awaited))
    connection.submit(number, state, message, 0, admitted, own)
    for one in used:
        if one.producer != consumer:
            one.forward_to(consumer)
    return True


_SHORT: Final = {WANT_REPLY: CALL, WANT_NOTHING: TELL}


class Submitted(Entry, Protocol):
    def go(self) -> None: ...


class Outgoing:
    """Sends calls, and says when runs of graphs may be sent, so that both keep one order."""

    def __init__(self, caller: Caller, inbound: Inbound) -> None:
        self._caller = caller
        self._process = caller.process
        self._connections = caller.connections
        self._store = caller.objects.store
        self._refs = caller.objects.refs
        self._inbound = inbound
        caller.sender = caller.outgoing = caller.direct = self
        # Runs that cannot be sent yet, and what was submitted after them to the same actors.
        self.order: Order[Submitted] = Order()
        self._backlog = Backlog(caller, "actors of graphs with runs that wait")
        self._tells: dict[str, TellState] = {}

    def submit(self, request: Request) -> None:
        """Send a call; its answer goes to `request.state`. Never blocks, and raises only errors of the call itself.

        Raises:
            SerializationError: An argument cannot travel.
            RuntimeClosed: The runtime is closed.
            Overloaded: Too many calls are waiting.
        """
        process = self._process
        if process.closed is not None:
            raise RuntimeClosed(f"{request.spec.label} cannot be called: {process.closed}")
        running = asyncio._get_running_loop()
        if running is not process.loop:
            self._submit_elsewhere(running, request)
            return
        target, state, args = request.target, request.state, request.args
        request.terms = terms = current_terms.get()
        # A call that has to wait is submitted again by another task.
        if isinstance(state, CallState) and state.maker is None and (maker := self._caller.current_maker()) is not None:
            state.maker = ref(maker)
        try:
            if self.order.lanes and self._must_wait(request):
                if self._backlog.admit(request):
                    self.order.enter(request)
                return
            if target.remote == process.id:
                self._submit_local(request)
                return
            connection = self._connections.to(target.remote)
            if connection.lost is not None:
                target.missed(request, connection)
                return
            if not isinstance(state, TellState):
                state.connection = connection
            short = terms is None and not request.attempt and request.mode in _SHORT
            if short and not request.kwargs and all_plain(args):
                message = (_SHORT[request.mode], request.number, target.actor, request.spec.name, args)
                own = target.actor < FIRST_USER_ACTOR
                connection.submit(request.number, state, message, 0, request.had_turn, own, request.spec.rules.ordered)
            else:
                self._submit_encoded(connection, request, short)
        except Overloaded as error:
            raise _refused(request.spec, target, error) from None

    def submit_at_once(
        self,
        target: Target,
        spec: MethodSpec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        number: CallId,
        state: CallState | None,
    ) -> bool:
        """`submit` for a call, or without a state a tell, of which only the arguments matter; False if others do.

        With small arguments, and with refs whose values need not be pulled, it needs no `Request`.
        """
        process = self._process
        if (
            asyncio._get_running_loop() is not process.loop
            or process.closed is not None
            or self.order.lanes
            or target.remote == process.id
            or target.actor < FIRST_USER_ACTOR
            or current_terms.get() is not None
        ):
            return False
        connection = self._connections.to(target.remote)
        if connection.lost is not None:
            return False
        if state is not None:
            state.connection = connection
            if (maker := self._caller.current_maker()) is not None:
                state.maker = ref(maker)
        fields: tuple[Any, ...] | bytes | None = args
        try:
            if kwargs or not all_plain(args):
                kinds = () if kwargs else tuple(map(type, args))
                if state is not None and Ref in kinds:
                    if submit_with_refs(self._refs, connection, state, args):
                        return True
                    fields = None
                elif tuple not in kinds or not are_plain_with_tuples(args):
                    fields = _encode_small(connection, args, kwargs)
            if fields is None:
                mode, waits = (WANT_NOTHING, TellState(spec.label)) if state is None else (WANT_REPLY, state)
                self._submit_stored(connection, Request(target, spec, args, kwargs, number, mode, waits))
                return True
            cost = len(fields) if fields.__class__ is bytes else 0
            kind, waits = (TELL, self._told(spec.label)) if state is None else (CALL, state)
            message = (kind, number, target.actor, spec.name, fields)
            connection.submit(number, waits, message, cost, False, False, spec.rules.ordered)
        except Overloaded as error:
            raise _refused(spec, target, error) from None
        return True

    def submit_later(self, request: Request) -> None:
        """Send a call that had to wait under the terms that it had."""
        request.had_turn = True
        try:
            with under(request.terms):
                self.submit(request)
        except Exception as error:  # noqa: BLE001 - the caller is not here any more; its ref is where errors go
            request.state.on_error(error)

    def _must_wait(self, request: Request) -> bool:
        return request.spec.rules.ordered and not request.had_turn and request.target.lane in self.order.lanes

    def turn_came(self, request: Request) -> None:
        if self._backlog.take(request):
            self.submit_later(request)

    def look_again(self, lanes: Iterable[Hashable]) -> None:
        """Something has changed in these lanes: send the calls that may go now."""
        for entry in self.order.ready(lanes):
            entry.go()

    def close(self, reason: str) -> None:
        self._backlog.fail(RuntimeClosed(reason))

    def prepare(self, request: Request) -> bool:
        """Encode the arguments of a call that has to wait, so that it is made with their present values.

        False if the call failed, because an argument has. Raises as `submit`.
        """
        if request.stored is not None or (not request.kwargs and all_plain(request.args)):
            return True
        stored = self._store.keep(*_value_of(request), resolve=True)
        if not self._use_inputs(stored, request):
            return False
        request.stored = stored
        try:
            self._store.pack_now(stored)
        except (BorrowError, ResourceExhausted) as error:
            _fail_unpacked(request, stored, error)
            return False
        return True

    def _told(self, label: str) -> TellState:
        told = self._tells.get(label)
        if told is None:
            told = self._tells[label] = TellState(label)
        return told

    def _submit_encoded(self, connection: Connection, request: Request, short: bool) -> None:
        """`short`: CALL or TELL has fields for everything about the call, besides its arguments."""
        args, number, state, admitted = request.args, request.number, request.state, request.had_turn
        if (
            short
            and request.stored is None
            and isinstance(state, CallState)
            and not request.kwargs
            and Ref in map(type, args)
            and submit_with_refs(self._refs, connection, state, args, admitted=admitted)
        ):
            return
        if request.stored is None and not request.again:
            payload = _encode_small(connection, args, request.kwargs)
            if payload is not None:
                message: Message
                if short:
                    message = (_SHORT[request.mode], number, request.target.actor, request.spec.name, payload)
                else:
                    message = self._send(request, (payload, None, (), ()))
                own = request.target.actor < FIRST_USER_ACTOR
                connection.submit(number, state, message, len(payload), admitted, own, request.spec.rules.ordered)
                return
        self._submit_stored(connection, request)

    def _submit_stored(self, connection: Connection, request: Request) -> None:
        number, state, stored, store = request.number, request.state, request.stored, self._store
        admitted, own = request.had_turn, request.target.actor < FIRST_USER_ACTOR
        if stored is None:
            stored = store.keep(*_value_of(request), resolve=True, small=request.again)
            if not self._use_inputs(stored, request):
                return
            request.stored = stored
        try:
            ready = store.pack_now(stored) and stored.ready
            full = self._message(connection, request, stored) if ready else None
        except (BorrowError, ResourceExhausted) as error:
            _fail_unpacked(request, stored, error)
            return
        if full is not None:
            connection.submit(number, state, full, stored.size, admitted, own)
        else:
            connection.submit(number, state, None, 0, admitted, own)
            self._process.tasks.create_task(self._pack_then_send(connection, request, stored), name="copy arguments")

    async def _pack_then_send(self, connection: Connection, request: Request, stored: StoredValue) -> None:
        try:
            await self._store.make_ready(stored)
        except Exception as error:  # noqa: BLE001 - the call fails with it
            self._fail_unsent(connection, request, error)
            return
        if connection.lost is not None or not connection.session.is_waiting(request.number):
            _let_go(request, stored)
            return
        try:
            message = self._message(connection, request, stored)
        except Exception as error:  # noqa: BLE001 - a lent buffer was written to, or there is no descriptor left
            _let_go(request, stored)
            self._fail_unsent(connection, request, error)
        else:
            connection.provide(request.number, message, stored.size)

    def _fail_unsent(self, connection: Connection, request: Request, error: Exception) -> None:
        # If it is not there any more, it was cancelled.
        if connection.withdraw(request.number):
            request.state.on_error(error.with_executed(False) if isinstance(error, ResourceExhausted) else error)

    def _message(self, connection: Connection, request: Request, stored: StoredValue) -> Message:
        refs = self._refs
        blobs = stored.blobs_for(connection)
        # The grant keeps the block until the callee is done with it.
        _let_go(request, stored)
        inner = tuple(refs.describe(ref) for ref in stored.refs)
        slots = refs.describe_values(stored.encoded.slots)
        return self._send(request, (stored.payload, blobs, inner, slots))

    def _send(self, request: Request, args: tuple[Any, ...]) -> Message:
        terms = None if request.terms is None else sent_terms(request.terms, self._process.loop.time)
        number, actor, name = request.number, request.target.actor, request.spec.name
        return m.send(number, actor, name, request.mode, terms, args, request.attempt)

    def _use_inputs(self, stored: StoredValue, request: Request) -> bool:
        """Hold the refs among the arguments while the call is under way; False if one has failed already."""
        refs = [*stored.encoded.slots, *stored.refs]
        if not refs or request.state.inputs is not None:
            return True
        inputs = [state_of(ref) for ref in refs]
        for used in inputs:
            if used.error is not None:
                used.mark_seen()
                error = needed_by(used.error, f"{request.spec.label} of {request.target.label}", used.origin)
                request.state.on_error(passed_on(error, executed=False))
                return False
        for used in inputs:
            used.add_use()
        request.state.inputs = inputs
        return True

    def _submit_local(self, request: Request) -> None:
        target = request.target
        hosted = self._caller.actors.get(target.actor)
        if hosted is None:
            target.missed(request, None)
            return
        # The class of the handle may be a base of the actor's.
        spec = hosted.find_spec(request.spec.name)
        if spec is None:
            request.state.on_error(hosted.lacks(request.spec.name))
            return
        if not isinstance(request.state, TellState):
            request.state.connection = None
        caller = self._inbound.local
        call = InboundCall(caller, self._process.id, request.number, hosted, spec, request.mode, request.args)
        if request.terms is not None:
            call.terms, call.deadline = request.terms, request.terms.deadline
        call.attempt = request.attempt
        call.kwargs = request.kwargs
        caller.states[request.number] = request.state
        caller.calls[request.number] = call
        self._inbound.deliver_local(hosted, call)

    def _submit_elsewhere(self, running: asyncio.AbstractEventLoop | None, request: Request) -> None:
        if running is not None:
            label = request.spec.label
            raise RuntimeError(f"{label} was called on another event loop than the one its runtime was started on")
        # A `def` method calls another actor: the loop does the sending, of the arguments as they are now.
        if not all_plain(request.args) or request.kwargs:
            small = encode_small(request.args, request.kwargs, by_name=False)
            if small is not None:
                request.stored = StoredValue.again(ReceivedValue(small[0], None, [], []))
            elif request.target.remote != self._process.id or request.target.actor not in self._caller.actors:
                # Here: the loop may wait for a lock that this thread holds.
                request.stored = self._store.keep(*_value_of(request), resolve=True, small=False)
                self._store.pack_now(request.stored)
        context = current_call.get()

        def submit() -> None:
            if isinstance(request.state, CallState) and request.state.settled:
                return
            token = current_call.set(context)
            try:
                if request.stored is not None and not self._use_inputs(request.stored, request):
                    return
                self.submit(request)
            except Exception as error:  # noqa: BLE001 - the caller is in another thread; its ref is where errors go
                request.state.on_error(error)
            finally:
                current_call.reset(token)

        self._process.call_soon(submit)


def _encode_small(connection: Connection, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes | None:
    small = encode_small(args, kwargs, by_name=True)
    if small is None:
        return None
    payload, defined = small
    if defined:
        connection.tell(defined)
    return payload


def _value_of(request: Request) -> tuple[Any, Names]:
    spec, target = request.spec, request.target
    parts = [(spec.argument(index), arg) for index, arg in enumerate(request.args)]
    # Users know nothing of the runtime's own actors.
    to = target.label if target.actor >= FIRST_USER_ACTOR else ""
    return [list(request.args), request.kwargs], Names(spec.label, (*parts, *request.kwargs.items()), to)


def _refused(spec: MethodSpec, target: Target, error: Overloaded) -> Overloaded:
    return Overloaded(f"{spec.label} of {target.label} is refused: {error}")


def _fail_unpacked(request: Request, stored: StoredValue, error: DaftError) -> None:
    _let_go(request, stored)
    request.state.on_error(error.with_executed(False))


def _let_go(request: Request, stored: StoredValue) -> None:
    if not request.again:
        stored.release()
        request.stored = None
