"""Calls that this process makes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from aiodaft._protocol.ids import ActorId, CallId, PeerId
from aiodaft._protocol.messages import CALL, SEND, WANT_NOTHING, WANT_REPLY, WANT_STREAM, Message
from aiodaft.exceptions import ActorDied, RuntimeClosed
from aiodaft.ref import Ref, Stream

from .callers import all_plain
from .failures import add_note, copy_error
from .incoming import IncomingCall, current_call
from .kept import Kept
from .pickling import TooLong, home
from .refkinds import CallState
from .refs import state_of
from .replies import State, TellState
from .serialization import Names
from .streams import StreamState

if TYPE_CHECKING:
    from aiodaft.methods import MethodSpec

    from .link import Link
    from .peer import Peer
    from .sinks import ErrorSink


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
        self.peer.outgoing.submit(Request(self, spec, args, kwargs, number, WANT_REPLY, state))
        return Ref(state)

    def stream(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Stream[Any]:
        """Call a stream method."""
        spec.check(args, kwargs)
        number = self.peer.next_number()
        state = StreamState(self.peer, number, spec.label)
        self.peer.outgoing.submit(Request(self, spec, args, kwargs, number, WANT_STREAM, state))
        return Stream(state)

    def tell(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call a method without a reply."""
        spec.check(args, kwargs)
        number = self.peer.next_number()
        request = Request(self, spec, args, kwargs, number, WANT_NOTHING, TellState(spec.label))
        self.peer.outgoing.submit(request)

    def reduce(self, cls: type) -> tuple[Any, ...]:
        """How a handle is pickled."""
        return _rebuild_handle, (self.remote, self.actor, self.label, cls)


def _rebuild_handle(remote: PeerId, actor: ActorId, label: str, cls: type) -> Any:
    peer: Peer = home()
    return peer.handle(remote, actor, label, cls)


@dataclass(slots=True, eq=False)
class Request:
    """A call to be made."""

    target: Target
    spec: MethodSpec
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: CallId
    mode: int
    # Who waits for the answer.
    state: State
    # On the loop's clock.
    deadline: float | None = None


class CallSink(Protocol):
    """What calls are handed to."""

    def submit(self, request: Request) -> None: ...


class Outgoing:
    """Sends calls."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def submit(self, request: Request) -> None:
        """Send a call; its answer goes to `request.state`. Never blocks, and raises only what is wrong with the call.

        Raises:
            SerializationError: An argument cannot travel.
            RuntimeClosed: The runtime is closed.
            Overloaded: Too many calls are waiting.
        """
        peer = self._peer
        running = asyncio._get_running_loop()
        if running is not peer.loop:
            self._submit_elsewhere(running, request)
            return
        if peer.closed is not None:
            raise RuntimeClosed(f"{request.spec.label} cannot be called: {peer.closed}")
        target, state, args = request.target, request.state, request.args
        request.deadline = deadline = peer.deadline()
        if target.remote == peer.id:
            self._submit_local(request)
            return
        link = peer.link_to(target.remote)
        if link.lost is not None:
            peer.tasks.create_task(self._fail_lost(link, state), name="explain a lost actor")
            return
        if not isinstance(state, TellState):
            state.link = link
        if request.mode == WANT_REPLY and not request.kwargs and deadline is None and all_plain(args):
            link.submit(request.number, state, (CALL, request.number, target.actor, request.spec.name, args))
        else:
            self._submit_encoded(link, request)

    # The slower ways.

    def _submit_encoded(self, link: Link, request: Request) -> None:
        spec, number, state = request.spec, request.number, request.state
        parts = [(spec.argument(index), arg) for index, arg in enumerate(request.args)]
        names = Names(spec.label, (*parts, *request.kwargs.items()))
        value = [list(request.args), request.kwargs]
        try:
            kept = self._peer.store.keep(value, names, resolve=True)
        except TooLong:
            link.submit(number, state, None)
            coro = self._encode_then_send(link, request, value, names, self._peer.store.current_streams())
            self._peer.tasks.create_task(coro, name=f"encode the arguments of {spec.label}")
            return
        if not self._use_inputs(kept, request):
            return
        if self._peer.store.pack_now(kept) and kept.ready:
            link.submit(number, state, self._message(link, request, kept), kept.encoded.size)
        else:
            link.submit(number, state, None)
            self._peer.tasks.create_task(self._pack_then_send(link, request, kept), name="copy arguments")

    async def _encode_then_send(
        self, link: Link, request: Request, value: Any, names: Names, streams: Sequence[Any]
    ) -> None:
        try:
            kept = await self._peer.store.keep_anywhere(value, names, resolve=True, streams=streams)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the call
            self._fail_unsent(link, request, error)
            return
        if self._use_inputs(kept, request):
            await self._pack_then_send(link, request, kept)
        else:
            link.session.withdraw(request.number)

    async def _pack_then_send(self, link: Link, request: Request, kept: Kept) -> None:
        try:
            await self._peer.store.make_ready(kept)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the call
            self._fail_unsent(link, request, error)
            return
        if link.lost is not None or not link.session.is_waiting(request.number):
            kept.release()
            return
        try:
            message = self._message(link, request, kept)
        except Exception as error:  # noqa: BLE001 - a lent buffer was written to, or there is no descriptor left
            kept.release()
            self._fail_unsent(link, request, error)
        else:
            link.provide(request.number, message, kept.encoded.size)

    def _fail_unsent(self, link: Link, request: Request, error: Exception) -> None:
        # If it is not there any more, it was cancelled.
        if link.session.withdraw(request.number):
            request.state.on_error(error)

    def _message(self, link: Link, request: Request, kept: Kept) -> Message:
        peer, deadline = self._peer, request.deadline
        blobs = kept.blobs_for(link)
        # The grant keeps the block until the callee is done with it.
        kept.release()
        left = None if deadline is None else max(0, int((deadline - peer.loop.time()) * 1000))
        refs = tuple(peer.refs.describe(ref) for ref in kept.refs)
        slots = peer.refs.describe_values(kept.encoded.slots)
        head = (SEND, request.number, request.target.actor, request.spec.name, request.mode)
        return (*head, left, kept.payload, blobs, refs, slots)

    def _use_inputs(self, kept: Kept, request: Request) -> bool:
        """Hold the refs among the arguments while the call is under way; False if one has failed already."""
        refs = [*kept.encoded.slots, *kept.refs]
        if not refs:
            return True
        inputs = [state_of(ref) for ref in refs]
        for used in inputs:
            if used.error is not None:
                used.mark_seen()
                what = f"needed by {request.spec.label}, which did not run: its argument is the result of {used.label}"
                add_note(used.error, what)
                request.state.on_error(used.error)
                return False
        for used in inputs:
            used.add_use()
        request.state.inputs = inputs
        return True

    def _submit_local(self, request: Request) -> None:
        """Call an actor of this process: the objects themselves are passed."""
        peer, target = self._peer, request.target
        cell = peer.cells.get(target.actor)
        if cell is None:
            request.state.on_error(ActorDied(f"{target.label} was stopped", executed=False))
            return
        caller = peer.local_caller
        call = IncomingCall(caller, peer.id, request.number, cell, request.spec, request.mode, request.args)
        call.deadline = request.deadline
        call.kwargs = request.kwargs
        caller.states[request.number] = request.state
        caller.calls[request.number] = call
        peer.hosted.deliver_local(cell, call)

    def _submit_elsewhere(self, running: asyncio.AbstractEventLoop | None, request: Request) -> None:
        if running is not None:
            label = request.spec.label
            raise RuntimeError(f"{label} was called on another event loop than the one its runtime was started on")
        # A `def` method calls another actor: the loop does the sending.
        context = current_call.get()

        def submit() -> None:
            token = current_call.set(context)
            try:
                self.submit(request)
            except Exception as error:  # noqa: BLE001 - the caller is in another thread; its ref is where errors go
                request.state.on_error(error)
            finally:
                current_call.reset(token)

        self._peer.call_soon(submit)

    async def _fail_lost(self, link: Link, state: State) -> None:
        error = copy_error(await self._peer.explanation(link))
        state.on_error(error.with_executed(False))
