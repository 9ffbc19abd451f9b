"""What the objects of a process need of its higher parts: agents, calls, threads. Peer implements it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiodaft._protocol.ids import CallId, PeerId
from aiodaft.ref import Ref


class InboundProducer(Protocol):
    """A call that is queued or runs in this process, and makes a value."""

    def add_puller(self, found: Callable[[Any], object]) -> None:
        """Call `found` with the place of the value once the call has ended."""


class ObjectsOwner(Protocol):
    """What the objects need of the process that they belong to."""

    def borrow(self, owner: PeerId, number: CallId) -> Awaitable[object]:
        """Register this process with the owner of a ref."""
        ...

    def give_back(self, owner: PeerId, number: CallId) -> None:
        """Tell the owner of a ref that this process holds the ref no longer."""

    def cancel_remote(self, owner: PeerId, number: CallId) -> None:
        """Ask the owner of a ref to cancel the call that makes its value."""

    def unread_remote(self, producer: PeerId, owner: PeerId, number: CallId) -> Awaitable[object]:
        """Wait until no process reads a value that its producer stores."""
        ...

    def running_call(self, owner: PeerId, number: CallId) -> InboundProducer | None:
        """A call of `owner` that is queued or runs here."""

    def cancel_local(self, number: CallId) -> None:
        """Cancel a call that this process made to itself."""

    def credit_local(self, number: CallId, count: int) -> None:
        """Let a stream method that this process called in itself yield `count` items more."""

    def block_on(self, ref: Ref[Any]) -> Any:
        """Wait for a ref in another thread than the loop's."""
