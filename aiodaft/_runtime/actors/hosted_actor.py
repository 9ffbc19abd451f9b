"""An actor of this process and the calls that it receives: an `InboundCall` is data, a `HostedActor` runs it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn, Protocol, cast

from aiodaft._protocol.calls.mailbox import (
    CANCEL,
    CANCELLED,
    EXPIRE,
    GONE,
    LATE,
    ONWARD,
    WAITING,
    WANTED,
    WITHDRAW,
    BoundedMailbox,
    Life,
    Mailbox,
)
from aiodaft._protocol.connections.messages import Awaited
from aiodaft._protocol.diagnostics.failures import CallAt
from aiodaft._protocol.ids import FIRST_USER_ACTOR, ActorId, CallId, PeerId, group_call_of
from aiodaft._runtime.actors.steps import Paced, enter, in_steps, leave
from aiodaft._runtime.connections.ring_poller import RingPoller
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.objects.transfer import Place
from aiodaft._runtime.platform.tasks import Starter, Terms, current_terms, run_through
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization.decoder import ReceivedValue, decode_small
from aiodaft._runtime.serialization.encoder import is_plain
from aiodaft._runtime.serialization.errors import add_note, as_call_error
from aiodaft._runtime.serialization.small import Small, encode_small
from aiodaft.exceptions import ActorDied, CallCancelled, DaftError, DeadlineExceeded, LocalProtocolError, Overloaded
from aiodaft.methods import MethodSpec


class Birth(NamedTuple):
    """The class, owner and restart mode of an actor of a program.

    Attributes:
        follow: Whether handles follow its restarts; None if it is not supervised.
    """

    cls: type
    owner: PeerId
    follow: bool | None


logger = logging.getLogger("aiodaft")

# Replaced, never changed. A dict is passed on faster than a read-only view of it.
_NO_KWARGS: Final[dict[str, Any]] = {}

current_call: ContextVar[InboundCall | None] = ContextVar("aiodaft_current_call", default=None)


def serving() -> InboundCall:
    call = current_call.get()
    assert call is not None
    return call


class Responder(Protocol):
    # Results are not encoded: the caller is in this process, or wants none.
    is_local: bool

    def answer(self, call: InboundCall, result: Any) -> None: ...

    def answer_stored(self, call: InboundCall, stored: StoredValue | Small) -> None: ...

    def fail(self, call: InboundCall, error: BaseException, *, executed: bool | None) -> None:
        """Give an error, unless the call is answered already."""

    def turn_away(self, call: InboundCall) -> None:
        """Have a call that has not begun be made again where the actor moves to."""

    async def item(self, call: InboundCall, value: Any) -> None: ...


class InboundCall(Life, Paced):
    # Defaults live in the class: most calls set only the fields that they need.
    kwargs: Mapping[str, Any] = _NO_KWARGS
    terms: Terms | None = None
    # Arguments that are not decoded yet, small ones as they came, and the values of the refs among them; or those of
    # some positions.
    received: ReceivedValue | bytes | dict[int, ReceivedValue] | None = None
    slots: Sequence[ReceivedValue] = ()
    timer: asyncio.TimerHandle | None = None
    # The number of earlier attempts; for the call that makes an actor, the actor's epoch.
    attempt = 0
    # The task of an async method or a generator.
    task: asyncio.Task[Any] | None = None
    # The task that waits for a ref in the place of the actor's thread.
    wait: asyncio.Task[Any] | None = None
    # The context of its arrival, if it had to wait: another call's end starts it, in another context.
    context: Context | None = None
    # Fetch its arguments.
    fetching: tuple[asyncio.Task[None], ...] = ()
    # The arguments that other calls make, by position.
    awaited: dict[int, Awaited] = {}  # noqa: RUF012 - replaced, never changed
    # Between two steps of a graph: the segment whose values it waits for.
    waits_at: int | None = None
    # The number of calls that this process had made when this one was cancelled.
    interrupted = 0
    # Why it takes part in nothing with other members of its group any more.
    apart: DaftError | None = None
    _pullers: list[Callable[[Place], object]] | None = None
    _token: list[None] | None = None

    def __init__(
        self,
        responder: Responder,
        caller: PeerId,
        number: CallId,
        hosted: HostedActor,
        spec: MethodSpec,
        mode: int,
        args: Sequence[Any],
    ) -> None:
        self.responder = responder
        self.caller = caller
        self.number = number
        self.hosted = hosted
        self.spec = spec
        self.rules = spec.rules
        self.mode = mode
        self.args = args
        if spec.rules.on_thread:
            self._token = [None]

    def take(self) -> bool:
        """Claim the right to start the call, or to withdraw it: True for the first claim.

        The actor's thread and the loop may ask at the same time; popping from a list is atomic.
        """
        if self._token is None:
            return True
        try:
            self._token.pop()
        except IndexError:
            return False
        return True

    @property
    def label(self) -> str:
        return self.spec.label

    @property
    def within(self) -> Hashable:
        """The call of a group, or the run of a graph, that it is part of; None if it was made by itself."""
        return group_call_of(self.caller, self.number)

    def waits_for(self) -> list[CallAt]:
        return [CallAt(producer, owner, number) for _, owner, number, producer, _ in self.awaited.values()][:1]

    def add_puller(self, found: Callable[[Place], object]) -> None:
        self._pullers = [*(self._pullers or ()), found]

    @property
    def pulled(self) -> bool:
        return self._pullers is not None

    def tell_pullers(self, place: Place) -> None:
        pullers, self._pullers = self._pullers, None
        for found in pullers or ():
            found(place)


class Shared:
    def __init__(self, process: Process, store: Store, ring_poller: RingPoller) -> None:
        self.process = process
        self.store = store
        self.ring_poller = ring_poller
        self.starter = Starter(process.loop)
        # Called with an actor that has waiting calls.
        self.suspect: Callable[[HostedActor], object] = lambda hosted: None
        # Called with a begun call that is cancelled, and why, or with one that has failed, and None.
        self.on_undone: Callable[[InboundCall, DaftError | None], object] = lambda call, why: None
        # The gate of a call of a group, if it has one.
        self.gate_for: Callable[[InboundCall], Any] = lambda call: None
        # Called with the name and the epoch of the first actor of a program, before that is made.
        self.on_first: Callable[[str, int], object] = lambda name, epoch: None
        # The seconds until the first actor was made here, and the packages that only this process imported for it.
        self.imported: Callable[[], tuple[float, tuple[str, ...]] | None] = lambda: None
        # Called when a method raised SystemExit or KeyboardInterrupt.
        self.on_exit: Callable[[BaseException], object] = _refuse_exit


class HostedActor:
    def __init__(
        self, shared: Shared, actor: ActorId, name: str, find_spec: Callable[[str], MethodSpec | None]
    ) -> None:
        self._shared = shared
        self._process = process = shared.process
        self._store = shared.store
        self._pace = shared.ring_poller.pace
        self.id = actor
        self.name = name
        self.instance: Any = None
        # None for an actor of the runtime.
        self.birth: Birth | None = None
        self._manager: Any = None
        self.stop_spawned: Callable[[], Awaitable[None]] | None = None
        self.background: set[asyncio.Task[Any]] = set()
        self.find_spec = find_spec
        self.refusal: DaftError | None = None
        self.mailbox: Mailbox[InboundCall] = Mailbox()
        # The same, if the number of waiting calls is bounded.
        self.bounds: BoundedMailbox[InboundCall] | None = None
        self.thread = process.env.thread(name, process.loop)
        # Calls that have started and not ended, in order; how many have ended; how many, or steps of graphs, failed.
        self.running: dict[InboundCall, None] = {}
        self.done = self.failed = 0
        self.abandoned: set[InboundCall] = set()
        self.stopping: str | None = None
        # It moves to another process, where calls that have not begun are made again.
        self.moves = False
        self._idle: asyncio.Event | None = None
        self._starting = False

    def lacks(self, name: str) -> Exception:
        return self.refusal or AttributeError(f"{self.name} has no remote method {name!r:.80}")

    @property
    def holds_some_up(self) -> bool:
        return self.mailbox.holds_some or self.thread.backlog > 0

    @property
    def where(self) -> str:
        return f"{self.name} (pid {self._process.pid}, {self._process.options.node})"

    def admits(self, call: InboundCall) -> bool:
        why = None if self.bounds is None else self.bounds.admit(call)
        if why is not None:
            call.responder.fail(call, Overloaded(f"{call.label} of {self.where} is refused: {why}"), executed=False)
        return why is None

    def deliver(self, call: InboundCall) -> None:
        """Start or queue a call that arrived; its arguments may still be missing."""
        if self.stopping is not None:
            self._refuse(call)
            return
        if call.deadline is not None:
            call.timer = self._process.loop.call_at(call.deadline, self._expire, call)
        if call.number < 0:
            call.gate = self._shared.gate_for(call)
        if self.mailbox.arrive(call):
            self._start(call, at_once=True)
        else:
            call.context = copy_context()
            self._shared.suspect(self)

    def ready(self, call: InboundCall) -> None:
        """Start a call that had to wait for its arguments, if it may start now: refs came in a message."""
        if self._starting or not self.mailbox.take_ready(call):
            self.look_again(at_once=True)
        else:
            self._start(call, at_once=True)

    def look_again(self, *, at_once: bool = False) -> None:
        """Start the calls that may start now.

        `at_once` lets methods begin in this turn of the loop; only for code that handles messages.
        """
        if self._starting:
            return
        self._starting = True
        try:
            again = True
            while again:
                again = False
                for call in self.mailbox.startable():
                    again = True
                    self._start(call, at_once=at_once)
        finally:
            self._starting = False

    def _start(self, call: InboundCall, *, at_once: bool) -> None:
        call.stage = ONWARD[call.stage]
        self.running[call] = None
        if call.rules.on_thread:
            self._pace.threads += 1
            # The thread is there: it has made the instance.
            self.thread.submit(lambda: self._run_on_thread(call))
            if len(self.running) > 1:
                self._shared.suspect(self)
            return
        # These wait for earlier callbacks of the loop; others begin at once.
        in_turn = call.behind or self.abandoned or call.spec.is_stream or self.id < FIRST_USER_ACTOR
        self._shared.starter.start(call, self.run(call), at_once=at_once and not in_turn)

    async def run(self, call: InboundCall) -> None:
        """Run the method of a call and answer: the only place that calls methods and handles their errors.

        SystemExit and KeyboardInterrupt end the process; every other error is the caller's. An `async def` method or a
        generator runs in the call's task. A `def` method runs on the actor's thread, where nothing in here waits and
        which stands still until its result is encoded; the loop gives the answer. The steps of a graph are
        run by a method of their segment, which keeps their errors as values.
        """
        on_thread = call.rules.on_thread
        self._enter(call)
        ran = False
        answer: Callable[[InboundCall, Any], object]
        given: Any
        try:
            if call.received is not None:
                self._decode_arguments(call)
            ran = True
            result: Any = call.spec.fn(self.instance, *call.args, **call.kwargs)
            if not on_thread:
                result = await (self._give_items(call, result) if call.spec.is_stream else result)
            if call.stage is LATE:
                # It returned a result after its deadline.
                answer, given = self._fail_late, None
            elif call.dropped or call.responder.is_local or is_plain(result):
                answer, given = call.responder.answer, result
            elif (small := encode_small((result,), by_name=True)) is not None:
                answer, given = call.responder.answer_stored, small
            else:
                store = self._store
                capture = store.capture_from_thread if on_thread else store.capture
                answer = call.responder.answer_stored
                given = capture(result, call.label, "result", call.spec.transport, small=False)
                if not (given.packed or given.wholly_lent):
                    # Nothing can change it.
                    if on_thread:
                        store.pack_here(given)
                    else:
                        await store.pack(given)
        except (SystemExit, KeyboardInterrupt) as error:
            answer, given = (lambda _, error: self._shared.on_exit(error)), error
        except BaseException as error:  # noqa: BLE001 - the caller gets every error of a method
            answer, given = partial(self._failed, ran=ran), error
        if on_thread:
            self._end_later(call, answer, given)
        else:
            self._end(call, answer, given)
        # The error's frames lead here: they must not lead back to the error.
        del answer, given

    async def _give_items(self, call: InboundCall, items: Any) -> None:
        if not isinstance(items, AsyncGenerator):
            encode = None
            if not call.responder.is_local:
                encode = partial(
                    self._store.capture_from_thread, label=call.label, what="item", via=call.spec.transport
                )
            items = in_steps(call, items, self.thread, self._pace, partial(self._shared.suspect, self), encode)
        await call.give_items(items, call.responder.item)

    def _run_on_thread(self, call: InboundCall) -> None:
        if call.take():
            # A copy, because the context of the thread serves all calls.
            copy_context().run(run_through, self.run(call))
        else:
            call.begun = True
            self._end_later(call)

    def _enter(self, call: InboundCall) -> None:
        call.since = self._process.env.monotonic()
        call.begun = True
        if self.mailbox.watching:
            self._process.call_soon(self.look_again)
        current_call.set(call)
        # Also None: the context may have the terms of the call that made this one.
        if current_terms.get() != call.terms:
            current_terms.set(call.terms)

    def last_begun(self, call: InboundCall) -> None:
        """Note, in its task or thread, that the last step of a segment begins: calls after the segment may start."""
        call.last_begun = True
        if self.mailbox.watching:
            self._process.call_soon(self.look_again)

    def _decode_arguments(self, call: InboundCall) -> None:
        received, slots, store, patient = call.received, call.slots, self._store, call.rules.on_thread
        assert received is not None
        call.received, call.slots = None, ()
        if isinstance(received, dict):
            for index, one in received.items():
                cast("list[Any]", call.args)[index] = store.decode_now(one, refs=one.refs, patient=patient)
            return
        if isinstance(received, bytes):
            args, call.kwargs = decode_small(received)
        else:
            values = [store.decode_now(slot, refs=slot.refs, patient=patient) for slot in slots] if slots else []
            args, call.kwargs = store.decode_now(received, values, received.refs, patient=patient)
        call.args = tuple(args)

    def cancel(self, call: InboundCall) -> None:
        what = f"{call.label} of {self.name} was cancelled"
        self.give_up(call, CallCancelled(f"{what} before it started{self._thread_kept_by(call)}", executed=False))
        if call.stage is CANCELLED and call.rules.on_thread:
            runs_on = "it runs on, because a thread cannot be interrupted, and its result is dropped"
            call.responder.fail(call, CallCancelled(f"{what}; {runs_on}"), executed=None)

    def give_up(self, call: InboundCall, why: DaftError) -> None:
        """Interrupt a call, unless this was done before. A call that has not begun fails at once with this error."""
        if call.stage in WANTED and not self._interrupt(call):
            call.responder.fail(call, why, executed=False)

    def _thread_kept_by(self, call: InboundCall) -> str:
        """The call that was given up and that another one waits for, with the way out; "" if there is none."""
        kept_by = next((other for other in self.abandoned if other.rules.on_thread), None)
        if kept_by is None or not call.rules.on_thread:
            return ""
        return f": {kept_by.label}, which was given up, still has the thread of the actor; `rt.kill` ends it"

    def _expire(self, call: InboundCall) -> None:
        """Interrupt a call at its deadline. It fails when its cleanup has run, or after the grace time."""
        if call.answered:
            return
        begun = call.stage is CANCELLED or self._interrupt(call)
        if begun and not call.rules.on_thread:
            call.handle(EXPIRE)
            call.timer = self._process.loop.call_later(self._process.grace, self._fail_late, call)
        else:
            self._fail_late(call, executed=None if begun else False)

    def _fail_late(
        self, call: InboundCall, error: BaseException | None = None, *, executed: bool | None = None
    ) -> None:
        """Fail a call that outlived its deadline; `error` is the one that it raised when it was cancelled."""
        when = f" before it started{self._thread_kept_by(call)}" if executed is False else ""
        late = DeadlineExceeded(f"the deadline of {call.label} of {self.name} passed{when}")
        if error is not None and not isinstance(error, asyncio.CancelledError | DeadlineExceeded):
            # Not the error itself, which may not be picklable.
            add_note(late, f"when it was cancelled for that, it raised {type(error).__name__}")
        call.responder.fail(call, late, executed=executed)

    def _interrupt(self, call: InboundCall) -> bool:
        """Cancel a call that has begun; withdraw any other, and return False."""
        waits = call.stage in WAITING
        if call.begun or not call.take():
            call.interrupted = self._process.next_number()
            for task in (call.task, call.wait):
                if task is not None:
                    task.cancel()
            # A method on the thread cannot be interrupted; its result is dropped.
            call.handle(CANCEL)
            self.abandoned.add(call)
            self.undone(call, CallCancelled(f"{call.label} of {self.name} was cancelled"))
            return True
        self._withdraw(call, waits=waits)
        return False

    def _withdraw(self, call: InboundCall, *, waits: bool) -> None:
        call.handle(WITHDRAW)
        fetching, call.fetching = call.fetching, ()
        for task in fetching:
            task.cancel()
        if call.task is not None:
            # If it is cancelled before its first line, it runs no line.
            call.task.cancel()
            # Later, in order: calls that were started before it may not have begun either.
            self._process.loop.call_soon(self._end_unbegun, call)
        elif waits:
            if call.gate is not None:
                call.gate.left(call)
            self.look_again()

    def _end_unbegun(self, call: InboundCall) -> None:
        call.begun = True
        self._end(call)

    def _failed(self, call: InboundCall, error: BaseException, ran: bool) -> None:
        self.undone(call, None)
        if self.is_late(call, error):
            self._fail_late(call, error)
            return
        own = self.id < FIRST_USER_ACTOR
        # It is not known where a cancelled call stopped. The runtime's own actors know what they have done.
        executed = None if isinstance(error, asyncio.CancelledError) else ran
        if ran and own and isinstance(error, DaftError):
            executed = error.executed
        why = "it awaited something that was cancelled"
        if self.stopping is not None:
            why = f"{self.name} was stopped: {self.stopping}"
        failure = as_call_error(error, None if own else f"{call.label} in {self.where}", why)
        if not (own or call.given_up):
            self.note_failure(call.label, failure)
        call.responder.fail(call, failure, executed=executed)

    def note_failure(self, label: str, error: BaseException) -> None:
        self.failed += 1
        self._process.note_failure("call", self.name, error, label)

    def undone(self, call: InboundCall, why: DaftError | None) -> None:
        """A begun call takes part in nothing any more, for this reason; None: it has failed."""
        self._shared.on_undone(call, why)

    def is_late(self, call: InboundCall, error: BaseException) -> bool:
        """Whether a call ended because of its deadline: the calls that it made have the same, and may fail first."""
        return call.stage is LATE or (self._process.is_past(call.deadline) and isinstance(error, DeadlineExceeded))

    def _refuse(self, call: InboundCall) -> None:
        if self.moves and not call.begun:
            call.responder.turn_away(call)
            return
        executed = None if call.begun else False
        error = ActorDied(f"{self.name} was stopped: {self.stopping}", executed=executed)
        error.actor = self.name
        call.responder.fail(call, error, executed=executed)

    def _end_later(self, call: InboundCall, answer: Callable[..., object] | None = None, given: Any = None) -> None:
        self.thread.to_loop(partial(self._end, call, answer, given))

    def _end(self, call: InboundCall, answer: Callable[..., object] | None = None, given: Any = None) -> None:
        """Answer a started call that is over, and start waiting calls. Runs on the loop."""
        try:
            if answer is not None:
                answer(call, given)
        finally:
            del self.running[call]
            self.done += 1
            self.abandoned.discard(call)
            if call.rules.on_thread:
                self._pace.threads -= 1
            # Breaks a reference cycle: the context refers to the call.
            call.task = call.context = None
            # A cancelled timer of the method may keep the context, and so the call: free the arguments now.
            call.args = ()
            if call.kwargs:
                call.kwargs = {}
            if call.timer is not None:
                call.timer.cancel()
            if call.gate is not None:
                call.gate.left(call)
            if self.mailbox.finished(call):
                self.look_again()
            if self._idle is not None and not self.running:
                self._idle.set()

    def under_way(self) -> list[InboundCall]:
        return [call for call in list(self.running) if call.stage not in GONE]

    async def stop(self, reason: str, grace: float, *, moves: bool = False) -> None:
        """Refuse calls, wait the grace time for the calls under way, cancel the others, and exit the instance."""
        if self.stopping is not None:
            return
        self.stopping, self.moves = reason, moves
        for call in self.mailbox.drain():
            self._refuse(call)
        for call in list(self.running) if moves else ():
            if call.rules.on_thread and not call.begun and not call.answered and call.take():
                self._withdraw(call, waits=False)
                self._refuse(call)
        await self._wait_idle(grace)
        for call in list(self.running):
            if not call.answered and (not self._interrupt(call) or call.waits_at is not None):
                self._refuse(call)
        if not all(call.rules.on_thread for call in self.abandoned):
            await self._wait_idle(self._process.grace)
        for call in list(self.running):
            self._refuse(call)
        try:
            async with asyncio.timeout(self._process.grace):
                manager, self._manager = self._manager, None
                await leave(manager, self.thread)
        except Exception:
            logger.exception("leaving %s failed", self.name)
        runs = any(call.rules.on_thread for call in self.running)
        await self.thread.close_within(0 if runs else self._process.grace)
        self.instance = None

    async def enter_instance(self) -> None:
        self.instance, self._manager = await enter(self.instance, self.thread)

    async def _wait_idle(self, seconds: float) -> None:
        if not self.running or seconds <= 0:
            return
        self._idle = asyncio.Event()
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            logger.info("%s still has %d calls under way", self.name, len(self.running))
        finally:
            self._idle = None


def _refuse_exit(error: BaseException) -> NoReturn:
    raise LocalProtocolError(f"a system actor raised {type(error).__name__}")
