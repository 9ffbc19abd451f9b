"""Brings the arguments of calls that do not come inside the message, while the actor works on earlier calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from aiodaft._protocol.calls.mailbox import FETCHED, FETCHING, WITHDRAW
from aiodaft._protocol.connections.messages import Awaited
from aiodaft._protocol.ids import FIRST_USER_ACTOR, CallId
from aiodaft._runtime.actors.host import Host
from aiodaft._runtime.actors.hosted_actor import InboundCall
from aiodaft._runtime.connections.route import Route
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.objects.transfer import Delivery, Place, Transfer
from aiodaft._runtime.platform.tasks import run_through
from aiodaft._runtime.serialization.containers import resolved
from aiodaft._runtime.serialization.decoder import Plain, ReceivedValue, is_heavy
from aiodaft._runtime.serialization.errors import needed_by, passed_on


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
            call.args, call.kwargs = await resolved((call.args, call.kwargs))
        except Exception as error:  # noqa: BLE001 - the call fails with it
            self._fail(call, needed_by(error, _name(call)))
        else:
            self._ready(call)

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
