"""The answers to calls that this process made."""

from __future__ import annotations

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.messages import Message, Value
from aiodaft._protocol.ids import CallId
from aiodaft._runtime.calls.call import CallState, PendingCall, loss_for
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.objects.streams import StreamState
from aiodaft._runtime.objects.transfer import Delivery, Objects
from aiodaft._runtime.serialization.decoder import ReceivedValue
from aiodaft._runtime.serialization.errors import decode_failure
from aiodaft.exceptions import CallCancelled, DaftError, RemoteProtocolError


class Replies:
    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._tasks = objects.process.tasks

    def replied(self, connection: Connection, message: Message) -> None:
        _, number, value = message
        state: PendingCall | None = connection.session.settle(number)
        if state is None:
            raise _unasked(connection, number)
        state.on_plain(value)

    @staticmethod
    def over_came(connection: Connection, message: Message) -> None:
        for number in m.read_over(message):
            _settled(connection, number).on_plain(None)

    def result_came(self, connection: Connection, message: Message) -> None:
        number, value = m.read_result(message)
        state = _settled(connection, number)
        payload, blobs, refs = value
        if refs:
            self._tasks.create_task(self._adopt_result(connection, number, state, value), name="adopt refs")
        else:
            state.on_result(ReceivedValue(payload, blobs, [], [], connection.definitions.heard))

    @staticmethod
    def stored_came(connection: Connection, message: Message) -> None:
        number, size, kind = m.read_stored(message)
        state = _settled(connection, number)
        if isinstance(state, CallState):
            state.stored_bytes, state.stored_kind = size, kind
        state.on_stored()

    @staticmethod
    def error_came(connection: Connection, message: Message) -> None:
        number, encoded, executed = m.read_error(message)
        state = _settled(connection, number)
        if encoded:
            state.on_error(decode_failure(encoded, executed))
        elif executed is None:
            what = state.origin if isinstance(state, CallState) else state.label
            state.on_error(CallCancelled(f"{what} was cancelled"))
        else:
            state.on_away(connection.remote)

    def item_came(self, connection: Connection, message: Message) -> None:
        number, (payload, blobs, refs) = m.read_item(message)
        state = connection.session.calls.get(number)
        if not isinstance(state, StreamState):
            raise RemoteProtocolError(
                f"{connection.remote} sends an item of call {number}, which is no stream under way"
            )
        if refs or isinstance(blobs, tuple):
            # It keeps its place in the stream while it is fetched.
            item = Delivery(self._objects.store, connection, payload, blobs, refs)
            state.on_item(self._tasks.start_ahead(self._fetch_item(connection, number, item), name="fetch an item"))
        else:
            state.on_item(ReceivedValue(payload, blobs, [], []))

    async def _adopt_result(self, connection: Connection, number: CallId, state: PendingCall, value: Value) -> None:
        payload, blobs, refs = value
        adopted = await self._objects.refs.adopt(refs, connection)
        connection.send(m.adopted(number))
        state.on_result(ReceivedValue(payload, blobs, [], adopted))

    async def _fetch_item(self, connection: Connection, number: CallId, item: Delivery) -> ReceivedValue:
        try:
            return await self._objects.transfer.receive(item)
        finally:
            # Also if it cannot be had: then its refs are not needed.
            if item.refs:
                connection.send(m.adopted(number))

    def connection_lost(self, connection: Connection, error: DaftError) -> None:
        """Fail the calls over a connection: none of them will be answered any more."""
        for used in list(self._objects.borrowing.used.values()):
            if isinstance(used, CallState) and used.connection is connection:
                used.doubt_forwards()
        calls = list(connection.session.calls.items())
        # The last first: the room that the first leaves would send the next.
        unsent = {number for number, _ in reversed(calls) if connection.withdraw(number)}
        for number, state in calls:
            if number not in unsent:
                connection.session.settle(number)
            executed = False if number in unsent or not connection.connected else None
            try:
                state.on_lost(loss_for(state, error, executed))
            except Exception as problem:  # noqa: BLE001 - a logging filter of the user's, say: the other calls fail, too
                message = f"an error raised while {state.label} failed, because {connection.remote} was lost"
                self._objects.process.loop.call_exception_handler({"message": message, "exception": problem})


def _settled(connection: Connection, number: CallId) -> PendingCall:
    state: PendingCall | None = connection.session.settle(number)
    if state is None:
        raise _unasked(connection, number)
    return state


def _unasked(connection: Connection, number: CallId) -> RemoteProtocolError:
    return RemoteProtocolError(f"{connection.remote} answers call {number}, which is not under way")
