"""Answer calls: over a connection, or to a caller in this process."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, Protocol

from aiodaft._protocol.calls.call import ANSWER
from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._runtime.actors.hosted_actor import InboundCall
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.objects.ref_table import RefTable
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.objects.streams import StreamState
from aiodaft._runtime.objects.transfer import Place
from aiodaft._runtime.serialization.decoder import Plain, ReceivedValue
from aiodaft._runtime.serialization.errors import encode_error, passed_on
from aiodaft._runtime.serialization.small import Small
from aiodaft.exceptions import CallCancelled
from aiodaft.ref import unwrap

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
        # Its calls that are not answered.
        self.calls: dict[CallId, InboundCall] = {}
        # Refs inside results that the caller has not registered yet, by call: they must not be freed meanwhile.
        self.pins: dict[CallId, deque[list[Any]]] = {}
        # Small results of the last calls: the caller may have passed on their refs before it had the answer.
        self._last: dict[CallId, Any] = {}
        self._before: dict[CallId, Any] = {}

    def forget(self) -> None:
        """The caller is gone. A task that began in the context of one of its calls may keep this object for long."""
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
            # The caller has its answer, or is gone: processes that pull the result hear from it, or of its end.
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
        # They hear of it from the caller.
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
            # The grant keeps the block until the consumer is done with it.
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
    """Answers the calls of this process: results are the objects themselves."""

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
