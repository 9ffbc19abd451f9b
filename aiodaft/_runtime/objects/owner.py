"""The interface of objects to the higher parts of a process: agents, calls, threads. `Peer` implements it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiodaft._protocol.ids import CallId, PeerId
from aiodaft.ref import Ref


class InboundProducer(Protocol):
    """A call that is queued or runs in this process, and makes a value."""

    @property
    def given_up(self) -> bool:
        """Whether its result is not wanted: only its caller reports its end."""
        ...

    def add_puller(self, found: Callable[[Any], object]) -> None:
        """Call `found` with the place of the value once the call has ended."""


class ObjectsOwner(Protocol):
    """The view that objects have of their process."""

    def borrow(self, owner: PeerId, number: CallId) -> Awaitable[object]: ...
    def give_back(self, owner: PeerId, number: CallId) -> None: ...
    def cancel_remote(self, owner: PeerId, number: CallId) -> None: ...
    def ended_remote(self, owner: PeerId, number: CallId) -> Awaitable[bool]: ...
    def unread_remote(self, producer: PeerId, owner: PeerId, number: CallId) -> Awaitable[object]: ...
    def running_call(self, owner: PeerId, number: CallId) -> InboundProducer | None: ...
    def cancel_local(self, number: CallId) -> bool: ...
    def credit_local(self, number: CallId, count: int) -> None: ...
    def block_on(self, ref: Ref[Any], timeout: float | None) -> Any: ...
