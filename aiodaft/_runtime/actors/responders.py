"""How a call is answered: over a connection, or to a caller in this very process."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.messages import ERROR, ITEM, REPLY, RESULT, STORED
from aiodaft._runtime.actors.hosted_actor import capture
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.objects.streams import StreamState
from aiodaft._runtime.serialization.encoder import Names
from aiodaft._runtime.serialization.errors import encode_error, passed_on
from aiodaft.ref import Borrowed

if TYPE_CHECKING:
    from aiodaft._runtime.actors.inbound_call import InboundCall
    from aiodaft._runtime.calls.call import PendingCall
    from aiodaft._runtime.connections.connection import Connection
    from aiodaft._runtime.peer import Peer


class RemoteResponder:
    """A caller at the other end of a connection."""

    def __init__(self, peer: Peer, connection: Connection) -> None:
        self._peer = peer
        self._connection = connection
        # Its calls that are not answered.
        self.calls: dict[CallId, InboundCall] = {}
        # Refs inside results that the caller has not registered yet, by call: they must not be freed meanwhile.
        self.pins: dict[CallId, deque[list[Any]]] = {}

    @property
    def id(self) -> PeerId:
        return self._connection.remote

    def answer(self, call: InboundCall, result: Any) -> None:
        if not call.over:
            self._finish(call)
            self._connection.send((REPLY, call.number, result))
        if call.pulled:
            call.tell_pullers(self._encode_plain(call, result))

    async def answer_encoded(self, call: InboundCall, result: Any) -> None:
        self.answer_kept(call, await self._capture(call, result))

    def answer_kept(self, call: InboundCall, kept: StoredValue) -> None:
        if call.over or self._connection.lost is not None:
            # Nobody waits any more: the result goes as it came.
            kept.release()
            self._finish(call)
            return
        self._finish(call)
        if kept.ready and kept.is_inline:
            refs = self._pinned(call, kept)
            self._connection.send((RESULT, call.number, kept.payload, kept.inline, refs))
        else:
            self._peer.store.entries[self.id, call.number] = kept
            self._connection.send((STORED, call.number, kept.encoded.size))
        call.tell_pullers(kept)

    def fail(self, call: InboundCall, error: BaseException, *, executed: bool | None) -> None:
        if not call.over:
            self._finish(call)
            self._connection.send((ERROR, call.number, encode_error(error), executed))
        call.tell_pullers(error)

    async def item(self, call: InboundCall, value: Any) -> None:
        kept = await self._capture(call, value)
        try:
            await self._peer.store.make_ready(kept)
            if not call.over and self._connection.lost is None:
                blobs = kept.blobs_for(self._connection)
                self._connection.send((ITEM, call.number, kept.payload, blobs, self._pinned(call, kept)))
        finally:
            # The grant keeps the block until the consumer is done with it.
            kept.release()

    def adopted(self, number: CallId) -> None:
        """The caller has registered the refs inside a result or item."""
        pinned = self.pins.get(number)
        if pinned:
            pinned.popleft()
            if not pinned:
                del self.pins[number]

    def _pinned(self, call: InboundCall, kept: StoredValue) -> tuple[Any, ...]:
        if not kept.refs:
            return ()
        self.pins.setdefault(call.number, deque()).append(kept.refs)
        return tuple(self._peer.refs.describe(ref) for ref in kept.refs)

    def _finish(self, call: InboundCall) -> None:
        call.over = True
        self.calls.pop(call.number, None)

    async def _capture(self, call: InboundCall, result: Any) -> StoredValue:
        what = "item" if call.wants_stream else "result"
        return await capture(call.hosted, result, call.label, what, call.spec.transport)

    def _encode_plain(self, call: InboundCall, value: Any) -> StoredValue:
        kept = self._peer.store.keep(value, Names(call.label))
        self._peer.store.pack_here(kept)
        return kept


class LocalResponder:
    """A caller in this process: results are the objects themselves."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.states: dict[CallId, PendingCall] = {}
        self.calls: dict[CallId, InboundCall] = {}

    @property
    def id(self) -> PeerId:
        return self._peer.process.id

    def answer(self, call: InboundCall, result: Any) -> None:
        state = self._finish(call)
        if state is not None:
            state.on_plain(result.value if isinstance(result, Borrowed) else result)

    async def answer_encoded(self, call: InboundCall, result: Any) -> None:
        self.answer(call, result)

    def answer_kept(self, call: InboundCall, kept: StoredValue) -> None:
        raise AssertionError("results for callers in this process are not encoded")

    def fail(self, call: InboundCall, error: BaseException, *, executed: bool | None) -> None:
        state = self._finish(call)
        if state is not None:
            # What the method itself raised is what it says: a name that is not found is no call that ran.
            state.on_error(error if executed else passed_on(error, executed=executed))

    async def item(self, call: InboundCall, value: Any) -> None:
        state = self.states.get(call.number)
        if isinstance(state, StreamState):
            state.on_local_item(value)

    def _finish(self, call: InboundCall) -> PendingCall | None:
        call.over = True
        self.calls.pop(call.number, None)
        return self.states.pop(call.number, None)
