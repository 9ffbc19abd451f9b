"""Reports events of a device to the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeAlias

from aiodaft_transport.cuda.device import Driver, Event
from aiodaft_transport.exceptions import TransportError

# Seconds in which most copies end; each turn of the loop asks.
_EAGER: Final = 0.0002
# Seconds between later questions. Timers of the loops are no finer.
_PATIENT: Final = 0.001

Happened: TypeAlias = Callable[[TransportError | None], object]


class EventWatch:
    """Reports events of a device on the running loop.

    A device has nothing that a loop could wait on, short of a function that it calls in the middle of the user's
    stream, and never calls if it has failed. So it is asked, which never waits, as long as something is awaited.
    """

    def __init__(self, driver: Callable[[], Driver]) -> None:
        self._driver = driver
        self._awaited: dict[Event, Happened] = {}
        self._eager_until = 0.0
        self.timer: asyncio.Handle | None = None
        # Number of questions to devices.
        self.questions = 0

    def add(self, event: Event, on_happened: Happened) -> None:
        """Call back once the event has happened or failed; at once if it has already."""
        self._awaited[event] = on_happened
        self._ask(event)
        if event in self._awaited:
            self._eager_until = asyncio.get_running_loop().time() + _EAGER
            self._stop()
            self._ask_again()

    def finish(self) -> None:
        """Wait for all events. Blocks."""
        self._stop()
        for event in list(self._awaited):
            self._driver().wait(event)
            self._ask(event)

    def _stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _turn(self) -> None:
        self.timer = None
        for event in list(self._awaited):
            self._ask(event)
        if self._awaited:
            self._ask_again()

    def _ask_again(self) -> None:
        if self.timer is not None:
            return
        loop = asyncio.get_running_loop()
        eager = loop.time() < self._eager_until
        self.timer = loop.call_soon(self._turn) if eager else loop.call_later(_PATIENT, self._turn)

    def _ask(self, event: Event) -> None:
        self.questions += 1
        error: TransportError | None = None
        try:
            if not self._driver().happened(event):
                return
        except TransportError as caught:
            error = caught
        on_happened = self._awaited.pop(event)
        self._driver().forget(event)
        on_happened(error)
