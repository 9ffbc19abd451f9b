"""The kinds of refs: of a call that this process made, of a value it has, of another process, and of a list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._runtime.objects.ref_state import HERE, RefState, state_of
from aiodaft.ref import Ref

if TYPE_CHECKING:
    from aiodaft._runtime.objects.into_tensor import IntoTensor
    from aiodaft._runtime.peer import Peer


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

    async def bring(self, landing: IntoTensor | None = None) -> list[Any]:
        return [await part for part in self._parts]

    def _cancel(self, why: str) -> bool:
        """Cancel every call of the list."""
        # Each is asked, also after one has said yes.
        return any([part._state.cancel(why) for part in self._parts])  # noqa: C419 - each of them, also after the first
