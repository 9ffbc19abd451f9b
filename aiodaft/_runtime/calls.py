"""Calls that this process makes."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from aiodaft._protocol.ids import ActorId, CallId, PeerId
from aiodaft._protocol.messages import (
    ADOPTED,
    CALL,
    ERROR,
    RESULT,
    SEND,
    STORED,
    WANT_NOTHING,
    WANT_REPLY,
    WANT_STREAM,
    Message,
)
from aiodaft.exceptions import ActorDied, DaftError, DeadlineExceeded, RemoteProtocolError, RuntimeClosed
from aiodaft.ref import Ref, Stream

from .callers import all_plain
from .failures import add_note, copy_error, decode_error
from .incoming import IncomingCall, current_call
from .pickling import TooLong, home
from .refkinds import CallState
from .refs import RefState, state_of
from .store import Arrived, Kept, Names
from .streams import StreamState

if TYPE_CHECKING:
    from aiodaft.actor import MethodSpec

    from .link import Link
    from .peer import Peer
    from .sinks import ErrorSink

logger = logging.getLogger("aiodaft")


class Pending(Protocol):
    """A call that waits for its answer."""

    inputs: list[RefState] | None

    @property
    def label(self) -> str: ...
    def on_plain(self, value: Any) -> None: ...
    def on_result(self, arrived: Arrived) -> None: ...
    def on_stored(self) -> None: ...
    def on_error(self, error: BaseException) -> None: ...
    def on_lost(self, error: DaftError) -> None: ...


class TellState:
    """A call without a reply: the answer only says that it is over."""

    def __init__(self, label: str) -> None:
        self._label = label
        self.inputs: list[RefState] | None = None

    @property
    def label(self) -> str:
        return self._label

    def _release(self) -> None:
        for state in self.inputs or ():
            state.drop_use()
        self.inputs = None

    def on_plain(self, value: Any) -> None:
        self._release()

    def on_result(self, arrived: Arrived) -> None:
        self._release()

    def on_stored(self) -> None:
        self._release()

    def on_error(self, error: BaseException) -> None:
        self._release()
        logger.error("%s, called by tell(), failed", self.label, exc_info=error)

    def on_lost(self, error: DaftError) -> None:
        self._release()
        logger.warning("%s, called by tell(), may not have run: %s", self.label, error)


State: TypeAlias = CallState | StreamState | TellState


class Target:
    """An actor, as a handle of this process reaches it."""

    __slots__ = ("actor", "label", "peer", "remote", "sink")

    def __init__(self, peer: Peer, remote: PeerId, actor: ActorId, label: str, sink: ErrorSink | None) -> None:
        self.peer = peer
        self.remote = remote
        self.actor = actor
        self.label = label
        # Where errors go that nobody holds.
        self.sink = sink

    def __str__(self) -> str:
        return f"{self.label} in {self.remote}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Target) and (self.remote, self.actor) == (other.remote, other.actor)

    def __hash__(self) -> int:
        return hash((self.remote, self.actor))

    def call(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ref[Any]:
        """Call a method and return a ref of its result at once."""
        if kwargs or not spec.low <= len(args) <= spec.high:
            spec.check(args, kwargs)
        number = self.peer.next_number()
        state = CallState(self, spec, number)
        self.peer.outgoing.submit(self, spec, args, kwargs, state, number, WANT_REPLY)
        return Ref(state)

    def stream(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Stream[Any]:
        """Call a stream method."""
        spec.check(args, kwargs)
        number = self.peer.next_number()
        state = StreamState(self.peer, number, spec.label)
        self.peer.outgoing.submit(self, spec, args, kwargs, state, number, WANT_STREAM)
        return Stream(state)

    def tell(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call a method without a reply."""
        spec.check(args, kwargs)
        number = self.peer.next_number()
        self.peer.outgoing.submit(self, spec, args, kwargs, TellState(spec.label), number, WANT_NOTHING)

    def reduce(self, cls: type) -> tuple[Any, ...]:
        """How a handle is pickled."""
        return _rebuild_handle, (self.remote, self.actor, self.label, cls)


def _rebuild_handle(remote: PeerId, actor: ActorId, label: str, cls: type) -> Any:
    peer: Peer = home()
    return peer.handle(remote, actor, label, cls)


class CallSink(Protocol):
    """What calls are handed to."""

    def submit(
        self,
        target: Target,
        spec: MethodSpec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: State,
        number: CallId,
        mode: int,
    ) -> None: ...


class Outgoing:
    """Sends calls and takes their answers."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def submit(
        self,
        target: Target,
        spec: MethodSpec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: State,
        number: CallId,
        mode: int,
    ) -> None:
        """Send a call; its answer goes to `state`. Never blocks, and raises only what is wrong with the call itself.

        Raises:
            SerializationError: An argument cannot travel.
            RuntimeClosed: The runtime is closed.
            Overloaded: Too many calls are waiting.
        """
        peer = self._peer
        running = asyncio._get_running_loop()
        if running is not peer.loop:
            self._submit_elsewhere(running, target, spec, args, kwargs, state, number, mode)
            return
        if peer.closed is not None:
            raise RuntimeClosed(f"{spec.label} cannot be called: {peer.closed}")
        deadline = peer.deadline()
        if target.remote == peer.id:
            self._submit_local(target, spec, args, kwargs, state, number, mode, deadline)
            return
        link = peer.link_to(target.remote)
        if link.lost is not None:
            peer.tasks.create_task(self._fail_lost(link, state), name="explain a lost actor")
            return
        if not isinstance(state, TellState):
            state.link = link
        if mode == WANT_REPLY and not kwargs and deadline is None and all_plain(args):
            link.submit(number, state, (CALL, number, target.actor, spec.name, args))
        else:
            self._submit_encoded(link, target, spec, args, kwargs, state, number, mode, deadline)

    # The slower ways.

    def _submit_encoded(
        self,
        link: Link,
        target: Target,
        spec: MethodSpec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: State,
        number: CallId,
        mode: int,
        deadline: float | None,
    ) -> None:
        names: Names = [(spec.argument(index), arg) for index, arg in enumerate(args)]
        names += [(f"{name} of {spec.label}", arg) for name, arg in kwargs.items()]
        value = [list(args), kwargs]
        head = (SEND, number, target.actor, spec.name, mode)
        try:
            kept = Kept(self._peer.store.encode(value, names, resolve=True))
        except TooLong:
            link.submit(number, state, None)
            coro = self._encode_then_send(link, head, value, names, state, deadline)
            self._peer.tasks.create_task(coro, name=f"encode the arguments of {spec.label}")
            return
        if not self._use_inputs(kept, state, spec.label):
            return
        if self._peer.store.pack_now(kept):
            link.submit(number, state, self._message(link, head, kept, deadline), kept.encoded.size)
        else:
            link.submit(number, state, None)
            self._peer.tasks.create_task(self._pack_then_send(link, head, kept, state, deadline), name="copy arguments")

    async def _encode_then_send(
        self, link: Link, head: Message, value: Any, names: Names, state: State, deadline: float | None
    ) -> None:
        try:
            kept = Kept(await self._peer.store.encode_anywhere(value, names, resolve=True))
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the call
            if link.session.withdraw(head[1]):
                state.on_error(error)
            return
        if self._use_inputs(kept, state, state.label):
            await self._pack_then_send(link, head, kept, state, deadline)
        else:
            link.session.withdraw(head[1])

    async def _pack_then_send(
        self, link: Link, head: Message, kept: Kept, state: State, deadline: float | None
    ) -> None:
        try:
            await self._peer.store.pack(kept)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the call
            if link.session.withdraw(head[1]):
                state.on_error(error)
            return
        if link.lost is None and link.session.is_waiting(head[1]):
            link.provide(head[1], self._message(link, head, kept, deadline), kept.encoded.size)
        else:
            kept.release()

    def _message(self, link: Link, head: Message, kept: Kept, deadline: float | None) -> Message:
        peer = self._peer
        blobs = kept.blobs_for(link, peer.store.transport)
        # The grant keeps the block until the callee is done with it.
        kept.release()
        left = None if deadline is None else max(0, int((deadline - peer.loop.time()) * 1000))
        refs = tuple(peer.refs.describe(ref) for ref in kept.refs)
        slots = tuple(peer.refs.describe_value(ref) for ref in kept.encoded.slots)
        return (*head, left, kept.payload, blobs, refs, slots)

    def _use_inputs(self, kept: Kept, state: State, label: str) -> bool:
        """Hold the refs among the arguments while the call is under way; False if one has failed already."""
        refs = [*kept.encoded.slots, *kept.refs]
        if not refs:
            return True
        inputs = [state_of(ref) for ref in refs]
        for used in inputs:
            if used.error is not None:
                used.mark_seen()
                error = used.error
                add_note(error, f"needed by {label}, which did not run: its argument is the result of {used.label}")
                state.on_error(error)
                return False
        for used in inputs:
            used.add_use()
        state.inputs = inputs
        return True

    def _submit_local(
        self,
        target: Target,
        spec: MethodSpec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: State,
        number: CallId,
        mode: int,
        deadline: float | None,
    ) -> None:
        """Call an actor of this process: the objects themselves are passed."""
        peer = self._peer
        cell = peer.cells.get(target.actor)
        if cell is None:
            state.on_error(ActorDied(f"{target.label} was stopped", executed=False))
            return
        call = IncomingCall(peer.local_caller, peer.id, number, cell, spec, mode, args)
        call.deadline = deadline
        call.kwargs = kwargs
        peer.local_caller.states[number] = state
        peer.local_caller.calls[number] = call
        peer.hosted.deliver_local(cell, call)

    def _submit_elsewhere(
        self,
        running: asyncio.AbstractEventLoop | None,
        target: Target,
        spec: MethodSpec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: State,
        number: CallId,
        mode: int,
    ) -> None:
        if running is not None:
            raise RuntimeError(f"{spec.label} was called on another event loop than the one its runtime was started on")
        # A `def` method calls another actor: the loop does the sending.
        context = current_call.get()

        def submit() -> None:
            token = current_call.set(context)
            try:
                self.submit(target, spec, args, kwargs, state, number, mode)
            except Exception as error:  # noqa: BLE001 - the caller is in another thread; its ref is where errors go
                state.on_error(error)
            finally:
                current_call.reset(token)

        self._peer.call_soon(submit)

    async def _fail_lost(self, link: Link, state: State) -> None:
        error = copy_error(await self._peer.explanation(link))
        state.on_error(error.with_executed(False))

    # Answers.

    def replied(self, link: Link, message: Message) -> None:
        """REPLY came."""
        _, number, value = message
        state = link.session.settle(number)
        if state is None:
            raise RemoteProtocolError(f"{link.remote} answers call {number}, which is not under way")
        state.on_plain(value)

    def answered(self, link: Link, message: Message) -> None:
        """RESULT, STORED or ERROR came."""
        state = link.session.settle(message[1])
        if state is None:
            raise RemoteProtocolError(f"{link.remote} answers call {message[1]}, which is not under way")
        kind = message[0]
        if kind == RESULT:
            _, _, payload, blobs, refs = message
            if refs:
                self._peer.tasks.create_task(self._adopt_result(link, state, message), name="adopt refs")
            else:
                state.on_result(Arrived(payload, blobs, [], []))
        elif kind == STORED:
            state.on_stored()
        elif kind == ERROR:
            error = decode_error(message[2])
            if isinstance(error, DaftError):
                error.with_executed(message[3])
            state.on_error(error)

    def item_came(self, link: Link, message: Message) -> None:
        """ITEM came."""
        _, number, payload, blobs, refs = message
        state = link.session.calls.get(number)
        if not isinstance(state, StreamState):
            raise RemoteProtocolError(f"{link.remote} sends an item of call {number}, which is no stream under way")
        if refs or isinstance(blobs, tuple):
            # It keeps its place in the stream while its parts are fetched.
            state.on_item(self._peer.tasks.start(self._bring_item(link, message), name="bring an item"))
        else:
            state.on_item(Arrived(payload, blobs, [], []))

    async def _adopt_result(self, link: Link, state: Pending, message: Message) -> None:
        _, number, payload, blobs, refs = message
        adopted = await self._peer.refs.adopt(refs, link)
        link.send((ADOPTED, number))
        state.on_result(Arrived(payload, blobs, [], adopted))

    async def _bring_item(self, link: Link, message: Message) -> Arrived:
        _, number, payload, blobs, refs = message
        arrived = await self._peer.transfer.receive(link, payload, blobs, refs)
        if refs:
            link.send((ADOPTED, number))
        return arrived

    def link_lost(self, link: Link, error: DaftError) -> None:
        """No call over this link will be answered any more."""
        for number, state in list(link.session.calls.items()):
            twin = copy_error(error)
            if link.session.withdraw(number):
                twin.with_executed(False)
            else:
                link.session.settle(number)
            state.on_lost(twin)
