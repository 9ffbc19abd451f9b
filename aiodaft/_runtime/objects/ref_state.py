"""The state of one value in a process: its place, the tasks that wait for it, its holders.

`_protocol.objects.value` has the states. In them:

    PENDING   tasks wait; cancelling the last of them cancels the call
    HERE      `value` is the object, or `received` is decoded or `stored` is opened for the first task that waits
    THERE     the first task that waits has the value pulled
    FAILED    tasks get `error`; an error that no code has seen is reported when the last `Ref` object is dropped
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from types import TracebackType
from typing import Any, Final, Protocol, Self, cast

from aiodaft._protocol.diagnostics import trace
from aiodaft._protocol.ids import CallId, PeerId, serial_of
from aiodaft._protocol.objects.value import (
    FAILED,
    FREED,
    HERE,
    PENDING,
    THERE,
    Borrowing,
    Status,
    Value,
    Verdict,
    first_error,
)
from aiodaft._protocol.supervision import FailedAwaits
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.objects.store import IntoTensor, Store
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.platform.tasks import Wakeup, Wakeups, log_error, run_through, wait_shielded
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization.decoder import ReceivedValue, is_heavy
from aiodaft._runtime.serialization.encoded import kind_of, nbytes_of
from aiodaft._runtime.serialization.errors import copy_error
from aiodaft.exceptions import DaftError, ResourceExhausted
from aiodaft.ref import Ref, RefFacts

ABSENT: Final = object()


class UnhandledErrors(Protocol):
    def fail(self, error: BaseException, what: str) -> None: ...
    def hold(self, state: RefState) -> None: ...
    def settle(self, state: RefState) -> None: ...


class RefState(Value):
    """One value, as one process knows it; shared by all `Ref` objects for it.

    Attributes:
        label: The call that made it, such as "Model.execute".
        sink: The scope that owns errors no code has seen.
    """

    # Defaults live in the class: most refs are made, awaited and dropped, and set only the fields that they need.
    objects: RefHost
    process: Process
    number: CallId
    connection: Connection | None = None
    value: Any = ABSENT
    received: ReceivedValue | None = None
    stored: StoredValue | None = None
    # Later awaits get the value that an await has brought here; else they bring it again.
    keeps = True
    stored_bytes = 0
    stored_kind = ""
    # The task or call that made this call, weakly; None if it was made in another process.
    maker: weakref.ref[Any] | None = None
    # The numbers of calls when this call failed, and when its last `Ref` object was dropped.
    failed = 0
    dropped = 0
    # Whether that was because the call that made this one was cancelled, maybe before it could await the ref.
    _given_up = False
    inputs: list[RefState] | None = None
    _label: str
    _watchers: list[Callable[[Any], object]] | None = None
    _waiters: list[Wakeup] | None = None
    # Set when neither a call nor another process has the value.
    _idle: asyncio.Event | None = None
    _traceback: TracebackType | None = None
    _fetching = False

    @property
    def label(self) -> str:
        return self._label

    @property
    def producer(self) -> PeerId:
        return self.process.id

    @property
    def owner(self) -> PeerId:
        return self.process.id

    @property
    def sink(self) -> UnhandledErrors | None:
        return None

    @property
    def origin(self) -> str:
        return self.label

    def parts(self) -> tuple[Ref[Any], ...] | None:
        return None

    def facts(self) -> RefFacts:
        here = self.value is not ABSENT
        places = [self._home] if self.status is THERE else []
        if here or self.status is HERE:
            places.append("this process")
        return RefFacts(
            self.origin, kind_of(self.value) if here else self.stored_kind, self._size_known(), ", ".join(places)
        )

    @property
    def _home(self) -> str:
        return self.producer

    def _size_known(self) -> int | None:
        if (nbytes := nbytes_of(self.value)) is not None:
            return nbytes
        return self.stored_bytes or (None if self.stored is None else self.stored.size)

    def gathered(self, parts: tuple[Ref[Any], ...]) -> RefState:
        return GatheredState(self.objects, parts)

    def cut(self, ref: Ref[Any], count: int) -> list[Ref[Any]]:
        return self.objects.owner.cut(ref, count)

    def check_loop(self) -> None:
        if asyncio._get_running_loop() is not self.process.loop:
            raise RuntimeError(f"{self.label} is awaited on another event loop than the one its runtime was opened on")

    def watch(self, callback: Callable[[Any], object], *, interested: bool = False) -> None:
        """Call back, on the loop, once the call is settled; never within this call.

        An interested callback counts as an awaiter: the call is not cancelled while it is registered.
        """
        if not self.process.is_here:
            self.process.call_soon(partial(self.watch, callback, interested=interested))
            return
        self.interested += interested
        if self.settled:
            self.process.loop.call_soon(callback, self)
        elif self._watchers is None:
            self._watchers = [callback]
        else:
            self._watchers.append(callback)

    def unwatch(self, callback: Callable[[Any], object]) -> int:
        if not self.process.is_here:
            raise RuntimeError(f"a callback of {self.label} is removed in the thread of its event loop only")
        before = len(self._watchers or ())
        self._watchers = [watcher for watcher in self._watchers or () if watcher != callback]
        removed = before - len(self._watchers)
        self.interested -= removed
        return removed

    def cancel(self, why: str) -> bool:
        if self.settled or self.process.is_here:
            return not self.settled and self._cancel(why)
        # On the loop: this thread may have handed the call itself to the loop just before.
        self.process.call_soon(partial(self.cancel, why))
        return True

    def _cancel(self, why: str) -> bool:
        return False

    def on_error(self, error: BaseException) -> None:
        if not self.settled:
            self.error, self._traceback = error, error.__traceback__
            self.failed = self.process.next_number()
            if self.process.recorder is not None and self.own:
                self.process.recorder.add(trace.failed((self.process.id, self.number), trace.outcome_of(error)))
        self._settle(FAILED)

    def on_ready(self) -> None:
        self._settle(HERE)

    def _settle(self, status: Status) -> None:
        if not self.advance(status):
            # The answer came after the call was given up.
            if status is THERE:
                self._release_remote()
            return
        release_inputs(self, self.error)
        watchers, self._watchers = self._watchers, None
        for watcher in watchers or ():
            self.process.loop.call_soon(watcher, self)
        if self._waiters:
            self._serve_waiters()
        if self.error is not None:
            self._judge_error()
        elif not self.held:
            self.free_if_unheld()

    def hold(self) -> Self:
        self.handles += 1
        return self

    def handle_dropped(self) -> None:
        """Count one `Ref` object fewer. Safe in any thread, also during a garbage collection."""
        # For most refs nothing is left to do: the value came with the answer, and no other process knows it.
        if self.status is not HERE or self.uses or self.shared or self.stored is not None or not self.own:
            self.dropped = self.process.next_number()
            # Refs that a call holds when it is cancelled; 0 until then.
            self._given_up = serial_of(self.number) < getattr(self.maker and self.maker(), "interrupted", 0)
            self.objects.drop_soon(self)

    def drop_handle(self) -> None:
        self.handles -= 1
        if not self.handles:
            if self._given_up and not self.settled:
                self._end_unawaited()
            if self.error is not None:
                self._judge_error()
            self.free_if_unheld()

    def add_use(self) -> None:
        self.uses += 1

    def drop_use(self, error: BaseException | None = None) -> None:
        if self.end_use(error):
            self.mark_seen()
        if not self.uses:
            self.objects.borrowing.unused(self.number, self)
        self.free_if_unheld()

    def free_now(self) -> None:
        if not (self.settled and self.process.is_here):
            self.watch(type(self).free_now)
            return
        self._release_value()
        self.value, self.received, self.seen = ABSENT, None, True
        self.error = ReferenceError(f"the result of {self.label} was freed by Ref.free()")
        self.advance(FREED)

    def free_if_unheld(self) -> None:
        if self._idle is not None and not self.in_use:
            self._idle.set()
            self._idle = None
        if self.free:
            self._release_value()

    def _release_value(self) -> None:
        if self.shared:
            self.shared = False
            self.objects.borrowing.forget(self.number)
        if self.status is THERE:
            self._release_remote()
        if self.stored is not None:
            self.stored.release()
            self.stored = None

    def _release_remote(self) -> None: ...

    def mark_seen(self) -> None:
        if not self.seen:
            self.seen = True
            if self.sink is not None:
                self.sink.settle(self)

    def _judge_error(self) -> None:
        verdict = self.judge_error()
        if verdict is Verdict.REPORT:
            self.mark_seen()
            self._report()
        elif verdict is Verdict.HOLD and self.sink is not None:
            self.sink.hold(self)

    def _report(self) -> None:
        error, objects = self.error, self.objects
        assert error is not None
        if self.maker is not None and objects.failed_awaits.excuse(self.maker, self.number, self.failed, self.dropped):
            why = "its ref was dropped after the await of another call of the same task had failed"
            log_error(f"{self.label} failed as well; {why}", error, logging.INFO)
            return
        report = objects.on_unheld if self.sink is None else self.sink.fail
        report(error, f"{self.label} failed, and its ref was dropped before any code saw the error")

    def wait(self, ref: Ref[Any]) -> Generator[Any, None, Any]:
        while self.value is ABSENT and self.error is None:
            if self.received is None or is_heavy(self.received.payload):
                wakeup = self._add_waiter()
                try:
                    yield from wakeup
                except BaseException as error:
                    self._note_failed_await()
                    if not self.keeps:
                        self.value = ABSENT
                    yield from self._stop_waiting(wakeup, error)
                    raise
            else:
                if not self.process.is_here:
                    self.check_loop()
                self._decode_now()
        if self.error is not None:
            self.mark_seen()
            self._note_failed_await()
            __tracebackhide__ = True
            try:
                # As asyncio's futures do: each waiter adds its frames to the original traceback.
                raise self.error.with_traceback(self._traceback)
            finally:
                # The frame must not lead from the error back to it: the cycle would keep the objects of other frames.
                del self, ref
        value = self.value
        if not self.keeps:
            self.value = ABSENT
        return value

    def _note_failed_await(self) -> None:
        """Note that an await raises: the code after it, which may await siblings of this call, does not run."""
        if self.maker is not None:
            self.objects.failed_awaits.note(self.maker, self.number, self.process.next_number())

    def result(self, ref: Ref[Any], timeout: float | None) -> Any:
        near = self.value is not ABSENT or self.error is not None
        if near or (self.received is not None and not is_heavy(self.received.payload)):
            if self.process.is_here:
                return run_through(self.wait(ref))
            timeout = None
        elif self.settled and self.process.is_here:
            raise RuntimeError(
                f"the value of {self.origin} is not in this process yet: result() would block the event loop of this "
                "thread: use `await`"
            )
        return self.objects.owner.block_on(ref, timeout)

    def wait_settled(self) -> Generator[Any, None, None]:
        if not self.settled:
            self.process.check_open(f"{self.label} cannot be awaited")
            self.check_loop()
            yield from self._settled().__await__()

    def _settled(self) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self.process.loop.create_future()
        self.watch(lambda _: _wake(future))
        return future

    async def wait_ended(self) -> bool:
        """Wait until the call is over, for another process. Returns whether there is a value."""
        await self._settled()
        return self.error is None

    def wait_released(self) -> Generator[Any, None, None]:
        self.check_loop()
        yield from self.wait_settled()
        while self.in_use:
            self._idle = self._idle or asyncio.Event()
            yield from self._idle.wait().__await__()
        if self.status is THERE:
            # An await may have mapped it here.
            self.keeps, self.value = False, ABSENT
            yield from self.objects.owner.unread_remote(self.producer, self.owner, self.number).__await__()
        elif self.stored is not None:
            yield from self.stored.wait_unread().__await__()

    def _add_waiter(self) -> Wakeup:
        if self.process.closed is not None:
            self.process.check_open(f"{self.label} cannot be awaited")
        self.check_loop()
        wakeup = Wakeup(self.objects.wakeups)
        if self._waiters is None:
            self._waiters = [wakeup]
        else:
            self._waiters.append(wakeup)
        if self.status is not PENDING or not self.own:
            self._serve_waiters()
        return wakeup

    def _stop_waiting(self, wakeup: Wakeup, why: BaseException) -> Generator[Any, None, None]:
        cancelled = self._leave(wakeup)
        if isinstance(why, asyncio.CancelledError):
            if cancelled:
                yield from wait_shielded(self._settled())
            if isinstance(self.error, DaftError):
                # `deadline` reports it as the outcome of the call. A copy: the error itself may be raised while `why`
                # is handled, and would then refer to `why`.
                why.__cause__ = copy_error(self.error)

    def _leave(self, wakeup: Wakeup) -> bool:
        if self._waiters and wakeup in self._waiters:
            self._waiters.remove(wakeup)
        return self._end_unawaited()

    def _end_unawaited(self) -> bool:
        """A task stops waiting, or will not begin to: cancel a call under way if it was the last, and return True."""
        if self.goes_on(waiters=bool(self._waiters)):
            return False
        # Code that stops waiting does not get the error, also if the call failed before.
        self.mark_seen()
        self.cancel("the task that awaited it was cancelled")
        return not self.settled

    def _serve_waiters(self) -> None:
        if self.value is ABSENT and self.error is None:
            if self.received is None or is_heavy(self.received.payload):
                if not self._fetching:
                    self._fetching = True
                    self.process.tasks.create_task(self._fetch(), name=f"fetch {self.label}")
                return
            self._decode_now()
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        waiters, self._waiters = self._waiters, None
        if not (waiters or self.keeps):
            self.value = ABSENT
        for wakeup in waiters or ():
            wakeup.wake()

    def _decode_now(self) -> None:
        assert self.received is not None
        try:
            self.value = self.objects.store.decode_now(self.received, refs=self.received.refs)
        except DaftError as error:
            self.error, self._traceback = error.with_executed(True), error.__traceback__

    async def _fetch(self) -> None:
        try:
            self.value = await self.bring()
        except Exception as error:  # noqa: BLE001 - the waiters get it
            self.error, self._traceback = error, error.__traceback__
            if isinstance(error, ResourceExhausted):
                # The call succeeded; only this process has no room for the value.
                error.with_executed(True)
        finally:
            self._fetching = False
        if not self.settled:
            self._settle(HERE if self.error is None else FAILED)
        self._serve_waiters()

    async def bring(self, into: IntoTensor | None = None) -> Any:
        """Get the value, from another process if needed; if the bytes went straight into a tensor, that tensor."""
        received = self.received or await self.objects.pull(self.owner, self.number, self.producer, into)
        if into is not None and into.filled:
            return into.target
        return await self.objects.store.decode(received, refs=received.refs)

    async def copy_into(self, target: Any) -> None:
        self.check_loop()
        into = IntoTensor(target, self.label)
        here: Ref[Any] = Ref(self.hold())
        if self.own:
            await here.ready()
        missing = self.value is ABSENT and self.error is None
        value = await self.bring(into) if missing else await here
        await into.copy(value, self.objects.store)


class GatheredState(RefState):
    """One value of this process that is a list of values; as an argument, it is passed on as the list of the refs."""

    handles = 1

    def __init__(self, objects: RefHost, parts: tuple[Ref[Any], ...]) -> None:
        self.objects = objects
        self.process = objects.process
        self.number = objects.process.next_number()
        self._parts = parts
        self.maker = state_of(parts[0]).maker
        self._missing = len(parts)
        for part in parts:
            part._state.watch(self._one_settled)

    @property
    def label(self) -> str:
        names = ", ".join(part._state.label for part in self._parts[:3])
        return f"[{names}{', ...' if len(self._parts) > 3 else ''}]"

    def parts(self) -> tuple[Ref[Any], ...]:
        return self._parts

    def _one_settled(self, _: object) -> None:
        self._missing -= 1
        if self._missing:
            return
        states = [state_of(part) for part in self._parts]
        error, seen = first_error(states)
        for state in states:
            if state.error is not None:
                state.mark_seen()
        if error is None:
            self._settle(HERE)
            return
        if seen:
            self.mark_seen()
        self.on_error(error)

    async def bring(self, into: IntoTensor | None = None) -> list[Any]:
        return [await part for part in self._parts]

    def _cancel(self, why: str) -> bool:
        return any([part._state.cancel(why) for part in self._parts])  # noqa: C419 - each of them, also after the first


class UsesInputs(Protocol):
    inputs: list[RefState] | None


def release_inputs(call: UsesInputs, error: BaseException | None = None) -> None:
    inputs, call.inputs = call.inputs, None
    for state in inputs or ():
        state.drop_use(error)


def state_of(ref: Ref[Any]) -> RefState:
    return cast("RefState", ref._state)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class InboundProducer(Protocol):
    """A call of this process that makes a value."""

    @property
    def given_up(self) -> bool: ...

    def add_puller(self, found: Callable[[Any], object]) -> None: ...


class RefMessages(Protocol):
    def borrow(self, owner: PeerId, number: CallId) -> Awaitable[object]: ...
    def give_back(self, owner: PeerId, number: CallId) -> None: ...
    def cancel_remote(self, owner: PeerId, number: CallId) -> None: ...
    def ended_remote(self, owner: PeerId, number: CallId) -> Awaitable[bool]: ...
    def unread_remote(self, producer: PeerId, owner: PeerId, number: CallId) -> Awaitable[object]: ...
    def running_call(self, owner: PeerId, number: CallId) -> InboundProducer | None: ...
    def cancel_local(self, number: CallId) -> bool: ...
    def credit_local(self, number: CallId, count: int) -> None: ...
    def block_on(self, ref: Ref[Any], timeout: float | None) -> Any: ...
    def cut(self, ref: Ref[Any], count: int) -> list[Ref[Any]]: ...


class Dropped(Protocol):
    def drop_handle(self) -> None: ...


class RefHost:
    pull: Callable[..., Awaitable[ReceivedValue]]

    def __init__(self, process: Process, store: Store, owner: RefMessages, wakeups: Wakeups) -> None:
        self.process = process
        self.store = store
        self.owner = owner
        self.wakeups = wakeups
        self.borrowing: Borrowing[Any] = Borrowing(process.id)
        self.failed_awaits: FailedAwaits[weakref.ref[Any]] = FailedAwaits()
        # Reports an error that no code saw and no scope owns.
        self.on_unheld: Callable[[BaseException, str], object] = lambda error, what: log_error(what, error)
        self._dropped: deque[Dropped] = deque()
        self._draining = False

    def drop_soon(self, dropped: Dropped) -> None:
        """Call `drop_handle` on the loop; from any thread, also while garbage is collected."""
        self._dropped.append(dropped)
        if not self._draining:
            self._draining = True
            self.process.call_soon(self.drop_now)

    def drop_now(self) -> None:
        self._draining = False
        while self._dropped:
            self._dropped.popleft().drop_handle()
