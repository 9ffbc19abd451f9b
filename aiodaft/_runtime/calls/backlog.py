"""Calls that wait before they are handed to a connection. Each may be cancelled or pass its deadline there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from aiodaft._protocol.ids import CallId, serial_of
from aiodaft._runtime.calls.call import Caller, Request, TellState
from aiodaft._runtime.platform.context import deadline_of
from aiodaft._runtime.serialization.errors import unsent
from aiodaft.exceptions import DeadlineExceeded


class Backlog:
    def __init__(self, caller: Caller, towards: str) -> None:
        self._caller = caller
        self._loop = caller.process.loop
        self._waiting: dict[CallId, tuple[Request, asyncio.TimerHandle | None]] = {}
        # Never connected: it bounds the calls, and withdraws them as the window of a connection does.
        self._connection = caller.connections.make(caller.process.id, towards)

    def admit(self, request: Request) -> bool:
        """Let a call wait, with its arguments as they are now; False if it failed, because an argument has.

        Raises:
            SerializationError: An argument cannot travel.
            Overloaded: Too many calls are waiting.
        """
        number, state, deadline = request.number, request.state, deadline_of(request.terms)
        self._connection.session.submit(number, state, None, admitted=request.had_turn)
        waits = False
        try:
            waits = self._caller.sender.prepare(request)
        finally:
            if not waits:
                self._connection.withdraw(number)
        if waits:
            if not isinstance(state, TellState):
                state.connection = self._connection
            timer = None if deadline is None else self._loop.call_at(deadline, self._expire, request)
            self._waiting[number] = (request, timer)
        return waits

    def take(self, request: Request) -> bool:
        """Take a call out; False if it was cancelled meanwhile, or its deadline passed."""
        self.forget(request.number)
        return self._connection.withdraw(request.number)

    def __len__(self) -> int:
        return len(self._waiting)

    def take_first(self) -> Request | None:
        request, _ = next(iter(self._waiting.values()))
        return request if self.take(request) else None

    def take_all(self) -> Iterator[Request]:
        waiting = (request for request, _ in self._waiting.values())
        return filter(self.take, sorted(waiting, key=lambda request: serial_of(request.number)))

    def forget(self, number: CallId) -> None:
        _, timer = self._waiting.pop(number, (None, None))
        if timer is not None:
            timer.cancel()

    def fail(self, error: BaseException) -> None:
        for request in self.take_all():
            request.state.on_error(unsent(error))

    def _expire(self, request: Request) -> None:
        if self.take(request):
            late = DeadlineExceeded(f"the deadline of {request.spec.label} passed before it was sent", executed=False)
            request.state.on_error(late)
