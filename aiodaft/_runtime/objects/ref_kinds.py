"""The kinds of refs: of a call that this process made, of a value it has, of another process, and of a list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.messages import CANCEL, RELEASE
from aiodaft._runtime.objects.ref_state import ABSENT, FAILED, HERE, THERE, RefState, Status, state_of
from aiodaft._runtime.objects.stored import Arrived
from aiodaft.exceptions import ActorDied, CallCancelled, DaftError
from aiodaft.ref import Ref

if TYPE_CHECKING:
    import asyncio

    from aiodaft._runtime.calls.outgoing import Target
    from aiodaft._runtime.connections.connection import Link
    from aiodaft._runtime.objects.into_tensor import Landing
    from aiodaft._runtime.objects.ref_state import ErrorSink
    from aiodaft._runtime.peer import Peer
    from aiodaft.methods import MethodSpec


class CallState(RefState):
    """The result of a call that this process made."""

    # The link that the call went over; none if the actor is in this process.
    link: Link | None = None
    handles = 1
    _cancelling = False
    # Ends the waiting for a call that was cancelled.
    _timer: asyncio.TimerHandle | None = None

    def __init__(self, target: Target, spec: MethodSpec, number: CallId) -> None:
        self.peer = target.peer
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
        return self.peer.id if self.link is None else self.link.remote

    @property
    def sink(self) -> ErrorSink | None:
        return self.target.sink

    def on_plain(self, value: Any) -> None:
        """The answer is a plain value."""
        if self.settled:
            return
        self.value = value
        if self.inputs is not None or self._watchers is not None or self.shared or self._cancelling:
            self._settle(HERE)
            return
        # Nobody but those who wait for the value has to be told.
        self.status = HERE
        self.settled = True
        if self._waiters is not None:
            self._wake_waiters()

    def on_result(self, arrived: Arrived) -> None:
        """The answer is an encoded value."""
        if not self.settled:
            self.arrived = arrived
            self._settle(HERE)

    def on_stored(self) -> None:
        """The value exists, at its producer."""
        self._settle(THERE)

    def _settle(self, status: Status) -> None:
        if self._cancelling and status is not FAILED and not self.settled:
            # It could not be interrupted, or did not let itself be.
            if status is THERE:
                self._release_remote()
            self.value, self.arrived = ABSENT, None
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
        if self.link is not None:
            self.link.send((RELEASE, (self.number,)))

    def _cancel(self, why: str) -> bool:
        """The call settles when the callee says so, or when the grace time is over."""
        if self._cancelling:
            return True
        self.expect_cancellation()
        if self.link is None and self.target.remote == self.peer.id:
            self.peer.cancel_local(self.number)
        elif self.link is None or self.link.withdraw(self.number):
            # Without a link, the callee was gone already, or another thread has not handed the call over yet.
            self.on_error(
                CallCancelled(
                    f"{self.label} of {self.target.label} was cancelled before it was sent: {why}", executed=False
                )
            )
            return True
        else:
            self.link.send((CANCEL, self.number))
        self._give_up_later(why)
        return True

    def expect_cancellation(self) -> None:
        """Somebody asked for it, and is not surprised, however the call ends."""
        self._cancelling = True
        self.mark_seen()

    def _give_up_later(self, why: str) -> None:
        self._timer = self.peer.loop.call_later(self.peer.grace, self._give_up, why)

    def _give_up(self, why: str) -> None:
        what = f"{self.label} of {self.target.label}"
        self.on_error(CallCancelled(f"{what} was cancelled ({why}) and did not end within its grace time"))


class PutState(RefState):
    """A value of this process."""

    handles = 1

    def __init__(self, peer: Peer, number: CallId, value: Any, label: str) -> None:
        self.peer = peer
        self.number = number
        self.value = value
        self._label = label

    @property
    def label(self) -> str:
        return self._label


class BorrowedState(RefState):
    """A ref that another process owns."""

    own = False
    # The owner counts, or is about to count, this process among those that hold it.
    registered = False

    def __init__(self, peer: Peer, owner: PeerId, number: CallId, producer: PeerId, label: str) -> None:
        self.peer = peer
        self.number = number
        self._owner = owner
        self._producer = producer
        self._label = label

    @property
    def label(self) -> str:
        return self._label

    @property
    def producer(self) -> PeerId:
        return self._producer

    @property
    def owner(self) -> PeerId:
        return self._owner

    def free_if_unheld(self) -> None:
        if not self.held:
            self.peer.refs.give_back(self)

    def _cancel(self, why: str) -> bool:
        """Ask the owner to cancel the call."""
        self.peer.refs.cancel_borrowed(self)
        return True

    def _judge_error(self) -> None:
        """Its owner is who has to be told."""


class GatheredState(RefState):
    """A list of values, as one value of this process; passed on as an argument, it is the list of the refs."""

    def __init__(self, peer: Peer, number: CallId, parts: tuple[Ref[Any], ...]) -> None:
        self.peer = peer
        self.number = number
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
        failed = next((part._state for part in self._parts if part._state.error is not None), None)
        # An error that somebody was told of is no news for others.
        known = failed is not None and failed.seen
        for part in self._parts:
            if part._state.error is not None:
                part._state.mark_seen()
        if failed is None or failed.error is None:
            self._settle(HERE)
            return
        if known:
            self.mark_seen()
        self.on_error(failed.error)

    async def bring(self, landing: Landing | None = None) -> list[Any]:
        return [await part for part in self._parts]

    def _cancel(self, why: str) -> bool:
        """Cancel every call of the list."""
        # Each is asked, also after one has said yes.
        return any([part._state.cancel(why) for part in self._parts])  # noqa: C419 - each of them, also after the first
