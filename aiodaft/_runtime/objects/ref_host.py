"""The parts of a process that its refs and streams use."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.objects.value import Borrowing
from aiodaft._protocol.supervision import FailedAwaits
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.platform.error_log import log_error
from aiodaft._runtime.platform.wakeup import Wakeups
from aiodaft._runtime.process import Process
from aiodaft._runtime.serialization.decoder import ReceivedValue
from aiodaft.ref import Ref


class InboundProducer(Protocol):
    """A call that is queued or runs in this process, and makes a value."""

    @property
    def given_up(self) -> bool:
        """Whether its result is not wanted: only its caller reports its end."""
        ...

    def add_puller(self, found: Callable[[Any], object]) -> None: ...


class ObjectsOwner(Protocol):
    def borrow(self, owner: PeerId, number: CallId) -> Awaitable[object]: ...
    def give_back(self, owner: PeerId, number: CallId) -> None: ...
    def cancel_remote(self, owner: PeerId, number: CallId) -> None: ...
    def ended_remote(self, owner: PeerId, number: CallId) -> Awaitable[bool]: ...
    def unread_remote(self, producer: PeerId, owner: PeerId, number: CallId) -> Awaitable[object]: ...
    def running_call(self, owner: PeerId, number: CallId) -> InboundProducer | None: ...
    def cancel_local(self, number: CallId) -> bool: ...
    def credit_local(self, number: CallId, count: int) -> None: ...
    def block_on(self, ref: Ref[Any], timeout: float | None) -> Any: ...


class Dropped(Protocol):
    """The state behind a dropped `Ref` object."""

    def drop_handle(self) -> None:
        """The `Ref` object is gone; on the loop."""


class RefHost:
    """The parts of a process that its refs and streams use."""

    # `Transfer.pull`.
    pull: Callable[..., Awaitable[ReceivedValue]]

    def __init__(self, process: Process, store: Store, owner: ObjectsOwner, wakeups: Wakeups) -> None:
        self.process = process
        self.store = store
        self.owner = owner
        self.wakeups = wakeups
        self.borrowing: Borrowing[Any] = Borrowing(process.id)
        self.failed_awaits: FailedAwaits[weakref.ref[Any]] = FailedAwaits()
        # Reports an error that no code saw and no scope owns.
        self.on_unheld: Callable[[BaseException, str], object] = lambda error, what: log_error(what, error)
        self._dropped: deque[Dropped] = deque()
        self._draining = False

    def drop_soon(self, dropped: Dropped) -> None:
        """Call `drop_handle` on the loop; from any thread, also while garbage is collected."""
        self._dropped.append(dropped)
        if not self._draining:
            self._draining = True
            self.process.call_soon(self.drop_now)

    def drop_now(self) -> None:
        self._draining = False
        while self._dropped:
            self._dropped.popleft().drop_handle()
