"""Drives a UCX worker by the event loop: its descriptor wakes it, not a timer, a thread or a busy loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeAlias

from aiodaft_transport.ucx.ucp import Library, Worker

# Seconds that closing waits, at most, for operations in flight. They need milliseconds: two pieces of each transfer.
_CLOSE_TIME: Final = 5.0

logger: Final = logging.getLogger("aiodaft")

Completed: TypeAlias = Callable[[int], object]


class Endpoint(NamedTuple):
    """A connection to one peer's worker, until `Driver.disconnect`."""

    handle: int
    number: int


class Driver:
    """Makes progress on the running loop. Call everything on that loop, except `worker.unregister`."""

    def __init__(self, library: Library, options: Mapping[str, str], turn_seconds: float) -> None:
        self.worker = Worker(library, options)
        # `progress` itself copies between processes; after so many seconds the rest of the loop gets its turn.
        self._turn_seconds = turn_seconds
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Completed] = {}
        self._endpoints: dict[int, tuple[Endpoint, Completed]] = {}
        self._turning = False
        self._scheduled = False
        self._closed = False
        # Number of turns.
        self.turns = 0
        self._loop.add_reader(self.worker.event_fd, self.turn)

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    def connect(self, address: bytes, on_failed: Completed) -> Endpoint:
        """Make an endpoint to a peer's worker; UCX calls `on_failed` if it notices that the peer is gone."""
        number = next(self._numbers)
        endpoint = Endpoint(self.worker.connect(address, number), number)
        self._endpoints[number] = endpoint, on_failed
        # Later: the caller must have the endpoint before `on_failed` is called.
        self._turn_soon()
        return endpoint

    def disconnect(self, endpoint: Endpoint) -> None:
        if self._endpoints.pop(endpoint.number, None) is None:
            return
        number = next(self._numbers)
        if not self.worker.disconnect(endpoint.handle, number):
            self._waiting[number] = lambda status: None
        self.turn()

    def get(
        self, endpoint: Endpoint, target: int, nbytes: int, source: int, rkey: int, memory: int, on_completed: Completed
    ) -> bool:
        """Begin to copy a peer's memory here, as `Worker.get`; True if it is done, else `on_completed` gets the status.

        The memory at both ends and the key must stay valid until then.
        """
        number = next(self._numbers)
        if self.worker.get(endpoint.handle, target, nbytes, source, rkey, memory, number):
            return True
        self._waiting[number] = on_completed
        return False

    def turn(self) -> None:
        """Do the pending work, for `turn_seconds` at most; the rest follows in the next turn of the loop."""
        if self._turning or self._scheduled or self._closed:
            # The turn that called a callback continues its operations; operations begun together share a turn.
            return
        self._turning = True
        self.turns += 1
        try:
            self._work()
        finally:
            self._turning = False

    def _work(self) -> None:
        worker = self.worker
        until = time.perf_counter() + self._turn_seconds
        while not self._closed:
            busy = worker.progress()
            if worker.completed or worker.failed:
                self._settle()
            elif not busy and worker.arm():
                return
            if time.perf_counter() >= until:
                self._turn_soon()
                return

    def _turn_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._scheduled_turn)

    def _scheduled_turn(self) -> None:
        self._scheduled = False
        self.turn()

    def _settle(self) -> None:
        completed, failed = self.worker.completed, self.worker.failed
        while completed:
            number, status = completed.popleft()
            self._waiting.pop(number)(status)
        while failed:
            number, status = failed.popleft()
            known = self._endpoints.get(number)
            if known is not None:
                known[1](status)

    def close(self) -> None:
        """Fail the operations in flight, and free everything. Afterwards UCX accesses no memory. Idempotent."""
        if self._closed:
            return
        for endpoint, _ in list(self._endpoints.values()):
            self.disconnect(endpoint)
        quiet = self._quieten()
        self._closed = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self.worker.event_fd)
        if quiet:
            self.worker.destroy()
        else:
            # UCX would abort the process if it were destroyed now. The memory of the operations is never freed.
            logger.error("UCX still has operations in flight; its worker and their memory are not freed")

    def _quieten(self) -> bool:
        until = time.perf_counter() + _CLOSE_TIME
        while time.perf_counter() < until:
            busy = self.worker.progress()
            if self.worker.completed or self.worker.failed:
                self._settle()
            elif not busy and not self._waiting and self.worker.arm():
                # A worker can be armed only if it has no work left, also none of closed endpoints.
                return True
        return False
