"""Calls that this process makes: targets (actors), requests (calls to send), and states (results)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Final, Protocol, TypeAlias

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.messages import WANT_NOTHING, WANT_REPLY, WANT_STREAM
from aiodaft._protocol.ids import FIRST_USER_ACTOR, ActorId, CallId, PeerId, can_share_memory, node_of
from aiodaft._protocol.node.worker import Health
from aiodaft._protocol.objects.value import FAILED, HERE, PENDING, THERE, Status
from aiodaft._runtime.actors.hosted_actor import HostedActor
from aiodaft._runtime.connections.connection import Connection
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.objects.broadcast import DIRECT
from aiodaft._runtime.objects.ref_state import ABSENT, RefState, UnhandledErrors, release_inputs
from aiodaft._runtime.objects.ref_table import StreamState
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.objects.transfer import Objects
from aiodaft._runtime.platform.tasks import Terms, current_task, log_error, logger, printable, under
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization.containers import builder
from aiodaft._runtime.serialization.decoder import ReceivedValue
from aiodaft._runtime.serialization.errors import add_note, copy_error, unsent
from aiodaft._runtime.serialization.pickling import home
from aiodaft.actor import ActorFacts, Handle
from aiodaft.exceptions import ActorDied, CallCancelled, DaftError, OutcomeUnknown, PeerLost, RuntimeClosed
from aiodaft.methods import MethodSpec
from aiodaft.ref import Ref, RefFacts, Stream

_STATES: Final = {
    Health.ALIVE: "alive",
    Health.LEAVING: "draining",
    Health.SUSPECT: "silent",
    Health.LOST: "dead",
}


class Siblings(Protocol):
    failed: DaftError | None

    def made_again(self, state: CallState) -> None: ...


class CallSink(Protocol):
    def submit_at_once(
        self,
        target: Target,
        spec: MethodSpec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        number: CallId,
        state: CallState | None,
    ) -> bool:
        """Take a call, or without a state a tell; False: give it to `submit`."""
        return False

    def submit(self, request: Request) -> None: ...


class Sender(CallSink, Protocol):
    def submit_later(self, request: Request) -> None: ...

    def turn_came(self, request: Request) -> None: ...

    def prepare(self, request: Request) -> bool: ...


class Caller:
    """The parts of a process that its handles use to make calls."""

    # `outgoing` takes the calls of handles: while a graph is captured the recorder, else `direct`, which telemetry
    # replaces.
    sender: Sender
    outgoing: CallSink
    direct: CallSink

    def __init__(
        self, process: Process, connections: Connections, objects: Objects, actors: Mapping[ActorId, HostedActor]
    ) -> None:
        self.process = process
        self.connections = connections
        self.objects = objects
        self.actors = actors
        self.next_number = process.next_number
        self.is_draining: Callable[[PeerId], bool] = lambda remote: False
        self.current_maker: Callable[[], object] = partial(current_task, process.loop)

    def handle(self, remote: PeerId, actor: ActorId, label: str, cls: type, sink: UnhandledErrors | None = None) -> Any:
        return Handle(Target(self, remote, actor, label, sink), cls)


class CallState(RefState):
    """The result of a call that this process made."""

    handles = 1
    # The processes to which its producer was told to send the result.
    forwarded: frozenset[PeerId] = frozenset()
    siblings: Siblings | None = None
    _cancelling = False
    _timer: asyncio.TimerHandle | None = None

    def __init__(self, target: Target, spec: MethodSpec, number: CallId) -> None:
        self.objects = objects = target.caller.objects
        self.process = objects.process
        self.target = target
        self.spec = spec
        self.number = number

    @property
    def label(self) -> str:
        return self.spec.label

    @property
    def origin(self) -> str:
        return f"{self.label} of {self.target.label}"

    @property
    def producer(self) -> PeerId:
        return self.process.id if self.connection is None else self.connection.remote

    @property
    def _home(self) -> str:
        return str(self.target)

    def facts(self) -> RefFacts:
        found = super().facts()
        return found if found.kind else found._replace(kind=self.spec.declared)

    @property
    def giver(self) -> PeerId | None:
        """The process that stores the value, or makes it, if messages to it from now on arrive after the call."""
        connection = self.connection
        if connection is None or not connection.is_up:
            return None
        if self.status is THERE:
            return connection.remote
        # The result of a call that is being cancelled will be dropped.
        if self.status is not PENDING or self._cancelling or connection.session.is_waiting(self.number):
            return None
        return connection.remote

    def is_relayed_to(self, consumer: PeerId) -> bool:
        """Whether the value is known to be so large that consumers like this one pass it on to each other."""
        if self.stored_bytes <= DIRECT + m.INLINE_LIMIT:
            return False
        return self.process.options.transport != "shm" or not can_share_memory(self.producer, consumer)

    def forward_to(self, consumer: PeerId) -> None:
        if self.connection is not None:
            self.connection.follow()
            self.connection.send(m.forward(self.number, consumer))
            if self.forwarded:
                # The producer may send the value while this process makes the other calls.
                self.connection.flush()
        self.forwarded |= {consumer}

    def doubt_forwards(self) -> None:
        """The connection to the producer is lost: the other processes that wait for the result have to ask for it."""
        for consumer in self.forwarded:
            self.target.caller.connections.to(consumer).send_in_turn(m.ask(self.number))

    @property
    def sink(self) -> UnhandledErrors | None:
        return self.target.sink

    def on_plain(self, value: Any) -> None:
        if self.status is not PENDING:
            return
        self.value = value
        if self.inputs is not None or self._watchers is not None or self.shared or self._cancelling:
            self._settle(HERE)
            return
        self.status = HERE
        if self._waiters is not None:
            self._wake_waiters()

    def on_result(self, received: ReceivedValue) -> None:
        if self.status is not PENDING:
            return
        self.received = received
        if self.inputs is not None or self._watchers is not None or self.shared or self._cancelling or not self.handles:
            self._settle(HERE)
            return
        self.status = HERE
        if self._waiters is not None:
            self._serve_waiters()

    def on_stored(self) -> None:
        self._settle(THERE)

    def _settle(self, status: Status) -> None:
        if self._cancelling and status is not FAILED and not self.settled:
            # The method could not be interrupted, or ignored its cancellation.
            if status is THERE:
                self._release_remote()
            self.value, self.received = ABSENT, None
            why = f"{self.label} was cancelled: it returned a result nevertheless, which was dropped"
            self.on_error(CallCancelled(why, executed=True))
            return
        super()._settle(status)
        if self._timer is not None:
            # A live timer would keep this state and the value.
            self._timer.cancel()
            self._timer = None

    def on_error(self, error: BaseException) -> None:
        if isinstance(error, ActorDied):
            self.target.note_death(error)
        super().on_error(error)

    def on_lost(self, error: DaftError) -> None:
        self.on_error(error)

    def on_away(self, remote: PeerId) -> None:
        """The actor moves, or has moved, to another process."""
        self.on_error(ActorDied(f"{self.target.label} is in another process now", executed=False))

    def _release_remote(self) -> None:
        if self.connection is not None:
            # The next call often follows in this turn: the peer wakes up once for both.
            self.connection.send_soon(m.release(self.number))

    def _cancel(self, why: str) -> bool:
        if self._cancelling:
            return True
        self.expect_cancellation()
        if self.connection is None:
            # If there is no call here either, another thread has not yet handed it over, or the callee is gone.
            unsent = not self.objects.owner.cancel_local(self.number)
        else:
            unsent = self.connection.withdraw(self.number)
            if not unsent:
                self.connection.send(m.cancel(self.number))
        if unsent:
            self.on_error(CallCancelled(f"{self.origin} was cancelled before it was sent: {why}", executed=False))
        else:
            self._give_up_later(why)
        return True

    def expect_cancellation(self) -> None:
        self._cancelling = True
        self.mark_seen()

    def _give_up_later(self, why: str) -> None:
        self._timer = self.process.loop.call_later(self.process.grace, self._give_up, why)

    def _give_up(self, why: str) -> None:
        self.on_error(CallCancelled(f"{self.origin} was cancelled ({why}) and did not end within its grace time"))


class Target:
    __slots__ = ("actor", "caller", "label", "remote", "sink", "stopped")

    state_class: ClassVar[type[CallState]] = CallState

    def __init__(
        self, caller: Caller, remote: PeerId, actor: ActorId, label: str, sink: UnhandledErrors | None
    ) -> None:
        self.caller = caller
        self.remote = remote
        self.actor = actor
        self.label = label
        self.sink = sink
        # The actor was stopped and has refused a call; its process may live.
        self.stopped = False

    def __str__(self) -> str:
        return f"{self.label} in {self.remote}"

    @property
    def process(self) -> Process:
        return self.caller.process

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Target) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    @property
    def identity(self) -> tuple[PeerId, ActorId]:
        return self.remote, self.actor

    @property
    def host(self) -> Target:
        """The actor in whose process it is: itself, or the one that a system actor was named beside."""
        return self

    @property
    def lane(self) -> Target:
        return self

    def call(
        self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any], number: CallId | None = None
    ) -> Ref[Any]:
        """Call a method and return a ref of its result at once. `number`: its id, of a call of a group."""
        if kwargs or not spec.low <= len(args) <= spec.high:
            spec.check(args, kwargs)
        caller = self.caller
        if number is None:
            number = caller.next_number()
        state = self.state_class(self, spec, number)
        if not caller.outgoing.submit_at_once(self, spec, args, kwargs, number, state):
            caller.outgoing.submit(Request(self, spec, args, kwargs, number, WANT_REPLY, state))
        return Ref(state)

    def stream(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Stream[Any]:
        spec.check(args, kwargs)
        number = self.caller.next_number()
        state = StreamState(self.caller.objects, number, spec.label)
        self.caller.outgoing.submit(Request(self, spec, args, kwargs, number, WANT_STREAM, state))
        return Stream(state)

    def tell(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs or not spec.low <= len(args) <= spec.high:
            spec.check(args, kwargs)
        caller, own = self.caller, self.actor < FIRST_USER_ACTOR
        number = caller.next_number()
        if caller.outgoing.submit_at_once(self, spec, args, kwargs, number, None):
            return
        request = Request(self, spec, args, kwargs, number, WANT_NOTHING, TellState(spec.label, own=own))
        if not own:
            caller.outgoing.submit(request)
            return
        # The runtime's own messages do not have the deadline of the code in which they happen.
        with under(None):
            caller.outgoing.submit(request)

    def reduce(self, cls: type) -> tuple[Any, ...]:
        return _rebuild_handle, (self.caller.process.options.cluster, self.remote, self.actor, self.label, cls)

    def health(self) -> Health:
        """The health of the actor, as far as this process knows. Safe in any thread."""
        if self.stopped:
            return Health.LOST
        connections, remote = self.caller.connections, self.remote
        if remote == self.caller.process.id:
            return Health.ALIVE if self.actor in self.caller.actors else Health.LOST
        connection = connections.get(remote)
        if connection is not None and connection.lost is not None:
            return Health.LOST
        if remote in connections.suspects:
            return Health.SUSPECT
        return Health.LEAVING if self.caller.is_draining(remote) else Health.ALIVE

    def facts(self) -> ActorFacts:
        return ActorFacts(self.label, _STATES[self.health()], self.remote)

    def distance(self) -> int:
        """0 if the actor is in this process, 1 if it is on the node that this process belongs to, 2 otherwise."""
        here = self.caller.process.id
        return 0 if self.remote == here else 1 if node_of(self.remote) == node_of(here) else 2

    def note_death(self, error: ActorDied) -> None:
        """The error may be about another actor: the one of an argument or a nested call."""
        if error.executed is False and error.actor == self.label:
            self.stopped = True

    def missed(self, request: Request, connection: Connection | None) -> None:
        """Fail a call because its actor was not found.

        Its process is gone, or (without a connection) this process has no such actor.

        Raises:
            Overloaded: Too many calls are waiting.
        """
        if connection is None:
            request.state.on_error(ActorDied(f"{self.label} was stopped", executed=False))
        else:
            self.caller.process.tasks.create_task(self._explain(request, connection), name="explain a lost actor")

    async def _explain(self, request: Request, connection: Connection) -> None:
        try:
            error = await self.caller.connections.explanation(connection)
        except asyncio.CancelledError:
            request.state.on_error(unsent(self.process.closing))
            raise
        request.state.on_error(loss_for(request.state, error, executed=False))


def loss_for(state: PendingCall, error: DaftError, executed: bool | None) -> DaftError:
    """The error of a lost connection for one call. One that names no actor gets a note of the call."""
    lost = copy_error(error).with_executed(executed)
    if isinstance(lost, PeerLost) and not lost.actor:
        lost.last_method = call = state.label
        if isinstance(state, CallState):
            lost.actor, call = state.target.label, state.origin
        add_note(lost, f"{'not sent' if executed is False else 'under way'}: {call}")
    return lost


@builder
def _rebuild_handle(runtime: PeerId, remote: PeerId, actor: ActorId, label: str, cls: type) -> Any:
    return home_of(runtime, label).part(Caller).handle(remote, actor, label, cls)


class Request:
    terms: Terms | None = None
    stored: StoredValue | None = None
    # The call may be repeated: this releases the encoded arguments.
    again = False
    attempt = 0
    # Its turn came: it is ahead of all calls that still wait here, and is not refused any more.
    had_turn = False
    recorded = False

    def __init__(
        self,
        target: Target,
        spec: MethodSpec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        number: CallId,
        mode: int,
        state: PendingCall,
    ) -> None:
        self.target = target
        self.spec = spec
        self.args = args
        self.kwargs = kwargs
        self.number = number
        self.mode = mode
        self.state = state

    @property
    def lanes(self) -> tuple[Target]:
        return (self.target.lane,)

    def may_go(self) -> bool:
        return True

    def go(self) -> None:
        self.target.caller.sender.turn_came(self)


class TellState:
    """The state of a call without a result.

    Args:
        own: The runtime made it. Its loss is not reported: a process that is gone needs no message, and one that ends
            sends none.
    """

    def __init__(self, label: str, *, own: bool = False) -> None:
        self.label = label
        self._own = own
        self.inputs: list[RefState] | None = None

    def on_plain(self, value: Any) -> None:
        self._over()

    def on_result(self, received: ReceivedValue) -> None:
        self._over()

    def on_stored(self) -> None:
        self._over()

    def _over(self, error: BaseException | None = None) -> None:
        if self.inputs is not None:
            release_inputs(self, error)

    def on_away(self, remote: PeerId) -> None:
        self.on_error(ActorDied("the actor is in another process now", executed=False))

    def on_error(self, error: BaseException) -> None:
        self._over(error)
        if not (self._own and isinstance(error, OutcomeUnknown | RuntimeClosed)):
            log_error(f"{self.label}, called by tell(), failed", error)

    def on_lost(self, error: DaftError) -> None:
        self._over(error)
        if not self._own:
            logger.warning("%s, called by tell(), may not have run: %s", self.label, printable(str(error)))


PendingCall: TypeAlias = CallState | StreamState | TellState


def home_of(runtime: str, label: str) -> Process:
    """The process of the handle that is being unpickled.

    Raises:
        ValueError: The handle was pickled in another runtime.
    """
    process = home()
    if process.options.cluster != runtime:
        raise ValueError(
            f"the handle of {label} belongs to another runtime, that of {runtime}, and this is that of "
            f"{process.runtime_name}: handles work only in their own runtime"
        )
    return process
