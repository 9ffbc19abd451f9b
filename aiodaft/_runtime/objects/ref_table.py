"""Refs that several processes hold, which of them borrow this one's and which this one borrows; and streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias
from weakref import WeakSet

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.diagnostics import trace
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.objects.value import HERE, THERE, Borrowing, Consumption, Key, Phase
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.connections.route import Route
from aiodaft._runtime.objects.ref_state import RefHost, RefState, release_inputs, state_of
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.platform.tasks import current_task, shield_from_anyio
from aiodaft._runtime.serialization.decoder import ReceivedValue
from aiodaft._runtime.serialization.encoder import Names
from aiodaft.exceptions import ActorDied, DaftError, OwnerDied, RuntimeClosed
from aiodaft.ref import Ref

# Bytes of values that go along with one call: more would hold up later messages, and a frame is bounded.
_INLINE_VALUES: Final = 1 << 20


class PutState(RefState):
    handles = 1

    def __init__(self, objects: RefHost, value: Any, label: str) -> None:
        self.objects = objects
        self.process = objects.process
        self.number = objects.process.next_number()
        self.value = value
        self._label = label


class BorrowedState(RefState):
    own = False
    _asking = False

    def __init__(self, objects: RefHost, key: Key, producer: PeerId, label: str) -> None:
        self.objects = objects
        self.process = objects.process
        self._owner, self.number = key
        self._producer = producer
        self._label = label

    @property
    def producer(self) -> PeerId:
        return self._producer

    @property
    def owner(self) -> PeerId:
        return self._owner

    def watch(self, callback: Callable[[Any], object], *, interested: bool = False) -> None:
        super().watch(callback, interested=interested)
        if self.process.is_here and not (self.settled or self._asking):
            self._asking = True
            self.process.tasks.create_task(self._learn(), name=f"wait for {self.label}")

    async def _learn(self) -> None:
        """Settle when the owner says that the call is over; an error is pulled, the value stays where it is."""
        there = False
        with suppress(DaftError):
            there = await self.objects.owner.ended_remote(self._owner, self.number)
        if there:
            self._settle(THERE)
        elif not (self.settled or self._fetching):
            self._fetching = True
            await self._fetch()

    def free_if_unheld(self) -> None:
        super().free_if_unheld()
        if self.held:
            return
        registered = self.objects.borrowing.give_back(self._owner, self.number, self)
        if registered and self.process.closed is None:
            self.objects.owner.give_back(self._owner, self.number)

    def _cancel(self, why: str) -> bool:
        self.objects.owner.cancel_remote(self._owner, self.number)
        return True

    def _judge_error(self) -> None:
        """The owner reports the error, not the borrower."""


class RefTable:
    """The refs of this process that others may ask for, and those of others that it borrows."""

    def __init__(self, objects: RefHost, connections: Connections) -> None:
        self.objects = objects
        self.process = objects.process
        self._store = objects.store
        self._connections = connections
        self._borrowing: Borrowing[RefState] = objects.borrowing
        self._puts: WeakSet[PutState] = WeakSet()
        self.lend = self._borrowing.lend
        self.use = self._borrowing.use

    def find(self, number: CallId) -> RefState | None:
        return self._borrowing.find(self.process.id, number)

    def borrow_came(self, connection: Route, message: m.Message) -> None:
        self.lend(m.read_borrow(message), connection.remote)

    def take_back(self, number: CallId, peer: PeerId) -> None:
        self._returned(self._borrowing.take_back(number, peer))

    def peer_lost(self, remote: PeerId) -> None:
        self._returned(self._borrowing.peer_lost(remote))

    def _returned(self, states: Iterable[RefState]) -> None:
        for state in states:
            state.free_if_unheld()
            self._store.note_freed()

    @property
    def are_lent(self) -> bool:
        return self._borrowing.are_lent

    def put(self, value: Any, label: str, via: str | None = None) -> PutState:
        """Make a ref of a value, as it is now.

        Raises:
            SerializationError: Part of it cannot travel.
        """
        state = PutState(self.objects, value, label)
        stored = state.stored = self._store.keep(value, _names(state, "value"), via=via)
        if not stored.is_inline:
            self._puts.add(state)
        if self._store.pack_now(stored):
            state.on_ready()
        else:
            self.process.tasks.create_task(self._pack(state, stored), name="put")
        return state

    async def _pack(self, state: PutState, stored: StoredValue) -> None:
        try:
            await self._store.pack(stored)
        except Exception as error:  # noqa: BLE001 - the code that uses the ref gets it
            state.on_error(error)
        else:
            state.on_ready()

    def put_values(self) -> list[StoredValue]:
        return [state.stored for state in self._puts if state.stored is not None]

    def stored(self, state: RefState) -> StoredValue:
        if state.stored is None and state.received is not None:
            state.stored = StoredValue.again(state.received)
        elif state.stored is None:
            state.stored = self._store.keep(state.value, _names(state, "result"))
            self._store.pack_now(state.stored)
        return state.stored

    def describe(self, ref: Ref[Any]) -> tuple[Any, ...]:
        state = state_of(ref)
        self._borrowing.share(state.number, state)
        return (state.owner, state.number, state.producer, state.origin)

    def describe_values(self, refs: Sequence[Ref[Any]]) -> tuple[tuple[Any, ...], ...]:
        """The descriptors of awaited refs, with as many small values as a frame has room for."""
        room = _INLINE_VALUES
        found: list[tuple[Any, ...]] = []
        for ref in refs:
            described = self.describe_value(ref) if room > 0 else self.describe(ref)
            if isinstance(described[0], bytes):
                room -= len(described[0]) + len(described[1] or b"")
            found.append(described)
        return tuple(found)

    def describe_value(self, ref: Ref[Any]) -> tuple[Any, ...]:
        state = state_of(ref)
        if state.own and state.status is HERE and state.error is None:
            stored = state.stored if state.parts() is not None else self.stored(state)
            if stored is not None and stored.ready and stored.is_inline:
                return (stored.payload, stored.inline, tuple(self.describe(inner) for inner in stored.refs))
        return self.describe(ref)

    async def adopt(self, descriptors: tuple[Any, ...], connection: Route) -> list[Ref[Any]]:
        """Make the refs that came inside a value; each owner hears of them before the sender gets another message."""
        return [await self._adopt_one((owner, number), producer, label, connection)
                for owner, number, producer, label in descriptors]  # fmt: skip

    async def _adopt_one(self, key: Key, producer: PeerId, label: str, connection: Route) -> Ref[Any]:
        known = self._borrowing.find(*key)
        if known is not None:
            return Ref(known.hold())
        state = BorrowedState(self.objects, key, producer, label)
        # Holds the ref while the owner is asked.
        ref: Ref[Any] = Ref(state.hold())
        if state.owner == self.process.id:
            _gone(state, f"the result of {label} was freed")
            return ref
        self._borrowing.borrow(*key, state)
        if state.owner == connection.remote:
            # The owner must know before it handles the next message, which may end the holder of the ref there.
            self._connections.to(state.owner).send(m.borrow(state.number))
            return ref
        try:
            await self.objects.owner.borrow(*key)
        except DaftError as error:
            _gone(state, f"the owner of the result of {label}, {state.owner}, is gone: {error}")
        return ref


def _gone(state: RefState, why: str) -> None:
    state.mark_seen()
    state.on_error(OwnerDied(why))


def _names(state: RefState, role: str) -> Names:
    return Names(state.label, ((role, state.value),))


# The consumer's end of a stream: items arrive as far as there is credit, and are taken one by one.
#
# `_protocol.objects.value` has its states.

# An encoded item, a task that fetches one, or (in a tuple) an object of this process.
Item: TypeAlias = ReceivedValue | asyncio.Task[ReceivedValue] | tuple[Any]


class StreamState:
    def __init__(self, objects: RefHost, number: CallId, label: str) -> None:
        self.objects = objects
        self.process = objects.process
        self.number = number
        self.label = label
        self.connection: Connection | None = None
        self.inputs: list[RefState] | None = None
        self.consumption: Consumption[Item] = Consumption()
        self._changed: asyncio.Future[None] | None = None
        self._watchers: list[Callable[[BaseException | None], object]] = []

    def on_plain(self, value: Any = None) -> None:
        self._end(None)

    # Never sent: streams give items.
    on_result = on_stored = on_plain

    def on_item(self, item: Item) -> None:
        if self.consumption.add(item):
            self._wake()

    def on_error(self, error: BaseException) -> None:
        self._end(error)

    def on_lost(self, error: DaftError) -> None:
        self._end(error)

    def on_away(self, remote: PeerId) -> None:
        self._end(ActorDied("the actor is in another process now", executed=False))

    def _end(self, error: BaseException | None) -> None:
        if not self.consumption.end(error):
            return
        release_inputs(self, error)
        if error is not None and self.process.recorder is not None:
            self.process.recorder.add(trace.failed((self.process.id, self.number), trace.outcome_of(error)))
        for watcher in self._watchers:
            self.process.loop.call_soon(watcher, error)
        self._watchers.clear()
        self._wake()

    def watch(self, callback: Callable[[BaseException | None], object]) -> None:
        """Call back once the producer has ended, with its error; on the loop, never within this call."""
        if not self.process.is_here:
            self.process.call_soon(partial(self.watch, callback))
        elif self.consumption.is_over:
            self.process.loop.call_soon(callback, self.consumption.error)
        else:
            self._watchers.append(callback)

    def _wake(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)

    async def _wait_change(self) -> None:
        self.process.check_open(f"{self.label} cannot be awaited")
        if self._changed is None:
            self._changed = self.process.loop.create_future()
        # Several tasks may wait; cancelling one must not wake the others.
        await asyncio.shield(self._changed)

    async def next_item(self) -> Any:
        """The next item.

        Raises:
            StopAsyncIteration: There are no more.
            RuntimeError: The loop over the stream was left.
            BaseException: The error of the producer, after its last item.
        """
        stream = self.consumption
        if stream.left is not None:
            hint = "to take items one by one, use `await anext(stream)`"
            raise RuntimeError(f"{self.label}: the stream ended because {stream.left}; {hint}")
        stream.taking += 1
        try:
            while (item := stream.first()) is None:
                if stream.is_used_up:
                    raise stream.why_no_more()
                await self._wait_change()
            stream.opening = True
            try:
                value = await self._open(item)
            except Exception:
                # The item counts as taken: a consumer that goes on must not run out of credit.
                self._taken(item)
                raise
            else:
                self._taken(item)
                return value
            finally:
                stream.opening = False
                self._wake()
        finally:
            stream.taking -= 1

    async def _open(self, item: Item) -> Any:
        if isinstance(item, tuple):
            return item[0]
        if isinstance(item, ReceivedValue):
            received = item
        else:
            # Not awaited: the cancellation of that task must not look like one of the consumer.
            await asyncio.wait([item])
            if item.cancelled():
                raise RuntimeClosed(f"an item of {self.label} cannot be had: {self.process.closed}")
            received = item.result()
        return await self.objects.store.decode(received, refs=received.refs)

    def _taken(self, item: Item) -> None:
        credit = self.consumption.take(item)
        if credit and self.connection is not None:
            self.connection.send(m.credit(self.number, credit))
        elif credit:
            self.objects.owner.credit_local(self.number, credit)

    def loop(self) -> StreamLoop:
        loop = StreamLoop(self)
        self.consumption.begin_loop(loop)
        return loop

    def loop_left(self, loop: StreamLoop, why: str) -> None:
        """An `async for` is over. Safe in any thread, also while garbage is collected. Idempotent."""
        if self.consumption.end_loop(loop, why):
            self.process.call_soon(partial(self._end_loop, loop))

    def _end_loop(self, loop: StreamLoop) -> None:
        loop.follow(None)
        if self.consumption.left is not None:
            self._cancel()

    async def aclose(self) -> None:
        """End the producer and wait for its cleanup, at most for the grace time."""
        self._cancel()
        with shield_from_anyio(), suppress(TimeoutError):
            async with asyncio.timeout(self.process.grace):
                while not self.consumption.is_over:
                    await self._wait_change()
        self._end(None)

    def handle_dropped(self) -> None:
        if self.consumption.phase is Phase.OPEN:
            self.process.call_soon(self._cancel)

    def _cancel(self) -> None:
        if not self.consumption.leave():
            return
        if self.connection is None:
            self.objects.owner.cancel_local(self.number)
        elif self.connection.withdraw(self.number):
            self._end(None)
        else:
            self.connection.send(m.cancel(self.number))


class StreamLoop:
    def __init__(self, stream: StreamState) -> None:
        self._stream = stream
        self._task: asyncio.Task[Any] | None = None

    def next_item(self) -> Coroutine[Any, Any, Any]:
        task = current_task(self._stream.process.loop)
        if task is not self._task:
            self.follow(task)
        return self._stream.next_item()

    def follow(self, task: asyncio.Task[Any] | None) -> None:
        """The steps of one async generator may be run by different tasks."""
        if self._task is not None:
            self._task.remove_done_callback(self._task_ended)
        self._task = task
        if task is not None:
            task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        # Not `exception()`, which would mark the error as seen. A task that returns something ran one step of a
        # generator, and another task may run the next.
        if task._result is None:  # type: ignore[attr-defined]  # private
            self._stream.loop_left(self, "the task that ran the `async for` over it ended")

    def leave(self) -> None:
        self._stream.loop_left(self, "the `async for` over it was left")
