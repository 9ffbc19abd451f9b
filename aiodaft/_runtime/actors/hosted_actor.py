"""Actors that live in this process: their calls start, run and end here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiodaft._protocol.ids import FIRST_USER_ACTOR, ActorId
from aiodaft._protocol.mailbox import BoundedMailbox, Mailbox
from aiodaft._runtime.actors.inbound_call import InboundCall, current_call
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.platform.context import current_deadline
from aiodaft._runtime.serialization.encoder import Names, is_plain
from aiodaft._runtime.serialization.errors import add_note, as_call_error
from aiodaft.exceptions import ActorDied, CallCancelled, DaftError, DeadlineExceeded, Overloaded
from aiodaft.ref import Borrowed

if TYPE_CHECKING:
    from aiodaft._runtime.peer import Peer
    from aiodaft.methods import MethodSpec


logger = logging.getLogger("aiodaft")


# uvloop's clock counts whole milliseconds.
_TICK: Final = 1e-3


class HostedActor:
    """One actor: its instance, its mailbox and its thread."""

    def __init__(self, peer: Peer, actor: ActorId, name: str, find_spec: Callable[[str], MethodSpec | None]) -> None:
        self.peer = peer
        self.id = actor
        self.name = name
        self.instance: Any = None
        # The context manager that was entered for the instance.
        self._manager: Any = None
        self.find_spec = find_spec
        self.mailbox: Mailbox[InboundCall] = Mailbox()
        # The same, if not all calls are taken.
        self.bounds: BoundedMailbox[InboundCall] | None = None
        self.thread = peer.process.env.thread(name, peer.process.loop)
        # Calls that have started and not ended; and how many have ended.
        self.active = 0
        self.done = 0
        # Calls that run on although their callers have given them up.
        self.abandoned: set[InboundCall] = set()
        self.stopping: str | None = None
        self._idle: asyncio.Event | None = None
        self._starting = False

    @property
    def holds_some_up(self) -> bool:
        """Whether calls wait for their turn, in the mailbox or for the thread."""
        return self.mailbox.holds_some or self.thread.backlog > 0

    @property
    def where(self) -> str:
        """Says which actor this is, in errors."""
        return f"{self.name} (pid {self.peer.process.pid}, {self.peer.process.options.node})"

    # Starting.

    def admits(self, call: InboundCall) -> bool:
        """Whether a call may wait here; one that may not is refused."""
        why = None if self.bounds is None else self.bounds.admit(call)
        if why is not None:
            error = Overloaded(f"{call.label} of {self.where} is refused: {why}")
            call.caller_connection.fail(call, error, executed=False)
        return why is None

    def deliver(self, call: InboundCall) -> None:
        """A call arrived; it may still wait for its arguments."""
        if self.stopping is not None:
            self._refuse(call)
            return
        if call.deadline is not None:
            call.timer = self.peer.process.loop.call_at(call.deadline, self._expire, call)
        if self.mailbox.arrive(call):
            self._start(call, at_once=True)
        else:
            call.context = copy_context()
            self.peer.deadlocks.suspect(self)

    def look_again(self, *, at_once: bool = False) -> None:
        """Something that calls were waiting for has happened.

        Where actors' own code may run, it may begin at once: where messages are handled, and nothing else is under way.
        """
        if self._starting:
            # What starts now may end at once; whoever starts it looks again.
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
        call.started = True
        self.active += 1
        if call.rules.on_thread:
            self.peer.connections.ring_poller.threads += 1
            self.thread.submit(lambda: self._run_on_thread(call))
            if self.active > 1:
                self.peer.deadlocks.suspect(self)
            return
        # What was started, or cancelled, before it came, goes first. Streams and our own actors wait for their turn.
        in_turn = call.behind or self.abandoned or call.spec.is_stream or self.id < FIRST_USER_ACTOR
        self.peer.starter.start(call, call.work(), at_once=at_once and not in_turn)

    # Running.

    def enter(self, call: InboundCall) -> None:
        """In the call's own context: it has begun, and nested calls inherit from it."""
        call.since = self.peer.process.env.monotonic()
        call.begun = True
        if self.mailbox.watching:
            self.peer.process.call_soon(self.look_again)
        current_call.set(call)
        # Also if it has none: its context may come from a call of this process that made it.
        if current_deadline.get() != call.deadline:
            current_deadline.set(call.deadline)

    def last_begun(self, call: InboundCall) -> None:
        """In its task or thread: the last call of a row begins, so that those after the row may start."""
        call.last_begun = True
        if self.mailbox.watching:
            self.peer.process.call_soon(self.look_again)

    def _run_on_thread(self, call: InboundCall) -> None:
        """On the actor's thread: run a `def` method and encode its result, so that nothing changes it in between."""
        if not call.take():
            call.begun = True
            self.thread.to_loop(lambda: self.end(call))
            return
        # The thread has no context of its own to leave behind.
        copy_context().run(self._execute, call)

    def _execute(self, call: InboundCall) -> None:
        self.enter(call)
        executed = False
        finish: Callable[[], object]
        try:
            if call.arrived is not None:
                self.decode_arguments(call)
            executed = True
            finish = self._prepare_answer(call, call.spec.fn(self.instance, *call.args, **call.kwargs))
        except (SystemExit, KeyboardInterrupt) as error:
            finish = partial(self.peer.exit_requested, error)
        except BaseException as error:  # noqa: BLE001 - whatever a method raises is its caller's
            finish = partial(self.failed, call, error, executed)
        self.thread.to_loop(partial(self._finish, call, finish))
        # The error's frames lead here: they must not lead back to the error.
        del finish

    def _finish(self, call: InboundCall, finish: Callable[[], object]) -> None:
        """On the loop: answer a call that ran on the thread."""
        finish()
        self.end(call)

    def _prepare_answer(self, call: InboundCall, result: Any) -> Callable[[], object]:
        caller = call.caller_connection
        if is_plain(result) or caller.id == self.peer.process.id:
            return partial(caller.answer, call, result)
        kept = self.peer.store.keep_patiently(result, call.label, call.spec.transport)
        return partial(caller.answer_kept, call, kept)

    def decode_arguments(self, call: InboundCall) -> None:
        """Make the arguments from what came. On the loop they are light: heavy ones were decoded when they came."""
        arrived, slots = call.arrived, call.slots
        assert arrived is not None
        call.arrived, call.slots = None, ()
        store, patient = self.peer.store, call.rules.on_thread
        values = [store.decode_now(slot, refs=slot.refs, patient=patient) for slot in slots]
        args, call.kwargs = store.decode_now(arrived, values, arrived.refs, patient=patient)
        call.args = tuple(args)

    async def capture(self, kept: StoredValue) -> None:
        """Copy a large result while nothing of this actor runs that could change it.

        With other calls of the actor under way, only a copy on the loop itself is safe from them.
        """
        if self.active > 1:
            self.peer.store.pack_here(kept)
            return
        self.mailbox.hold()
        try:
            await self.peer.store.pack(kept)
        finally:
            self.mailbox.unhold()
            self.look_again()

    # Ending.

    def cancel(self, call: InboundCall) -> None:
        """The caller does not want the call any more. If it runs on the thread, it fails at once."""
        what = f"{call.label} of {self.name} was cancelled"
        self.give_up(call, CallCancelled(f"{what} before it started", executed=False))
        if call.given_up and call.rules.on_thread:
            error = CallCancelled(
                f"{what}; it runs on, because a thread cannot be interrupted, and its result is dropped"
            )
            call.caller_connection.fail(call, error, executed=None)

    def give_up(self, call: InboundCall, why: DaftError) -> None:
        """End a call, if that was not asked for before; one that has not begun fails at once, with this error."""
        if not (call.over or call.given_up) and not self._interrupt(call):
            call.caller_connection.fail(call, why, executed=False)

    def _expire(self, call: InboundCall) -> None:
        """Its time is over: it fails when its cleanup has run, or gets no more time."""
        if call.over:
            return
        begun = call.given_up or self._interrupt(call)
        if begun and not call.rules.on_thread:
            call.late = True
            call.timer = self.peer.process.loop.call_later(self.peer.process.grace, self.fail_late, call)
        else:
            self.fail_late(call, executed=None if begun else False)

    def fail_late(self, call: InboundCall, error: BaseException | None = None, *, executed: bool | None = None) -> None:
        """Its time was over before it was; perhaps it raised something then."""
        late = DeadlineExceeded(f"the deadline of {call.label} of {self.name} passed")
        if error is not None and not isinstance(error, asyncio.CancelledError | DeadlineExceeded):
            # Not the error itself, which may be unable to travel.
            add_note(late, f"when it was cancelled for that, it raised {type(error).__name__}")
        call.caller_connection.fail(call, late, executed=executed)

    def _interrupt(self, call: InboundCall) -> bool:
        """Stop a call; False if it has not begun, and never will."""
        if call.begun or not call.take():
            if call.task is not None:
                call.task.cancel()
            # A method on the thread cannot be interrupted; its result is dropped.
            call.given_up = True
            self.abandoned.add(call)
            return True
        call.withdrawn = True
        if call.bringing is not None:
            call.bringing.cancel()
            # What it had got goes with it: its frames lead to the call.
            call.bringing = None
        if call.task is not None:
            # A task that is cancelled before its first line runs none of them.
            call.task.cancel()
            # It ends in its turn: those that were started before it may not have begun either.
            self.peer.process.loop.call_soon(self._end_unbegun, call)
        elif not call.started:
            self.look_again()
        return False

    def _end_unbegun(self, call: InboundCall) -> None:
        call.begun = True
        self.end(call)

    def failed(self, call: InboundCall, error: BaseException, ran: bool) -> None:
        """It raised something."""
        if self.is_late(call, error):
            self.fail_late(call, error)
            return
        # Where a cancelled call stopped, nobody can say.
        executed = None if isinstance(error, asyncio.CancelledError) else ran
        # What the runtime's own actors raise needs no directions.
        where = f"raised by {call.label} in {self.where}" if self.id >= FIRST_USER_ACTOR else None
        call.caller_connection.fail(call, as_call_error(error, where), executed=executed)

    def is_late(self, call: InboundCall, error: BaseException) -> bool:
        """Whether it ended because its time is over. Calls that it made have no more time, and may notice first."""
        if call.late or call.deadline is None:
            return call.late
        return isinstance(error, DeadlineExceeded) and self.peer.process.loop.time() + _TICK >= call.deadline

    def _refuse(self, call: InboundCall) -> None:
        executed = None if call.begun else False
        error = ActorDied(f"{self.name} was stopped: {self.stopping}", executed=executed)
        error.actor = self.name
        call.caller_connection.fail(call, error, executed=executed)

    def end(self, call: InboundCall) -> None:
        """It is over, and was answered if somebody waited for that."""
        self.active -= 1
        self.done += 1
        if call.given_up:
            self.abandoned.discard(call)
        if call.rules.on_thread:
            self.peer.connections.ring_poller.threads -= 1
        # Its context knows the call: without this they would keep each other, and the arguments, alive.
        call.task = call.context = None
        # A timer that the method has cancelled may keep its context, and so the call, until it would have been due.
        call.args = ()
        if call.kwargs:
            call.kwargs = {}
        if call.timer is not None:
            call.timer.cancel()
        if self.mailbox.finished(call):
            self.look_again()
        if self._idle is not None and not self.active:
            self._idle.set()

    def running(self) -> list[InboundCall]:
        """Calls that have started and not ended."""
        return [call for call in self.peer.incoming_calls() if call.hosted is self and call.started]

    async def stop(self, reason: str, grace: float) -> None:
        """Take no more calls, let those under way end within the grace time, cancel the rest, leave the instance."""
        if self.stopping is not None:
            return
        self.stopping = reason
        for call in self.mailbox.drain():
            self._refuse(call)
        await self._wait_idle(grace)
        for call in self.running():
            if not call.over and not self._interrupt(call):
                self._refuse(call)
        if not all(call.rules.on_thread for call in self.abandoned):
            await self._wait_idle(self.peer.process.grace)
        for call in self.running():
            self._refuse(call)
        try:
            async with asyncio.timeout(self.peer.process.grace):
                await self._leave_instance()
        except Exception:
            logger.exception("leaving %s failed", self.name)
        self.thread.close()
        self.instance = None

    async def enter_instance(self) -> None:
        """Enter the instance if it is a context manager; one that is both kinds is entered as an async one."""
        manager = self.instance
        if hasattr(type(manager), "__aenter__"):
            entered = await manager.__aenter__()
        elif hasattr(type(manager), "__enter__"):
            entered = await self.thread.run(manager.__enter__)
        else:
            return
        self._manager = manager
        if isinstance(entered, type(manager)):
            self.instance = entered

    async def _leave_instance(self) -> None:
        manager, self._manager = self._manager, None
        if hasattr(type(manager), "__aexit__"):
            await manager.__aexit__(None, None, None)
        elif manager is not None:
            await self.thread.run(lambda: manager.__exit__(None, None, None))

    async def _wait_idle(self, seconds: float) -> None:
        if not self.active or seconds <= 0:
            return
        self._idle = asyncio.Event()
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            logger.info("%s still has %d calls under way", self.name, self.active)
        finally:
            self._idle = None


async def capture(hosted: HostedActor, result: Any, label: str, what: str, via: str | None) -> StoredValue:
    """Encode what a method gave; copied, unless it is lent, before anything of the actor can change it."""
    store = hosted.peer.store
    lender = result if isinstance(result, Borrowed) else None
    value = result if lender is None else lender.value
    kept = await store.keep_anywhere(value, Names(label, ((what, value),)), via=via, lender=lender)
    if not (kept.lent or store.pack_now(kept)):
        await hosted.capture(kept)
    return kept
