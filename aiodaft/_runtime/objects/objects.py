"""The values of one process: stored, received, and the refs to them."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._protocol.siblings import FailedAwaits
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.objects.into_tensor import IntoTensor
from aiodaft._runtime.objects.owner import ObjectsOwner
from aiodaft._runtime.objects.received import ReceivedValue
from aiodaft._runtime.objects.ref_state import RefState
from aiodaft._runtime.objects.ref_table import RefTable
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.objects.transfer import Transfer
from aiodaft._runtime.platform.error_log import log_error
from aiodaft._runtime.process import Process


class Dropped(Protocol):
    """What an object that garbage collection found leaves to be done."""

    def drop_handle(self) -> None:
        """Do it, on the loop."""
        ...


class Objects:
    """The store, the refs and the transfers of one process."""

    def __init__(self, process: Process, connections: Connections, store: Store, owner: ObjectsOwner) -> None:
        self.process = process
        self.store = store
        self.owner = owner
        self.wakeups = connections.ring_poller.wakeups
        self.failed_awaits: FailedAwaits[weakref.ref[Any]] = FailedAwaits()
        self.refs = RefTable(self, connections)
        self.transfer = Transfer(process, connections, store, self.refs, owner.running_call)
        # Reports an error that no code saw and no scope owns.
        self.on_unheld: Callable[[BaseException, str], object] = lambda error, what: log_error(what, error)
        self._dropped: deque[Dropped] = deque()
        self._draining = False

    async def pull(
        self, owner: PeerId, number: CallId, producer: PeerId, into: IntoTensor | None = None
    ) -> ReceivedValue:
        """Get a value; see `Transfer.pull`."""
        return await self.transfer.pull(owner, number, producer, into)

    def forget(self, state: RefState) -> None:
        """A ref of this process is freed."""
        self.refs.forget(state)

    def report_unheld(self, state: RefState) -> None:
        """Report the error of a ref that was dropped before any code saw the error."""
        assert state.error is not None
        excused = state.maker is not None and self.failed_awaits.excuse(
            state.maker, state.number, state.failed, state.dropped
        )
        if excused:
            why = "its ref was dropped after the await of another call of the same task had failed"
            log_error(f"{state.label} failed as well; {why}", state.error, logging.INFO)
            return
        what = f"{state.label} failed, and its ref was dropped before any code saw the error"
        report = self.on_unheld if state.sink is None else state.sink.fail
        report(state.error, what)

    def drop_soon(self, dropped: Dropped) -> None:
        """A `Ref` object is gone; from any thread, also while garbage is collected."""
        self._dropped.append(dropped)
        if not self._draining:
            self._draining = True
            self.process.call_soon(self.drop_now)

    def drop_now(self) -> None:
        """Do what the `Ref` objects that are gone leave to be done."""
        self._draining = False
        while self._dropped:
            self._dropped.popleft().drop_handle()
