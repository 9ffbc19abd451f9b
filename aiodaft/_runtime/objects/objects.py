"""Composes what a process has of values: the store, the refs, the transfers; and reports errors that no code saw."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from aiodaft._protocol.siblings import FailedAwaits
from aiodaft._runtime.connections.connections import Connections
from aiodaft._runtime.objects.owner import ObjectsOwner
from aiodaft._runtime.objects.ref_state import RefState
from aiodaft._runtime.objects.ref_table import RefTable
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.objects.transfer import Transfer
from aiodaft._runtime.platform.error_log import log_error
from aiodaft._runtime.process import Process


class Dropped(Protocol):
    """What a `Ref` object had."""

    def drop_handle(self) -> None:
        """The `Ref` object is gone; on the loop."""
        ...


class Objects:
    """The values of one process."""

    def __init__(self, process: Process, connections: Connections, store: Store, owner: ObjectsOwner) -> None:
        self.process = process
        self.store = store
        self.owner = owner
        self.wakeups = connections.ring_poller.wakeups
        self.refs = RefTable(self, connections)
        self.forget = self.refs.forget
        self.transfer = Transfer(process, connections, store, self.refs, owner.running_call)
        self.pull = self.transfer.pull
        self.failed_awaits: FailedAwaits[weakref.ref[Any]] = FailedAwaits()
        # Reports an error that no code saw and no scope owns.
        self.on_unheld: Callable[[BaseException, str], object] = lambda error, what: log_error(what, error)
        self._dropped: deque[Dropped] = deque()
        self._draining = False

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
        report = self.on_unheld if state.sink is None else state.sink.fail
        report(state.error, f"{state.label} failed, and its ref was dropped before any code saw the error")

    def drop_soon(self, dropped: Dropped) -> None:
        """Call `drop_handle` on the loop; from any thread, also while garbage is collected."""
        self._dropped.append(dropped)
        if not self._draining:
            self._draining = True
            self.process.call_soon(self.drop_now)

    def drop_now(self) -> None:
        """Call `drop_handle` for all `Ref` objects that are gone."""
        self._draining = False
        while self._dropped:
            self._dropped.popleft().drop_handle()
