"""Calls that this process makes: their targets, requests and states."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from aiodaft._protocol import messages as m
from aiodaft._protocol.ids import FIRST_USER_ACTOR, ActorId, CallId, PeerId
from aiodaft._protocol.liveness import Health
from aiodaft._protocol.messages import (
    RELEASE,
    WANT_NOTHING,
    WANT_REPLY,
    WANT_STREAM,
)
from aiodaft._protocol.value import FAILED, HERE, PENDING, THERE, Status
from aiodaft._runtime.objects.received import ReceivedValue
from aiodaft._runtime.objects.ref_state import ABSENT, RefState, release_inputs
from aiodaft._runtime.objects.stored import StoredValue
from aiodaft._runtime.objects.streams import StreamState
from aiodaft._runtime.platform.error_log import log_error, printable
from aiodaft._runtime.platform.tasks import logger
from aiodaft._runtime.serialization.errors import copy_error
from aiodaft._runtime.serialization.pickling import home
from aiodaft.exceptions import (
    ActorDied,
    CallCancelled,
    DaftError,
    OutcomeUnknown,
)
from aiodaft.ref import Ref, Stream

if TYPE_CHECKING:
    from aiodaft._runtime.connections.connection import Connection
    from aiodaft._runtime.objects.ref_state import UnhandledErrors
    from aiodaft._runtime.peer import Peer
    from aiodaft._runtime.process import Process
    from aiodaft.methods import MethodSpec


class CallState(RefState):
    """The result of a call that this process made."""

    # The connection that the call went over; none if the actor is in this process.
    connection: Connection | None = None
    handles = 1
    _cancelling = False
    # Ends the waiting for a call that was cancelled.
    _timer: asyncio.TimerHandle | None = None

    def __init__(self, target: Target, spec: MethodSpec, number: CallId) -> None:
        self.objects = objects = target.peer.objects
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
    def sink(self) -> UnhandledErrors | None:
        return self.target.sink

    def on_plain(self, value: Any) -> None:
        """The answer is a plain value."""
        if self.status is not PENDING:
            return
        self.value = value
        if self.inputs is not None or self._watchers is not None or self.shared or self._cancelling:
            self._settle(HERE)
            return
        # Nobody but those who wait for the value has to be told.
        self.status = HERE
        if self._waiters is not None:
            self._wake_waiters()

    def on_result(self, received: ReceivedValue) -> None:
        """The answer is an encoded value."""
        if not self.settled:
            self.received = received
            self._settle(HERE)

    def on_stored(self) -> None:
        """The value exists, at its producer."""
        self._settle(THERE)

    def _settle(self, status: Status) -> None:
        if self._cancelling and status is not FAILED and not self.settled:
            # It could not be interrupted, or did not let itself be.
            if status is THERE:
                self._release_remote()
            self.value, self.received = ABSENT, None
            why = f"{self.label} was cancelled: it ended all the same, and its result was dropped"
            self.on_error(CallCancelled(why, executed=True))
            return
        super()._settle(status)
        if self._timer is not None:
            # It would keep this, and the value, until then.
            self._timer.cancel()
            self._timer = None

    def on_error(self, error: BaseException) -> None:
        """There will be no value."""
        if isinstance(error, ActorDied):
            self.target.note_death(error)
        super().on_error(error)

    def on_lost(self, error: DaftError) -> None:
        """The connection to the callee ended before it answered."""
        self.on_error(error)

    def _release_remote(self) -> None:
        if self.connection is not None:
            self.connection.send((RELEASE, (self.number,)))

    def _cancel(self, why: str) -> bool:
        """The call settles when the callee says so, or when the grace time is over."""
        if self._cancelling:
            return True
        self.expect_cancellation()
        if self.connection is None and self.target.remote == self.process.id:
            self.objects.owner.cancel_local(self.number)
        elif self.connection is None or self.connection.withdraw(self.number):
            # Without a connection, the callee was gone already, or another thread has not handed the call over yet.
            self.on_error(
                CallCancelled(
                    f"{self.label} of {self.target.label} was cancelled before it was sent: {why}", executed=False
                )
            )
            return True
        else:
            self.connection.send(m.cancel(self.number))
        self._give_up_later(why)
        return True

    def expect_cancellation(self) -> None:
        """Somebody asked for it, and is not surprised, however the call ends."""
        self._cancelling = True
        self.mark_seen()

    def _give_up_later(self, why: str) -> None:
        self._timer = self.process.loop.call_later(self.process.grace, self._give_up, why)

    def _give_up(self, why: str) -> None:
        what = f"{self.label} of {self.target.label}"
        self.on_error(CallCancelled(f"{what} was cancelled ({why}) and did not end within its grace time"))


class Target:
    """An actor, as a handle of this process reaches it."""

    __slots__ = ("actor", "label", "peer", "remote", "sink", "stopped")

    def __init__(self, peer: Peer, remote: PeerId, actor: ActorId, label: str, sink: UnhandledErrors | None) -> None:
        self.peer = peer
        self.remote = remote
        self.actor = actor
        self.label = label
        # Where errors go that nobody holds.
        self.sink = sink
        # The actor was stopped, and a call was refused for that; its process may live.
        self.stopped = False

    def __str__(self) -> str:
        return f"{self.label} in {self.remote}"

    @property
    def process(self) -> Process:
        """The process that the handle belongs to."""
        return self.peer.process

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Target) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    @property
    def identity(self) -> tuple[PeerId, ActorId]:
        """What the actor is known by, for as long as it lives."""
        return self.remote, self.actor

    @property
    def lane(self) -> Target:
        """Where what this process submits to the actor waits for its turn."""
        return self

    def call(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ref[Any]:
        """Call a method and return a ref of its result at once."""
        if kwargs or not spec.low <= len(args) <= spec.high:
            spec.check(args, kwargs)
        number = self.peer.process.next_number()
        state = CallState(self, spec, number)
        self.peer.outgoing.submit(Request(self, spec, args, kwargs, number, WANT_REPLY, state))
        return Ref(state)

    def stream(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Stream[Any]:
        """Call a stream method."""
        spec.check(args, kwargs)
        number = self.peer.process.next_number()
        state = StreamState(self.peer.objects, number, spec.label)
        self.peer.outgoing.submit(Request(self, spec, args, kwargs, number, WANT_STREAM, state))
        return Stream(state)

    def tell(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call a method without a reply."""
        spec.check(args, kwargs)
        number = self.peer.process.next_number()
        state = TellState(spec.label, own=self.actor < FIRST_USER_ACTOR)
        self.peer.outgoing.submit(Request(self, spec, args, kwargs, number, WANT_NOTHING, state))

    def reduce(self, cls: type) -> tuple[Any, ...]:
        """How a handle is pickled."""
        return _rebuild_handle, (self.peer.process.options.home, self.remote, self.actor, self.label, cls)

    def health(self) -> Health:
        """What this process knows of the actor without a question to another process. Safe in any thread.

        Returns:
            ALIVE: a call goes to the actor. SUSPECT: a call may have to wait, because the actor is restarted or its
            process does not answer. LOST: a call fails at once.
        """
        if self.stopped:
            return Health.LOST
        peer, remote = self.peer, self.remote
        if remote == peer.process.id:
            return Health.ALIVE if self.actor in peer.actors else Health.LOST
        connection = peer.connections.get(remote)
        if connection is not None and connection.lost is not None:
            return Health.LOST
        return Health.SUSPECT if remote in peer.connections.suspects else Health.ALIVE

    def note_death(self, error: ActorDied) -> None:
        """A call failed with this; an argument or a nested call may speak of another actor's death."""
        if error.executed is False and error.actor == self.label:
            self.stopped = True

    def missed(self, request: Request, connection: Connection | None) -> None:
        """The actor is not where a call was to go.

        Its process is gone, or (without a connection) is this one and has no such actor.

        Raises:
            Overloaded: Too many calls are waiting.
        """
        if connection is None:
            request.state.on_error(ActorDied(f"{self.label} was stopped", executed=False))
        else:
            self.peer.process.tasks.create_task(self._explain(request, connection), name="explain a lost actor")

    async def _explain(self, request: Request, connection: Connection) -> None:
        error = copy_error(await self.peer.connections.explanation(connection))
        request.state.on_error(error.with_executed(False))


def _rebuild_handle(runtime: PeerId, remote: PeerId, actor: ActorId, label: str, cls: type) -> Any:
    peer = home_of(runtime, label)
    return peer.handle(remote, actor, label, cls)


class Request:
    """A call to be made."""

    # Defaults live in the class: most calls are made once, and at once.
    # On the loop's clock.
    deadline: float | None = None
    # Where the caller's work on accelerators goes, if the arguments could not be encoded at once.
    streams: Sequence[Any] | None = None
    # The encoded arguments, until they are sent.
    kept: StoredValue | None = None
    # The call may have to be made again: they are kept after that, and whoever says so releases them.
    again = False
    # How often it was made before.
    attempt = 0
    # It was handed on once: what still waits in this process was submitted after it, and nothing refuses it any more.
    had_turn = False

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
        # Who waits for the answer.
        self.state = state

    # As an entry of `Order`.

    @property
    def lanes(self) -> tuple[Target]:
        """The actor that it calls."""
        return (self.target.lane,)

    def may_go(self) -> bool:
        """It waits for nothing but its turn."""
        return True

    def go(self) -> None:
        """Its turn has come."""
        self.target.peer.sender.turn_came(self)


class CallSink(Protocol):
    """What calls are handed to."""

    def submit(self, request: Request) -> None: ...


class TellState:
    """A call without a reply: the answer only says that it is over.

    Args:
        label: What was called.
        own: The runtime made it: a process that is gone needs no message, so that its loss is no news.
    """

    def __init__(self, label: str, *, own: bool = False) -> None:
        self.label = label
        self._own = own
        self.inputs: list[RefState] | None = None

    def on_plain(self, value: Any) -> None:
        release_inputs(self, failed=False)

    def on_result(self, received: ReceivedValue) -> None:
        release_inputs(self, failed=False)

    def on_stored(self) -> None:
        release_inputs(self, failed=False)

    def on_error(self, error: BaseException) -> None:
        release_inputs(self, failed=True)
        if not (self._own and isinstance(error, OutcomeUnknown)):
            log_error(f"{self.label}, called by tell(), failed", error)

    def on_lost(self, error: DaftError) -> None:
        release_inputs(self, failed=True)
        if not self._own:
            logger.warning("%s, called by tell(), may not have run: %s", self.label, printable(str(error)))


# What waits for an answer.
PendingCall: TypeAlias = CallState | StreamState | TellState


def home_of(runtime: PeerId, label: str) -> Peer:
    """The peer of the handle that is being unpickled.

    Raises:
        ValueError: The handle was pickled in another runtime.
    """
    from aiodaft._runtime.peer import Peer  # noqa: PLC0415 - until calls know what to ask for

    peer = home().part(Peer)
    if peer.process.options.home != runtime:
        raise ValueError(
            f"the handle of {label} belongs to another runtime, that of {runtime}, and this is that of "
            f"{peer.process.runtime_name}: handles lead nowhere outside of their runtime"
        )
    return peer
